"""What callers give to an index, checked where it comes in: a UsageError says what, where, and what would be right.

Events that were read by `kvhash.events.decode_batch`, and hashes inside a long list, are not looked at again here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from kvhash._checks import check_int
from kvhash._errors import InvalidHashError, UsageError
from kvhash.block_hash import BlockHashView
from kvhash.events.records import (
    BadMessage,
    Batch,
    Confirmed,
    Gap,
    Lost,
    Record,
    Recovered,
    Restart,
    Stale,
    Unconfirmed,
)
from kvhash.events.schema import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    HashValue,
    UndecodableEvent,
    UnknownEvent,
    hash_key,
)

from .types import EngineSettings

__all__ = [
    "MAX_RANKS",
    "check_batch",
    "check_clock",
    "check_engine",
    "check_engine_settings",
    "check_engines",
    "check_hash",
    "check_hashes",
    "check_num_tokens",
    "check_payloads",
    "check_rank",
    "check_record",
    "check_settings",
    "check_tiers",
    "name_bad_hash",
]

#: Data parallel ranks that one engine may have; of more nothing is held.
MAX_RANKS = 1024
_LOW, _HIGH = -(1 << 63), (1 << 64) - 1
_NO_LISTS = (str, bytes, bytearray, memoryview, Mapping)
_INTEGERS = ("lora_id", "group_idx", "kv_cache_spec_sliding_window")
_TEXTS = ("medium", "lora_name", "kv_cache_spec_kind", "locality")


def _fault(expected: str, value: object, at: str) -> UsageError:
    return UsageError(f"expected {expected}, got {value!r:.40} ({type(value).__name__})", at=at)


def _number(value: object, expected: str, at: str, low: int = _LOW, high: int = _HIGH) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _fault(expected, value, at)
    return value


def _is_text(value: object) -> bool:
    """Return whether a value is text that UTF-8 can carry."""
    return isinstance(value, str) and (
        value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)
    )


# --- engines, ranks and settings ----------------------------------------------------------------------------


def check_engine(engine: Any, at: str = "$.engine") -> str:
    """Return an engine's name if it is text that can be kept."""
    if _is_text(engine):
        return str(engine)
    raise _fault("an engine's name as text", engine, at)


def check_engines(engines: Any) -> list[str] | None:
    """Return the names that a lookup asks for; None: all."""
    if engines is None:
        return None
    if isinstance(engines, _NO_LISTS) or not isinstance(engines, Iterable):
        raise _fault("a list of engines' names", engines, "$.engines")
    return [check_engine(name, f"$.engines[{i}]") for i, name in enumerate(engines)]


def check_rank(rank: Any, at: str = "$.rank") -> int | None:
    """Return a data parallel rank if a batch can carry it."""
    if rank is None:
        return None
    return _number(rank, "a data parallel rank, an integer of 64 bits or None", at)


def check_engine_settings(settings: Any, at: str = "$.settings") -> EngineSettings:
    """Return an engine's settings if they are some."""
    if isinstance(settings, EngineSettings):
        return settings
    raise _fault("EngineSettings", settings, at)


def check_settings(settings: Any) -> dict[str, EngineSettings]:
    """Return settings by engine."""
    if settings is None:
        return {}
    if not isinstance(settings, Mapping):
        raise _fault("a mapping of engines to EngineSettings", settings, "$.settings")
    return {
        check_engine(name, "$.settings"): check_engine_settings(value, f"$.settings[{name!r}]")
        for name, value in settings.items()
    }


def check_tiers(tiers: Any) -> dict[str, str]:
    """Return tiers by medium, the media in upper case."""
    if not isinstance(tiers, Mapping) or not tiers:
        raise _fault("a mapping of media to at least one tier", tiers, "$.tiers")
    for medium, tier in tiers.items():
        if not _is_text(medium) or not _is_text(tier):
            raise _fault("media and tiers as text", medium if _is_text(tier) else tier, "$.tiers")
    return {medium.upper(): tier for medium, tier in tiers.items()}


def check_clock(clock: Any) -> Any:
    """Return a clock if it can be called."""
    if callable(clock):
        return clock
    raise _fault("a function that returns seconds since the epoch", clock, "$.clock")


# --- lookups ------------------------------------------------------------------------------------------------


def check_num_tokens(num_tokens: Any) -> int | None:
    """Return a prompt's number of tokens, at most 2^62."""
    if num_tokens is None:
        return None
    number = check_int(num_tokens, at="$.num_tokens", what="a number of tokens", minimum=0, maximum=1 << 4096)
    return min(number, 1 << 62)


def check_hashes(hashes: Any) -> Sequence[HashValue]:
    """Return a lookup's hashes as what can be walked again: arrays and iterators as lists.

    The first and the last are looked at, the others when a search reads them.
    """
    found: Any = hashes
    if not isinstance(hashes, (list, tuple, BlockHashView)):
        if isinstance(hashes, (*_NO_LISTS, Set)) or not (
            isinstance(hashes, Iterable) or hasattr(hashes, "tolist")
        ):
            raise _fault("a list of block hashes in their order", hashes, "$.hashes")
        found = hashes.tolist() if hasattr(hashes, "tolist") else list(hashes)
        if not isinstance(found, list):
            raise _fault("a list of block hashes in their order", hashes, "$.hashes")
    if found:
        check_hash(found[0], "$.hashes[0]")
        check_hash(found[-1], f"$.hashes[{len(found) - 1}]")
    return found  # type: ignore[no-any-return]


def check_hash(value: Any, at: str) -> None:
    """Raise InvalidHashError, with its place, unless a value is a block hash."""
    try:
        hash_key(value)
    except InvalidHashError as error:
        raise InvalidHashError(error.message, at=at) from None


def name_bad_hash(hashes: Sequence[Any]) -> None:
    """Raise InvalidHashError for the first of a lookup's hashes that is none."""
    for i, value in enumerate(hashes):
        check_hash(value, f"$.hashes[{i}]")


# --- events and records -------------------------------------------------------------------------------------


def check_payloads(payloads: Any) -> list[bytes]:
    """Return published batches as bytes, all of them read."""
    if isinstance(payloads, _NO_LISTS) or not isinstance(payloads, Iterable):
        raise _fault("a list of payloads", payloads, "$")
    found = []
    for i, payload in enumerate(payloads):
        if not isinstance(payload, (bytes, bytearray, memoryview)):
            raise _fault("a payload as bytes", payload, f"$[{i}]")
        found.append(bytes(payload))
    return found


def check_batch(batch: Any, at: str = "$.batch") -> EventBatch:
    """Return a batch if its values are of the types that its fields have, whoever made it."""
    if not isinstance(batch, EventBatch):
        raise _fault("an EventBatch, as decode_batch returns it", batch, at)
    _time(batch.ts, f"{at}.ts")
    check_rank(batch.data_parallel_rank, f"{at}.data_parallel_rank")
    for i, event in enumerate(_items(batch.events, "a tuple of events", f"{at}.events")):
        _event(event, f"{at}.events[{i}]")
    return batch


def check_record(record: Any) -> Record:
    """Return a subscriber's record if its values are sound; a batch that comes with its payload was read from it."""
    if not isinstance(
        record, (Batch, Gap, Recovered, Lost, Restart, Stale, Confirmed, Unconfirmed, BadMessage)
    ):
        raise _fault("a subscriber's record", record, "$.record")
    check_rank(record.rank, "$.record.rank")
    if isinstance(record, Batch):
        _seq(record.seq, "seq")
        if not isinstance(record.payload, bytes):
            raise _fault("the payload as bytes", record.payload, "$.record.payload")
        if not record.payload or not isinstance(record.batch, EventBatch):
            check_batch(record.batch, "$.record.batch")
    elif isinstance(record, (Gap, Recovered, Lost)):
        _seq(record.first, "first")
        _seq(record.last, "last")
    elif isinstance(record, (Stale, BadMessage)) and record.seq is not None:
        _seq(record.seq, "seq")
    elif isinstance(record, (Restart, Confirmed)) and record.last_seq is not None:
        _seq(record.last_seq, "last_seq")
    return record


def _seq(value: Any, name: str) -> int:
    return _number(value, "a batch's number, from 0 to 2^64 - 1", f"$.record.{name}", 0)


def _time(value: Any, at: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or _is_too_large(value):
        raise _fault("the time as a number of seconds", value, at)


def _is_too_large(value: int | float) -> bool:
    return isinstance(value, int) and abs(value) > 1 << 1000


def _items(value: Any, expected: str, at: str) -> Sequence[Any]:
    if isinstance(value, (tuple, list)):
        return value
    raise _fault(expected, value, at)


def _event(event: Any, at: str) -> None:
    if isinstance(event, (UnknownEvent, UndecodableEvent, AllBlocksCleared)):
        return
    if not isinstance(event, (BlockStored, BlockRemoved)):
        raise _fault("an event", event, at)
    hashes = [*_items(event.block_hashes, "a tuple of block hashes", f"{at}.block_hashes")]
    if set(map(type, hashes)) != {int}:  # the common case needs no look at each
        for i, value in enumerate(hashes):
            check_hash(value, f"{at}.block_hashes[{i}]")
    if isinstance(event, BlockStored) and event.parent_block_hash is not None:
        check_hash(event.parent_block_hash, f"{at}.parent_block_hash")
        hashes.append(event.parent_block_hash)
    kinds = set(map(type, hashes))
    if bytes in kinds and len(kinds) > 1 and len({isinstance(value, bytes) for value in hashes}) > 1:
        raise UsageError(
            "expected integers or bytes as hashes, not both in one event", at=f"{at}.block_hashes"
        )
    names = _TEXTS if isinstance(event, BlockStored) else ("medium", "locality")
    for name in names:
        value = getattr(event, name)
        if value is not None and not _is_text(value):
            raise _fault("text or None", value, f"{at}.{name}")
    for name in _INTEGERS if isinstance(event, BlockStored) else ("group_idx",):
        value = getattr(event, name)
        if value is not None:
            _number(value, "an integer of 64 bits or None", f"{at}.{name}")
    if isinstance(event, BlockStored):
        _stored(event, at)


def _stored(event: BlockStored, at: str) -> None:
    _number(event.block_size, "a block size, from 0 to 2^64 - 1", f"{at}.block_size", 0)
    tokens = _items(event.token_ids, "a tuple of token ids", f"{at}.token_ids")
    pairs = bool(tokens) and isinstance(tokens[0], tuple)
    for i, token in enumerate(() if set(map(type, tokens)) == {int} else tokens):
        both = token if pairs and isinstance(token, tuple) and len(token) == 2 else (token,)
        if len(both) != 1 + pairs or not all(type(one) is int for one in both):
            expected = "a pair of token ids" if pairs else "a token id, an integer"
            raise _fault(expected, token, f"{at}.token_ids[{i}]")
    for name in ("extra_keys", "lookahead_token_ids"):
        value = getattr(event, name)
        for i, item in enumerate(() if value is None else _items(value, "a tuple or None", f"{at}.{name}")):
            if item is not None:
                _items(item, "a tuple or None", f"{at}.{name}[{i}]")
