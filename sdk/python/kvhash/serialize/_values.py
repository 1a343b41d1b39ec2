"""What a block hash preimage is made of, with object identity said explicitly.

Pickle writes an object that it has met before as a back-reference, so equal values give different bytes
depending on whether they are the *same object*. Python's own strings hide that (small ones are shared by the
interpreter, others by accident), so it is said here: a plain ``str`` or ``bytes`` is a fresh object at every
place where it stands, and a `Ref` is one object wherever that same `Ref` instance stands.

CBOR has no identity; there a `Ref` is its value.
"""

from __future__ import annotations

from typing import TypeAlias

__all__ = ["Ref", "Value"]


class Ref:
    """One text or bytes object that may stand in several places of one preimage.

    From vLLM 0.31 the tag ``"mm"`` is such an object: it is one constant in vLLM's code, so its second use in a
    block is a back-reference, while two equal image identifiers came over the wire as two objects.
    """

    __slots__ = ("value",)

    def __init__(self, value: str | bytes) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Ref({self.value!r})"


#: A value that can be part of a preimage.
Value: TypeAlias = "None | int | str | bytes | Ref | tuple[Value, ...]"
