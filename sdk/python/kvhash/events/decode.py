"""Reads any published batch: every vLLM release's shape and SGLang's, array, map or mixed.

A field's meaning comes from its name or its place, never from its value's type. One bad event does not lose
its batch: it becomes an `UndecodableEvent` in place. A payload that is no batch raises `EventDecodeError`.

Three ways, each for what the one before cannot take, with equal results: the whole batch by one typed
decoder; event by event; and field by field, which says what is wrong and keeps unknown fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import msgspec
from msgspec.structs import astuple

from ._errors import EventDecodeError
from ._split import bytes_nest_past, split_array, split_map, value_nests_past
from .event_fields import MAX_DEPTH, REMOVED_FIELDS, STORED_FIELDS, kind_of, read_event, tuples_of
from .schema import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    UndecodableEvent,
)

__all__ = ["MAX_PAYLOAD_BYTES", "decode_batch"]

#: The largest payload that is read, in bytes.
MAX_PAYLOAD_BYTES = 256 * 1024 * 1024

# Where the first event starts, by the first byte of a list of 16 and more.
_LIST_HEAD = {0xDC: 13, 0xDD: 15}


# --- typed decoders -----------------------------------------------------------------------------------------
# The array layout needs types of its own, with the fields that have a place in it. `forbid_unknown_fields`
# makes what would be dropped unread fail here; the careful reader keeps it.


def _array_type(event: type[msgspec.Struct], names: tuple[str, ...]) -> Any:
    known = {field.name: field for field in msgspec.structs.fields(event)}
    places: list[Any] = []
    for name in names:
        field = known[name]
        places.append((name, field.type) if field.required else (name, field.type, field.default))
    return msgspec.defstruct(
        f"_Array{event.__name__}",
        places,
        tag=event.__name__,
        array_like=True,
        frozen=True,
        gc=False,
        forbid_unknown_fields=True,
    )


_StoredArray = _array_type(BlockStored, STORED_FIELDS)
_RemovedArray = _array_type(BlockRemoved, REMOVED_FIELDS)
_ClearedArray = _array_type(AllBlocksCleared, ())


class _MapBatch(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    ts: float
    events: tuple[BlockStored | BlockRemoved | AllBlocksCleared, ...]
    data_parallel_rank: int | None = None


_array_event: Any = _StoredArray | _RemovedArray | _ClearedArray
_ArrayBatch: Any = msgspec.defstruct(
    "_ArrayBatch",
    [("ts", float), ("events", tuple[_array_event, ...]), ("data_parallel_rank", int | None, None)],
    array_like=True,
    frozen=True,
    gc=False,
    forbid_unknown_fields=True,
)
_decode_map_batch = msgspec.msgpack.Decoder(_MapBatch).decode
_decode_array_batch = msgspec.msgpack.Decoder(_ArrayBatch).decode
_decode_map_event = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared).decode
_decode_raws = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_raw_map = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode
_decode_text = msgspec.msgpack.Decoder(str).decode
_decode_any = msgspec.msgpack.Decoder().decode

# Up to here msgspec passes over the values of a batch that is a map, whatever the interpreter.
_MAX_SPLIT_DEPTH = 900

# What msgspec raises on bad input: its own errors, and the interpreter's for nesting and for values out of
# range.
_FAULTS = (msgspec.MsgspecError, RecursionError, ValueError, OverflowError, TypeError)


def decode_batch(payload: bytes) -> EventBatch:
    """Read the payload frame of one published message.

    Raises EventDecodeError when it is no batch: ``invalid-msgpack`` (truncated, trailing or malformed bytes),
    ``nested-too-deeply``, ``payload-too-large`` or ``invalid-batch``. Time and memory are bounded by the
    payload's length, whatever lengths it declares.
    """
    if isinstance(payload, int):  # bytes() would make so many zeros of it
        raise EventDecodeError("expected bytes, got an integer", at="$")
    data = bytes(payload)
    fast = _fast(data)
    return _careful_batch(data) if fast is None else fast


def _fast(payload: bytes) -> EventBatch | None:
    """Read a batch whose every event is as known releases write it; None for all else."""
    if not 16 <= len(payload) <= MAX_PAYLOAD_BYTES:
        return None
    # [float, [event ...: after the head of the list, the first event's own first byte tells array from map.
    first = payload[_LIST_HEAD.get(payload[10], 11)]
    try:
        if first & 0xF0 == 0x90:
            arrays = _decode_array_batch(payload)
            events = tuple([_from_array(event) for event in arrays.events])
            rank, ts, layout = (
                arrays.data_parallel_rank,
                arrays.ts,
                cast(Any, "array" if arrays.events else None),
            )
        else:
            maps = _decode_map_batch(payload)
            events = maps.events
            rank, ts, layout = maps.data_parallel_rank, maps.ts, cast(Any, "map" if maps.events else None)
    except _FAULTS:
        return None
    for event in events:
        if not _sound(event):
            return None
    try:
        return EventBatch(ts, tuple([_finish(event) for event in events]), rank, layout)
    except RecursionError:
        return None


def _from_array(event: Any) -> Any:
    kind = type(event)
    if kind is _StoredArray:
        return BlockStored(*astuple(event))
    return BlockRemoved(*astuple(event)) if kind is _RemovedArray else AllBlocksCleared()


def _sound(event: BlockStored | BlockRemoved | AllBlocksCleared) -> bool:
    """Whether the event's hashes are of one kind, as the type cannot say."""
    if isinstance(event, AllBlocksCleared):
        return True
    kinds = set(map(type, event.block_hashes))
    if isinstance(event, BlockStored) and event.parent_block_hash is not None:
        kinds.add(type(event.parent_block_hash))
    return len(kinds) < 2


def _finish(event: Event) -> Event:
    """Return the event with its extra keys as tuples throughout."""
    if isinstance(event, BlockStored) and event.extra_keys and any(event.extra_keys):
        return msgspec.structs.replace(event, extra_keys=tuples_of(event.extra_keys))
    return event


# --- the batch, event by event ------------------------------------------------------------------------------


def _careful_batch(payload: bytes) -> EventBatch:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise EventDecodeError(
            f"the payload has {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES} are read",
            at="$",
            code="payload-too-large",
        )
    if not payload:
        raise EventDecodeError("the payload is empty; expected a msgpack array [ts, [events], rank]", at="$")
    if _is_map(payload):
        ts, events, rank, extra = _map_container(payload)
    else:
        ts, events, rank, extra = _array_container(payload)
    if isinstance(ts, bool) or not isinstance(ts, (int, float)):
        raise EventDecodeError(f"expected the time as a number, got {kind_of(ts)}", at="$.ts")
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int)):
        raise EventDecodeError(
            f"expected the data parallel rank as an integer or nil, got {kind_of(rank)}",
            at="$.data_parallel_rank",
        )
    read = tuple([_event(raw, f"$.events[{i}]") for i, raw in enumerate(events)])
    return EventBatch(float(ts), read, rank, _layout(events), extra or None)


def _array_container(payload: bytes) -> tuple[Any, list[bytes], Any, dict[str | int, Any]]:
    if not _is_array(payload):
        kind = kind_of(_guarded(_decode_value, payload, "$"))
        raise EventDecodeError(f"expected a msgpack array [ts, [events], rank], got {kind}", at="$")
    parts = _split(payload, "$")
    if len(parts) < 2:
        raise EventDecodeError(
            f"expected an array [ts, [events], rank] of at least 2 elements, got {len(parts)}", at="$"
        )
    rank = _guarded(_decode_value, parts[2], "$.data_parallel_rank") if len(parts) > 2 else None
    extra: dict[str | int, Any] = {
        i: _guarded(_decode_value, part, f"$[{i}]") for i, part in enumerate(parts[3:], 3)
    }
    return _guarded(_decode_value, parts[0], "$.ts"), _event_list(parts[1]), rank, extra


def _map_container(payload: bytes) -> tuple[Any, list[bytes], Any, dict[str | int, Any]]:
    parts = {name: bytes(raw) for name, raw in _guarded(_decode_parts, payload, "$").items()}
    for name in ("ts", "events"):
        if name not in parts:
            raise EventDecodeError(f"the batch has no {name!r}", at="$")
    events = _event_list(parts.pop("events"))
    values = {name: _guarded(_decode_value, raw, f"$.{name}") for name, raw in parts.items()}
    rank = values.pop("data_parallel_rank", None)
    other = values.pop("attn_dp_rank", None)
    return values.pop("ts"), events, other if rank is None else rank, values


def _event_list(raw: bytes) -> list[bytes]:
    if not _is_array(raw):
        raise EventDecodeError(
            f"expected a list of events, got {kind_of(_guarded(_decode_value, raw, '$.events'))}",
            at="$.events",
        )
    return _split(raw, "$.events")


def _split(raw: bytes, at: str) -> list[bytes]:
    """Return the elements of an array, undecoded."""
    try:
        return [bytes(part) for part in _decode_raws(raw)]
    except RecursionError:
        pass  # one element is nested too deeply for msgspec to pass over; the others still count
    except _FAULTS as error:
        raise EventDecodeError(f"not msgpack: {error}", at=at, code="invalid-msgpack") from None
    try:
        return split_array(raw)
    except ValueError as error:
        raise EventDecodeError(f"not msgpack: {error}", at=at, code="invalid-msgpack") from None


def _guarded(decode: Callable[[bytes], Any], raw: bytes, at: str) -> Any:
    try:
        return decode(raw)
    except RecursionError:
        raise EventDecodeError("nested too deeply", at=at, code="nested-too-deeply") from None
    except _FAULTS as error:
        raise EventDecodeError(f"not msgpack: {error}", at=at, code="invalid-msgpack") from None


def _is_array(raw: bytes) -> bool:
    return raw[0] & 0xF0 == 0x90 or raw[0] in (0xDC, 0xDD)


def _is_map(raw: bytes) -> bool:
    return raw[0] & 0xF0 == 0x80 or raw[0] in (0xDE, 0xDF)


def _layout(events: Sequence[bytes]) -> Literal["array", "map", "mixed"] | None:
    arrays = any(_is_array(raw) for raw in events)
    maps = any(_is_map(raw) for raw in events)
    if arrays and maps:
        return "mixed"
    return "array" if arrays else "map" if maps else None


def _decode_value(raw: bytes) -> Any:
    """Decode anything; raises RecursionError past `MAX_DEPTH`, whatever the interpreter could follow."""
    try:
        value = _decode_any(raw)
    except RecursionError:
        raise
    except _FAULTS:
        if bytes_nest_past(raw, MAX_DEPTH):
            raise RecursionError from None
        raise
    if len(raw) > MAX_DEPTH and value_nests_past(value, MAX_DEPTH):
        raise RecursionError
    return value


def _decode_parts(raw: bytes) -> dict[str, Any]:
    """Decode a map's keys, its values passed over however deeply they are nested."""
    if len(raw) > _MAX_SPLIT_DEPTH and bytes_nest_past(raw, _MAX_SPLIT_DEPTH):
        return {_decode_key(key): value for key, value in split_map(raw)}
    parts: dict[str, Any] = _decode_raw_map(raw)
    return parts


def _decode_key(raw: bytes) -> str:
    try:
        return _decode_text(raw)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error} - at `key` in `$`") from None


def _event(raw: bytes, at: str) -> Event:
    try:
        event = _decode_map_event(raw)
        if _sound(event):
            return _finish(event)
    except _FAULTS:
        pass
    try:
        value = _decode_value(raw)
    except RecursionError:
        return UndecodableEvent(at, "nested too deeply", raw, None)
    except _FAULTS as error:
        return UndecodableEvent(at, f"not msgpack: {error}", raw, None)
    return read_event(value, raw, at)
