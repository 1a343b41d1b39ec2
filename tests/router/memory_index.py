"""The least index that can stand in for the SDK's: one group, one tier, hashes counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from kvhash.block_hash import ChainValue, low64
from kvhash.events.records import Lost, Restart
from kvhash.events.schema import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, hash_key


@dataclass(frozen=True)
class Match:
    """Blocks and tokens held."""

    blocks: int
    tokens: int


class MemoryIndex:
    """Holds the keys of every engine. ``fails``: raised by every call, as a store that is down would."""

    def __init__(self, block_size: int = 16) -> None:
        self.block_size = block_size
        self.held: dict[str, Counter[int]] = {}
        self.lost: set[str] = set()
        self.fails: Exception | None = None

    def _check(self) -> None:
        if self.fails is not None:
            raise self.fails

    def apply(self, engine: str, batch: EventBatch) -> None:
        """Take in a batch."""
        self._check()
        held = self.held.setdefault(engine, Counter())
        for event in batch.events:
            if isinstance(event, BlockStored):
                held.update(map(hash_key, event.block_hashes))
            elif isinstance(event, BlockRemoved):
                held.subtract(map(hash_key, event.block_hashes))
            elif isinstance(event, AllBlocksCleared):
                held.clear()

    def apply_record(self, engine: str, record: Any) -> None:
        """Take in a loss or a restart."""
        self._check()
        if isinstance(record, Lost):
            self.lost.add(engine)
        elif isinstance(record, Restart):
            self.lost.discard(engine)
            self.held.pop(engine, None)

    def longest_prefix(
        self, hashes: Sequence[ChainValue], engines: Collection[str] | None = None
    ) -> dict[str, Match]:
        """Return what each engine holds of the chain."""
        self._check()
        result = {}
        for engine in engines if engines is not None else self.held:
            held = self.held.get(engine, Counter())
            count = 0
            while count < len(hashes) and held[low64(hashes[count])] > 0:
                count += 1
            result[engine] = Match(count, count * self.block_size)
        return result

    def knowledge(self, engine: str) -> str:
        """Return the state of knowledge."""
        self._check()
        return "degraded" if engine in self.lost else "exact"

    def remove(self, engine: str) -> None:
        """Forget an engine."""
        self._check()
        self.held.pop(engine, None)
        self.lost.discard(engine)

    def stats(self) -> dict[str, int]:
        """Return the number of engines."""
        return {"engines": len(self.held)}
