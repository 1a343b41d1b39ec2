"""Bodies as they come, within bounds: of requests read and parsed, of answers looked into for what they report.

Parsing holds up everybody: no other thread runs meanwhile, and no other request. So a body may have only so many
values, counted before they are made, and long ones are read by the quicker of two parsers.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
from starlette.types import Message, Receive

__all__ = ["MAX_ANSWER_BYTES", "ClientGoneError", "RefusedError", "parse_body", "read_body", "usage_of"]


#: The most marks of JSON in a body, those in its texts too: more than a prompt as long as any model's context has. What
#: stands for objects, their fields and lists takes longer to make than a number does, and counts as several.
MAX_MARKS = 2 * 1024 * 1024
_WEIGHTS = {b",": 1, b"[": 4, b"{": 4, b":": 4}
#: Bodies up to here are read as the engine's own parser reads them; longer ones by a quicker one that is stricter: a
#: NaN, a number beyond a double or half a surrogate pair is an error to it.
_SHORT_BYTES = 256 * 1024
#: The longest answer in which usage is looked for.
MAX_ANSWER_BYTES = 8 * 1024 * 1024


class ClientGoneError(Exception):
    """The client hung up while it was sending."""


class RefusedError(Exception):
    """The router itself refuses the request."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


async def read_body(receive: Receive, limit: int, silence_s: float) -> bytes:
    """Return a request's body; raises RefusedError for more bytes or a longer silence, ClientGoneError."""
    parts: list[bytes] = []
    size = 0
    while True:
        try:
            message: Message = await asyncio.wait_for(receive(), silence_s)
        except asyncio.TimeoutError:
            raise RefusedError(408, f"nothing of the body came for {silence_s:g} s") from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise RefusedError(413, f"the body has more than the {limit} bytes that are read")
        if not message.get("more_body", False):
            return b"".join(parts)


def parse_body(data: bytes) -> dict[str, Any]:
    """Return a request's JSON object; raises RefusedError."""
    if len(data) > MAX_MARKS // max(_WEIGHTS.values()):
        marks = sum(data.count(mark) * weight for mark, weight in _WEIGHTS.items())
        if marks > MAX_MARKS:
            raise RefusedError(413, f"the body has more than the {MAX_MARKS} values that are read")
    try:
        body = json.loads(data) if len(data) <= _SHORT_BYTES else msgspec.json.decode(data)
    except (ValueError, RecursionError, msgspec.DecodeError) as error:
        raise RefusedError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RefusedError(400, "expected a JSON object")
    return body


class _Answer(msgspec.Struct):
    # Everything else is passed over, and no value is made of it.
    usage: Any = None


_ANSWER = msgspec.json.Decoder(_Answer)


def usage_of(answer: bytes) -> dict[str, Any] | None:
    """Return what a whole answer says of the tokens it used, or None."""
    try:
        usage = _ANSWER.decode(answer).usage
    except (ValueError, RecursionError, msgspec.MsgspecError):
        return None
    return usage if isinstance(usage, dict) else None
