"""Sliding window attention: the hit needs only the blocks of one window before its end."""

from __future__ import annotations

from typing import Any

from ..block import Block, cdiv
from ..block_pool import hashes_at
from .base import GroupManager
from .lookup import GroupHit, Lookup

__all__ = ["SlidingWindowManager"]


class SlidingWindowManager(GroupManager):
    """Keeps the last `sliding_window` tokens of a request."""

    def __init__(self, *, sliding_window: int, **options: Any) -> None:
        super().__init__(**options)
        self.sliding_window = sliding_window

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return the tokens before the window of the next token."""
        return max(0, num_computed_tokens - self.sliding_window + 1)

    def find_longest_hit(self, lookup: Lookup) -> GroupHit:
        """Look from the right for a run of cached blocks as long as a window; a shorter run counts at the start."""
        size, unit, pool = self.block_size, lookup.alignment, lookup.pool
        hashes = hashes_at(lookup.hashes, pool.hash_block_size, size)
        need = self._window_blocks(drop_eagle=lookup.drop_eagle)
        count = lookup.max_length // size
        rows: list[list[Block]] = [[pool.null_block] * count for _ in lookup.group_ids]
        run = 0
        for index in range(count - 1, -1, -1):
            found = pool.get_cached_blocks(hashes[index], lookup.group_ids)
            if found is None:
                run = 0
                continue
            ends_at = (index if lookup.drop_eagle else index + 1) * size
            if run == 0 and size != unit and ends_at % unit != 0:
                continue  # no hit may end here
            for row, block in zip(rows, found, strict=True):
                row[index] = block
            run += 1
            if run >= need:
                _cut(rows, index + run)
                break
        else:
            _cut(rows, run)
            self._align(rows, unit)
        if lookup.drop_eagle and rows[0]:
            _cut(rows, len(rows[0]) - 1)
            self._align(rows, unit)
        return GroupHit(rows, len(rows[0]) * size)

    def reachable_mask(self, first: int, end: int) -> list[bool] | None:
        """Return which blocks lie in the window before a boundary at which a hit can end."""
        if self.hit_alignment % self.block_size:
            return None
        need = self._window_blocks(drop_eagle=self.use_eagle)
        segment = self.hit_alignment // self.block_size
        if need >= segment:
            return None
        shift = int(self.use_eagle)  # the dropped block lies behind the boundary
        return [i >= shift and (i - shift) % segment >= segment - need for i in range(first, end)]

    def _window_blocks(self, *, drop_eagle: bool) -> int:
        return cdiv(self.sliding_window - 1, self.block_size) + drop_eagle

    def _align(self, rows: list[list[Block]], unit: int) -> None:
        if self.block_size != unit:
            length = len(rows[0])
            while length * self.block_size % unit:
                length -= 1
            _cut(rows, length)


def _cut(rows: list[list[Block]], length: int) -> None:
    for row in rows:
        del row[length:]
