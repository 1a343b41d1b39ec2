"""Server-sent events as engines stream them: whole events out of any pieces, and what the router reads in them."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["EventCutter", "error_event", "is_done", "usage_in"]


#: How an empty line, which ends an event, can follow a line.
_BLANK_LINES = (b"\n\n", b"\n\r\n", b"\r\r")


class EventCutter:
    """Cuts a stream behind its last whole event, so that what is passed on never ends within one."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """Return the whole events up to here; keep the rest."""
        data = self._rest + piece if self._rest else piece
        end = max(_after(data, mark) for mark in _BLANK_LINES)
        self._rest = data[end:]
        return data[:end]

    @property
    def rest(self) -> bytes:
        """What came behind the last whole event."""
        return self._rest


_DONE = (b"data: [DONE]", b"data:[DONE]")


def _after(data: bytes, mark: bytes) -> int:
    at = data.rfind(mark)
    return 0 if at < 0 else at + len(mark)


def is_done(events: bytes) -> bool:
    """Whether the end mark is among the events."""
    # The bytes alone may be a part of the text that is generated.
    return b"[DONE]" in events and any(line in _DONE for line in events.splitlines())


def usage_in(events: bytes) -> dict[str, Any] | None:
    """Return the last usage that the events carry, or None."""
    if b'"usage"' not in events:
        return None
    for line in reversed(events.splitlines()):
        if line.startswith(b"data:") and b'"usage"' in line:
            try:
                usage = json.loads(line[5:]).get("usage")
            except (ValueError, AttributeError, RecursionError):
                continue
            if isinstance(usage, dict):
                return usage
    return None


def error_event(message: str, *, code: int = 502, kind: str = "engine_error") -> bytes:
    """Return an event that carries an error as OpenAI's clients read it within a stream."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
