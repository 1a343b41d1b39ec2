"""Writes a batch byte for byte as a given vLLM release publishes it.

Array layout: the tag and then every field of the release, None too. Map layout: ``type`` and the fields,
optional ones left out when None; the map's header is as wide as the release's number of fields plus the tag
needs, whatever is left out. The batch around them is an array of three, the rank nil where there is none.
Source: the recorded outputs in ``tests/data/wire``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvhash.contract import Contract, EventContract, Release

from ._errors import EventEncodeError
from .schema import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    UndecodableEvent,
    UnknownEvent,
)

__all__ = ["encode_batch", "encode_event"]

_pack = msgspec.msgpack.Encoder().encode


def encode_batch(
    batch: EventBatch, release: str | Release | EventContract = "latest", *, drop_fields: bool = False
) -> bytes:
    """Return the payload frame that this release publishes for `batch`.

    A field that the release does not have must be None, unless `drop_fields` says to leave it out. An
    `UnknownEvent` or `UndecodableEvent` is written as it was read. Raises UnknownReleaseError and, with a
    path, EventEncodeError: ``field-not-in-release``, ``hash-form-not-in-release`` (bytes hashes where it has
    only integers), ``integer-too-large`` (more than 64 bits, which that release's own encoder cannot write
    either), ``invalid-event``.
    """
    contract = release if isinstance(release, EventContract) else Contract.events_for_vllm(release)
    head = b"\x93" + _value(float(batch.ts), "$.ts") + _header(0x90, 0xDC, 15, len(batch.events))
    events = [
        encode_event(event, contract, at=f"$.events[{i}]", drop_fields=drop_fields)
        for i, event in enumerate(batch.events)
    ]
    return b"".join((head, *events, _value(batch.data_parallel_rank, "$.data_parallel_rank")))


def encode_event(event: Event, contract: EventContract, *, at: str = "$", drop_fields: bool = False) -> bytes:
    """Return the msgpack of one event as `encode_batch` writes it; `at` is its path in error messages."""
    if isinstance(event, (UnknownEvent, UndecodableEvent)):
        return event.raw
    if not isinstance(event, (BlockStored, BlockRemoved, AllBlocksCleared)):
        raise EventEncodeError(f"expected an event, got {type(event).__name__}", at=at)
    tag = type(event).__name__
    fields = contract.fields(tag)
    if not drop_fields:
        _refuse_unknown(event, {field.name for field in fields}, at)
    if not contract.hash_bytes and not isinstance(event, AllBlocksCleared):
        hashes = (*event.block_hashes, getattr(event, "parent_block_hash", None))
        if any(isinstance(value, bytes) for value in hashes):
            raise EventEncodeError(
                "this release publishes integer hashes only, and the event has bytes",
                at=f"{at}.block_hashes",
                code="hash-form-not-in-release",
            )
    if contract.layout == "array":
        values = [_value(getattr(event, field.name), f"{at}.{field.name}") for field in fields]
        return b"".join((_header(0x90, 0xDC, 15, 1 + len(fields)), _pack(tag), *values))
    items = [_pack("type") + _pack(tag)]
    for field in fields:
        value = getattr(event, field.name)
        if value is not None or not field.optional:
            items.append(_pack(field.name) + _value(value, f"{at}.{field.name}"))
    return b"".join((_header(0x80, 0xDE, 15, len(items), declared=1 + len(fields)), *items))


def _refuse_unknown(event: Any, known: set[str], at: str) -> None:
    for name in event.__struct_fields__:
        if name not in known and getattr(event, name) is not None:
            raise EventEncodeError(
                f"this release has no field {name!r} in {type(event).__name__}; expected it to be None",
                at=f"{at}.{name}",
                code="field-not-in-release",
            )


def _value(value: Any, at: str) -> bytes:
    try:
        return _pack(value)
    except OverflowError:
        raise EventEncodeError(
            "an integer of more than 64 bits cannot be written; the engine itself fails here",
            at=at,
            code="integer-too-large",
        ) from None
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise EventEncodeError(f"cannot be written as msgpack: {error}", at=at) from None


def _header(short: int, wide: int, limit: int, count: int, *, declared: int | None = None) -> bytes:
    """Return a container's header for `count` items, as wide as `declared` items (default `count`) need."""
    most = count if declared is None else declared
    if most <= limit:
        return bytes((short | count,))
    if most <= 0xFFFF:
        return bytes((wide,)) + count.to_bytes(2, "big")
    return bytes((wide + 1,)) + count.to_bytes(4, "big")
