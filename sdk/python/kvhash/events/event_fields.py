"""One event, field by field: what is wrong with it is said, and unknown fields are kept."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from kvhash.contract import Contract

from ._split import value_nests_past
from .schema import AllBlocksCleared, BlockRemoved, BlockStored, Event, UndecodableEvent, UnknownEvent

__all__ = ["MAX_DEPTH", "REMOVED_FIELDS", "STORED_FIELDS", "kind_of", "read_event", "tuples_of"]

#: Arrays and maps that may lie within each other, in one event or in one of a batch's other fields.
MAX_DEPTH = 128

_NEWEST = Contract.events_for_vllm("latest")
#: The fields of an event in array form, in their order.
STORED_FIELDS = tuple(f.name for f in _NEWEST.block_stored)
REMOVED_FIELDS = tuple(f.name for f in _NEWEST.block_removed)


def tuples_of(value: Any, depth: int = 1) -> Any:
    """Return a value that lies `depth` deep in its event; raises RecursionError where it is nested too deeply."""
    if isinstance(value, (list, tuple)):
        if depth >= MAX_DEPTH:
            raise RecursionError
        return tuple([tuples_of(item, depth + 1) for item in value])
    if isinstance(value, dict) and value_nests_past(value, MAX_DEPTH - depth):
        raise RecursionError
    return value


class _BadField(Exception):
    def __init__(self, message: str, path: str) -> None:
        self.message, self.path = message, path


def read_event(value: Any, raw: bytes, at: str) -> Event:
    """Read an event from its decoded value; one that cannot be read is an `UndecodableEvent` with its bytes, ``raw``.

    ``at``: where in the batch it stands.
    """
    tag: str | None = None
    try:
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
        raise _BadField(f"expected an event, a map or an array, got {kind_of(value)}", at)
    if not value:
        raise _BadField("expected an event, got an empty array", at)
    tag = value[0]
    _need(isinstance(tag, str), "the event's type as text", tag, f"{at}[0]")
    places = {"BlockStored": STORED_FIELDS, "BlockRemoved": REMOVED_FIELDS}.get(tag, ())
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
        return tuples_of(value)

    def lookahead(self, name: str) -> Any:
        value = self._left.pop(name, None)
        if value is None:
            return None
        for i, item in enumerate(self._list(value, "token ids per block", name)):
            _need(isinstance(item, list), "a list of token ids", item, f"{self._at}.{name}[{i}]")
            for j, token in enumerate(item):
                _need(type(token) is int, "a token id", token, f"{self._at}.{name}[{i}][{j}]")
        return tuples_of(value)

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
        return tuples_of(value)

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
            raise _BadField(f"got {kind_of(value)} where the other hashes of the event are {other}", at)
        self._kinds.add(type(value))
        return cast("int | bytes", value)


def _need(good: bool, what: str, value: Any, path: str) -> None:
    if not good:
        raise _BadField(f"expected {what}, got {kind_of(value)}", path)


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


def kind_of(value: Any) -> str:
    """Return what a value is, in words, for an error."""
    return _KINDS.get(type(value), "an extension value")
