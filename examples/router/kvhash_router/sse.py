"""Server-sent events as engines stream them: whole events out of any pieces, and what the router reads in them."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["EventCutter", "EventTooLongError", "error_event", "is_done", "usage_in"]


#: How an empty line, which ends an event, can follow a line.
_BLANK_LINES = (b"\n\n", b"\n\r\n", b"\r\r")
_LONGEST_BLANK = max(map(len, _BLANK_LINES))
#: The longest event that is kept until its end comes: the tokens and logprobs of a long prompt, echoed, are a few MiB.
MAX_EVENT_BYTES = 16 * 1024 * 1024
#: The longest line in which usage is looked for: what carries it has little else.
_MAX_USAGE_LINE = 256 * 1024


class EventTooLongError(Exception):
    """An event that does not end."""


class EventCutter:
    """Cuts a stream behind its last whole event, so that what is passed on never ends within one.

    What comes is looked at once, in whatever pieces. An event of more than ``max_bytes`` raises EventTooLongError.
    """

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self._rest = bytearray()
        self._max_bytes = max_bytes

    def feed(self, piece: bytes) -> bytes:
        """Return the whole events up to here; keep the rest."""
        seen = max(0, len(self._rest) - _LONGEST_BLANK + 1)
        self._rest += piece
        end = max(_after(self._rest, mark, seen) for mark in _BLANK_LINES)
        if len(self._rest) - end > self._max_bytes:
            raise EventTooLongError(f"an event has more than {self._max_bytes} bytes")
        if not end:
            return b""
        events = bytes(memoryview(self._rest)[:end])
        del self._rest[:end]
        return events

    @property
    def rest(self) -> bytes:
        """What came behind the last whole event."""
        return bytes(self._rest)


_DONE = (b"data: [DONE]", b"data:[DONE]")


def _after(data: bytearray, mark: bytes, start: int) -> int:
    at = data.rfind(mark, start)
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
        if len(line) <= _MAX_USAGE_LINE and line.startswith(b"data:") and b'"usage"' in line:
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
