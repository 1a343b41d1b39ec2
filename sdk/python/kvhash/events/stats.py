"""Counts over a stream of events, per engine and rank, in bounded memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .schema import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    UndecodableEvent,
    UnknownEvent,
    hash_key,
)

__all__ = ["PublisherStats", "StreamStats"]

#: Blocks that are remembered as held, of one publisher; beyond it new ones are counted, not remembered.
MAX_HELD = 5_000_000

_RATE_WINDOW_S = 10.0


@dataclass(slots=True)
class PublisherStats:
    """What one publisher (an engine's rank behind one endpoint) has said so far.

    ``held``: blocks that were stored and not removed since, by (medium, group). Lag is receive time minus the
    batch's own time, in seconds: it holds the difference of the two clocks too.
    """

    endpoint: str
    rank: int | None
    batches: int = 0
    stored: int = 0
    removed: int = 0
    clears: int = 0
    unknown: int = 0
    undecodable: int = 0
    gaps: int = 0
    lost: int = 0
    recovered: int = 0
    restarts: int = 0
    last_seq: int | None = None
    lag_s: float | None = None
    not_remembered: int = 0
    stored_by_medium: dict[str, int] = field(default_factory=dict)
    removed_by_medium: dict[str, int] = field(default_factory=dict)
    block_sizes: dict[int, int] = field(default_factory=dict)
    kinds: dict[int | None, str | None] = field(default_factory=dict)
    _held: dict[tuple[str, int | None], set[int]] = field(default_factory=dict)
    _recent: deque[tuple[float, int]] = field(default_factory=deque)

    @property
    def held(self) -> int:
        """How many blocks the publisher holds, over all tiers and groups."""
        return sum(map(len, self._held.values()))

    def held_by(self) -> dict[tuple[str, int | None], int]:
        """Return the held blocks by (medium, group)."""
        return {place: len(keys) for place, keys in sorted(self._held.items(), key=str) if keys}

    def rate(self, now: float) -> float:
        """Return block operations a second over the last ten seconds."""
        while self._recent and self._recent[0][0] < now - _RATE_WINDOW_S:
            self._recent.popleft()
        return sum(count for _, count in self._recent) / _RATE_WINDOW_S

    def restart(self) -> None:
        """Forget what the former incarnation held."""
        self.restarts += 1
        self._held.clear()

    def see(self, batch: EventBatch, *, received: float) -> None:
        """Count one batch, received at `received` seconds since the epoch."""
        self.batches += 1
        self.lag_s = received - batch.ts
        operations = 0
        for event in batch.events:
            if isinstance(event, BlockStored):
                operations += self._store(event)
            elif isinstance(event, BlockRemoved):
                operations += self._remove(event)
            elif isinstance(event, AllBlocksCleared):
                self.clears += 1
                self._held.clear()
            elif isinstance(event, UndecodableEvent):
                self.undecodable += 1
            elif isinstance(event, UnknownEvent):
                self.unknown += 1
        if self._recent and received - self._recent[-1][0] < 0.1:
            at, before = self._recent.pop()
            self._recent.append((at, before + operations))
        else:
            self._recent.append((received, operations))
        self.rate(received)

    def _store(self, event: BlockStored) -> int:
        medium = _medium(event.medium)
        count = len(event.block_hashes)
        self.stored += count
        self.stored_by_medium[medium] = self.stored_by_medium.get(medium, 0) + count
        if len(self.block_sizes) < 64 or event.block_size in self.block_sizes:
            self.block_sizes[event.block_size] = self.block_sizes.get(event.block_size, 0) + count
        if len(self.kinds) < 256:
            self.kinds[event.group_idx] = event.kv_cache_spec_kind or self.kinds.get(event.group_idx)
        keys = self._held.setdefault((medium, event.group_idx), set())
        if self.held + count > MAX_HELD:
            self.not_remembered += count
        else:
            keys.update(map(hash_key, event.block_hashes))
        return count

    def _remove(self, event: BlockRemoved) -> int:
        medium = _medium(event.medium)
        count = len(event.block_hashes)
        self.removed += count
        self.removed_by_medium[medium] = self.removed_by_medium.get(medium, 0) + count
        self._held.get((medium, event.group_idx), set()).difference_update(map(hash_key, event.block_hashes))
        return count

    def to_json(self, now: float | None = None) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return {
            "endpoint": self.endpoint,
            "rank": self.rank,
            "batches": self.batches,
            "last_seq": None if self.last_seq is None else str(self.last_seq),
            "stored": self.stored,
            "removed": self.removed,
            "clears": self.clears,
            "held": self.held,
            "held_by": [
                {"medium": medium, "group": group, "blocks": count}
                for (medium, group), count in self.held_by().items()
            ],
            "not_remembered": self.not_remembered,
            "unknown": self.unknown,
            "undecodable": self.undecodable,
            "gaps": self.gaps,
            "recovered": self.recovered,
            "lost": self.lost,
            "restarts": self.restarts,
            "lag_s": None if self.lag_s is None else round(self.lag_s, 6),
            "rate": round(self.rate(time.time() if now is None else now), 3),
        }


def _medium(medium: str | None) -> str:
    return "GPU" if medium is None else medium.upper()


class StreamStats:
    """The counts of every publisher in a stream."""

    def __init__(self) -> None:
        self._publishers: dict[tuple[str, int | None], PublisherStats] = {}

    def publisher(self, endpoint: str, rank: int | None) -> PublisherStats:
        """Return the counts of one publisher, made when first asked for."""
        key = (endpoint, rank)
        if key not in self._publishers:
            self._publishers[key] = PublisherStats(endpoint, rank)
        return self._publishers[key]

    def __iter__(self) -> Iterator[PublisherStats]:
        return iter(self._publishers.values())

    def __len__(self) -> int:
        return len(self._publishers)
