"""Text of others (a program's answers, a foreign corpus) made safe to print: nothing in it commands a terminal."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["printable_json", "visible"]


def visible(text: str) -> str:
    """Return text with everything written out that a terminal would not show: controls, line ends, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_json(value: Any, *, indent: int | None = None) -> str:
    """Return JSON whose every character but line ends prints. It reads back as `value`, lone surrogates aside.

    A lone surrogate is no text, and readers differ on its escape: it is written out as text.
    """
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return "".join(c if c.isprintable() or c == "\n" else _escape(c) for c in text)


def _escape(c: str) -> str:
    return rf"\\u{ord(c):04x}" if "\ud800" <= c <= "\udfff" else json.dumps(c)[1:-1]
