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

from kvhash.contract import Contract

from ._errors import EventDecodeError
from ._split import bytes_nest_past, split_array, split_map, value_nests_past
from .schema import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    UndecodableEvent,
    UnknownEvent,
)

__all__ = ["MAX_PAYLOAD_BYTES", "decode_batch"]

#: The largest payload that is read, in bytes.
MAX_PAYLOAD_BYTES = 256 * 1024 * 1024

# Where the first event starts, by the first byte of a list of 16 and more.
_LIST_HEAD = {0xDC: 13, 0xDD: 15}

_NEWEST = Contract.events_for_vllm("latest")
_STORED = tuple(f.name for f in _NEWEST.block_stored)
_REMOVED = tuple(f.name for f in _NEWEST.block_removed)


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


_StoredArray = _array_type(BlockStored, _STORED)
_RemovedArray = _array_type(BlockRemoved, _REMOVED)
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

#: Arrays and maps that may lie within each other, in one event or in one of a batch's other fields.
MAX_DEPTH = 128
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
        return msgspec.structs.replace(event, extra_keys=_tuples(event.extra_keys))
    return event


def _tuples(value: Any, depth: int = 1) -> Any:
    """Return a value that lies `depth` deep in its event; raises RecursionError where it is nested too deeply."""
    if isinstance(value, (list, tuple)):
        if depth >= MAX_DEPTH:
            raise RecursionError
        return tuple([_tuples(item, depth + 1) for item in value])
    if isinstance(value, dict) and value_nests_past(value, MAX_DEPTH - depth):
        raise RecursionError
    return value


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
        raise EventDecodeError(f"expected the time as a number, got {_kind(ts)}", at="$.ts")
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int)):
        raise EventDecodeError(
            f"expected the data parallel rank as an integer or nil, got {_kind(rank)}",
            at="$.data_parallel_rank",
        )
    read = tuple([_event(raw, f"$.events[{i}]") for i, raw in enumerate(events)])
    return EventBatch(float(ts), read, rank, _layout(events), extra or None)


def _array_container(payload: bytes) -> tuple[Any, list[bytes], Any, dict[str | int, Any]]:
    if not _is_array(payload):
        kind = _kind(_guarded(_decode_value, payload, "$"))
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
            f"expected a list of events, got {_kind(_guarded(_decode_value, raw, '$.events'))}", at="$.events"
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


# --- one event, field by field ------------------------------------------------------------------------------


class _BadField(Exception):
    def __init__(self, message: str, path: str) -> None:
        self.message, self.path = message, path


def _event(raw: bytes, at: str) -> Event:
    try:
        event = _decode_map_event(raw)
        if _sound(event):
            return _finish(event)
    except _FAULTS:
        pass
    tag: str | None = None
    try:
        try:
            value = _decode_value(raw)
        except RecursionError:
            raise _BadField("nested too deeply", at) from None
        except _FAULTS as error:
            raise _BadField(f"not msgpack: {error}", at) from None
        tag, fields, extra = _named(value, at)
        if tag == "BlockStored":
            return _stored(fields, extra, at)
        if tag == "BlockRemoved":
            return _removed(fields, extra, at)
        if tag == "AllBlocksCleared":
            return AllBlocksCleared(extra={**fields, **extra} or None)
        return UnknownEvent(tag, raw)
    except _BadField as fault:
        return UndecodableEvent(fault.path, fault.message, raw, tag)


def _named(value: Any, at: str) -> tuple[str, dict[str | int, Any], dict[str | int, Any]]:
    """Return the tag, the fields by name, and the elements past the last known place by position."""
    if isinstance(value, dict):
        if "type" not in value:
            raise _BadField("the event has no 'type'", at)
        tag = value["type"]
        _need(isinstance(tag, str), "the event's type as text", tag, f"{at}.type")
        for key in value:
            _need(isinstance(key, str), "field names as text", key, at)
        return tag, {name: item for name, item in value.items() if name != "type"}, {}
    if not isinstance(value, list):
        raise _BadField(f"expected an event, a map or an array, got {_kind(value)}", at)
    if not value:
        raise _BadField("expected an event, got an empty array", at)
    tag = value[0]
    _need(isinstance(tag, str), "the event's type as text", tag, f"{at}[0]")
    places = {"BlockStored": _STORED, "BlockRemoved": _REMOVED}.get(tag, ())
    fields: dict[str | int, Any] = dict(zip(places, value[1:], strict=False))
    extra: dict[str | int, Any] = dict(enumerate(value[1 + len(places) :], 1 + len(places)))
    if tag == "BlockStored" and isinstance(fields.get("lora_name"), dict):
        # SGLang's array puts an object of named fields here. Its names say what they are, so nothing is
        # guessed.
        fields.update({str(name): item for name, item in fields.pop("lora_name").items()})
    return tag, fields, extra


def _stored(fields: dict[str | int, Any], extra: dict[str | int, Any], at: str) -> BlockStored:
    take = _Taker(fields, at)
    hashes, parent = take.hashes("block_hashes"), take.parent("parent_block_hash")
    event = BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=take.tokens("token_ids"),
        block_size=take.size("block_size"),
        lora_id=take.integer("lora_id"),
        medium=take.text("medium"),
        lora_name=take.text("lora_name"),
        extra_keys=take.extra_keys("extra_keys"),
        group_idx=take.integer("group_idx"),
        kv_cache_spec_kind=take.text("kv_cache_spec_kind"),
        kv_cache_spec_sliding_window=take.integer("kv_cache_spec_sliding_window"),
        locality=take.text("locality"),
        ownership=take.text("ownership"),
        session_id=take.text("session_id"),
        lookahead_token_ids=take.lookahead("lookahead_token_ids"),
        cache_salt=take.text("cache_salt"),
    )
    rest = take.rest(extra)
    return msgspec.structs.replace(event, extra=rest) if rest else event


def _removed(fields: dict[str | int, Any], extra: dict[str | int, Any], at: str) -> BlockRemoved:
    take = _Taker(fields, at)
    event = BlockRemoved(
        block_hashes=take.hashes("block_hashes"),
        medium=take.text("medium"),
        group_idx=take.integer("group_idx"),
        locality=take.text("locality"),
        ownership=take.text("ownership"),
    )
    rest = take.rest(extra)
    return msgspec.structs.replace(event, extra=rest) if rest else event


class _Taker:
    """Takes one event's fields one by one, checked; what is left over is the rest."""

    def __init__(self, fields: dict[str | int, Any], at: str) -> None:
        self._left, self._at = dict(fields), at
        self._kinds: set[type] = set()

    def rest(self, positional: dict[str | int, Any]) -> dict[str | int, Any]:
        return {**self._left, **positional}

    def integer(self, name: str) -> int | None:
        value = self._left.pop(name, None)
        _need(value is None or type(value) is int, "an integer or nil", value, f"{self._at}.{name}")
        return cast("int | None", value)

    def text(self, name: str) -> str | None:
        value = self._left.pop(name, None)
        _need(value is None or type(value) is str, "text or nil", value, f"{self._at}.{name}")
        return cast("str | None", value)

    def size(self, name: str) -> int:
        value = self._required(name)
        _need(type(value) is int, "an integer", value, f"{self._at}.{name}")
        if value < 0:
            raise _BadField(f"expected a size of at least 0, got {value}", f"{self._at}.{name}")
        return cast(int, value)

    def hashes(self, name: str) -> tuple[int | bytes, ...]:
        value = self._list(self._required(name), "block hashes", name)
        return tuple([self._hash(item, f"{self._at}.{name}[{i}]") for i, item in enumerate(value)])

    def parent(self, name: str) -> int | bytes | None:
        value = self._required(name)
        if value is None:
            return None
        return self._hash(value, f"{self._at}.{name}")

    def tokens(self, name: str) -> Any:
        value = self._list(self._required(name), "token ids", name)
        kinds = set(map(type, value))
        if kinds <= {int}:
            return tuple(value)
        pairs = bool(value) and isinstance(value[0], list)
        what = "a pair of token ids" if pairs else "a token id"
        for i, item in enumerate(value):
            good = (
                isinstance(item, list) and len(item) == 2 and all(type(token) is int for token in item)
                if pairs
                else type(item) is int
            )
            _need(good, what, item, f"{self._at}.{name}[{i}]")
        return _tuples(value)

    def lookahead(self, name: str) -> Any:
        value = self._left.pop(name, None)
        if value is None:
            return None
        for i, item in enumerate(self._list(value, "token ids per block", name)):
            _need(isinstance(item, list), "a list of token ids", item, f"{self._at}.{name}[{i}]")
            for j, token in enumerate(item):
                _need(type(token) is int, "a token id", token, f"{self._at}.{name}[{i}][{j}]")
        return _tuples(value)

    def extra_keys(self, name: str) -> Any:
        value = self._left.pop(name, None)
        if value is None:
            return None
        for i, item in enumerate(self._list(value, "extra keys per block", name)):
            _need(
                item is None or isinstance(item, list),
                "a list of keys or nil",
                item,
                f"{self._at}.{name}[{i}]",
            )
        return _tuples(value)

    def _required(self, name: str) -> Any:
        if name not in self._left:
            raise _BadField(f"the event has no {name!r}", self._at)
        return self._left.pop(name)

    def _list(self, value: Any, what: str, name: str) -> list[Any]:
        _need(isinstance(value, list), f"a list of {what}", value, f"{self._at}.{name}")
        return cast("list[Any]", value)

    def _hash(self, value: Any, at: str) -> int | bytes:
        _need(type(value) in (int, bytes), "a block hash, an integer or bytes", value, at)
        if isinstance(value, bytes) and not 8 <= len(value) <= 64:
            raise _BadField(f"expected a block hash of 8 to 64 bytes, got {len(value)}", at)
        if self._kinds - {type(value)}:
            other = "bytes" if isinstance(value, int) else "an integer"
            raise _BadField(f"got {_kind(value)} where the other hashes of the event are {other}", at)
        self._kinds.add(type(value))
        return cast("int | bytes", value)


def _need(good: bool, what: str, value: Any, path: str) -> None:
    if not good:
        raise _BadField(f"expected {what}, got {_kind(value)}", path)


_KINDS = {
    bool: "a boolean",
    int: "an integer",
    float: "a float",
    str: "text",
    bytes: "bytes",
    list: "an array",
    tuple: "an array",  # where it is a map's key
    dict: "a map",
    type(None): "nil",
}


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "an extension value")
