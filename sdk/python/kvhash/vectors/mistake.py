"""The base of every known mistake: a hasher that is right until a subclass gets one step wrong."""

from __future__ import annotations

from .plain import PlainHasher

__all__ = ["Mistake"]


class Mistake(PlainHasher):
    """Base of the wrong hashers: ``name`` is its stable name, ``said`` tells a port's author what it does.

    ``shows_in``: the request's fields of which one must be there for the mistake to show (empty: none needs to);
    ``serialization``: the one that it is about, if it is about one; ``seldom``: it shows in the vectors only that
    were made for it, so the others need not try it.
    """

    name = ""
    shows_in: tuple[str, ...] = ()
    serialization = ""
    said = ""
    cost = "every lookup misses"
    seldom = False
