"""Short ways to write events and lookups in the index's tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvhash import BlockHasher
from kvhash.events.records import Batch
from kvhash.events.schema import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch

SIZE = 4
HASHER = BlockHasher(vllm="0.33.0", algorithm="sha256_cbor", block_size=SIZE)


def stored(hashes: Sequence[Any], parent: Any = None, *, size: int = SIZE, **fields: Any) -> BlockStored:
    """Return a store of blocks that follow each other, with tokens for all of them unless said otherwise."""
    fields.setdefault("token_ids", tuple(range(len(hashes) * size)))
    return BlockStored(tuple(hashes), parent, block_size=size, **fields)


def removed(hashes: Sequence[Any], **fields: Any) -> BlockRemoved:
    """Return a removal."""
    return BlockRemoved(tuple(hashes), **fields)


CLEARED = AllBlocksCleared()


def batch(*events: Any, rank: int | None = 0, ts: float = 1.0) -> EventBatch:
    """Return a batch."""
    return EventBatch(ts, tuple(events), rank)


def record(seq: int, *events: Any, rank: int | None = 0, ts: float | None = None) -> Batch:
    """Return a subscriber's record of a batch; its time grows with its number."""
    return Batch(
        "sim", rank, seq, b"", 0, batch(*events, rank=rank, ts=float(seq) if ts is None else ts), b""
    )
