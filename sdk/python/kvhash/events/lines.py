"""Event lines: ``{"id":..,"decode":"<payload hex>"}`` in, ``{"id":..,"batch":{...}}`` out, beside request lines.

A batch has ``ts``, ``data_parallel_rank``, ``layout``, ``events`` and, only where there is something unknown,
``extra``. A hash is ``{"int": "<decimal>"}`` or ``{"bytes": "<hex>"}``, an extension value
``{"ext": type, "bytes": "<hex>"}``. An event that is not known is
``{"unknown": tag, "raw": {"bytes": hex}}``, one that cannot be read
``{"undecodable": path, "message": text, "raw": {"bytes": hex}}``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import msgspec

from kvhash._errors import InvalidRequestError
from kvhash.request import MAX_LINE_BYTES, answer_lines

from .decode import decode_batch
from .schema import EventBatch, UndecodableEvent, UnknownEvent

__all__ = ["answer_all_lines", "batch_object", "decode_answer"]

_HASHES = ("block_hashes", "parent_block_hash")


def batch_object(batch: EventBatch) -> dict[str, Any]:
    """Return a decoded batch as event lines carry it."""
    result = {
        "ts": _json(batch.ts),
        "data_parallel_rank": batch.data_parallel_rank,
        "layout": batch.layout,
        "events": [_event(event) for event in batch.events],
    }
    if batch.extra:
        result["extra"] = _json(batch.extra)
    return result


def _event(event: Any) -> dict[str, Any]:
    if isinstance(event, UnknownEvent):
        return {"unknown": event.tag, "raw": _json(event.raw)}
    if isinstance(event, UndecodableEvent):
        return {"undecodable": event.path, "message": event.message, "raw": _json(event.raw)}
    result: dict[str, Any] = {"type": type(event).__name__}
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if name != "extra" or value:
            result[name] = _hash(value) if name in _HASHES else _json(value)
    return result


def _hash(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_hash(item) for item in value]
    return {"int": str(value)} if isinstance(value, int) else _json(value)


def _json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, (list, tuple)):
        return [_json(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _json(item) for name, item in value.items()}
    if isinstance(value, datetime):  # an extension value too, which msgspec reads
        packed = msgspec.msgpack.encode(value)
        return {"ext": -1, "bytes": packed[3 if packed[0] == 0xC7 else 2 :].hex()}
    if isinstance(value, msgspec.msgpack.Ext):
        return {"ext": value.code, "bytes": bytes(value.data).hex()}
    return value


def decode_answer(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to an event line's object, without ``id``; raises `KvHashError`s."""
    for name in value:
        if name not in ("id", "decode"):
            raise InvalidRequestError(f"unknown field {name!r}; expected: id, decode", at="$")
    text = value["decode"]
    if not isinstance(text, str):
        raise InvalidRequestError(f"expected the payload as hex, got {type(text).__name__}", at="$.decode")
    try:
        payload = bytes.fromhex(text)
    except ValueError:
        raise InvalidRequestError("the payload is not hex", at="$.decode") from None
    return {"batch": batch_object(decode_batch(payload))}


def answer_all_lines(
    lines: Iterable[bytes], defaults: Mapping[str, Any] | None = None, *, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[dict[str, Any]]:
    """Answer request lines as `kvhash.answer_lines` does, and event lines among them."""

    def event_line(value: Mapping[str, Any]) -> dict[str, Any] | None:
        return decode_answer(value) if "decode" in value else None

    return answer_lines(lines, defaults, max_line_bytes=max_line_bytes, other=event_line)
