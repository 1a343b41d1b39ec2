"""Chunked local attention: the hit needs the cached blocks of its last, begun chunk; earlier chunks need none."""

from __future__ import annotations

from typing import Any

from ..block import Block
from ..block_pool import hashes_at
from .base import GroupManager
from .lookup import GroupHit, Lookup

__all__ = ["ChunkedLocalAttentionManager"]


class ChunkedLocalAttentionManager(GroupManager):
    """Keeps the tokens of the chunk that a request is in."""

    def __init__(self, *, attention_chunk_size: int, **options: Any) -> None:
        super().__init__(**options)
        self.attention_chunk_size = attention_chunk_size

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return the tokens of the chunks that are over."""
        return num_computed_tokens // self.attention_chunk_size * self.attention_chunk_size

    def find_longest_hit(self, lookup: Lookup) -> GroupHit:
        """Take null blocks up to the last chunk and walk that from the left until the first miss."""
        size, pool = self.block_size, lookup.pool
        hashes = hashes_at(lookup.hashes, pool.hash_block_size, size)
        start = self.num_skipped_tokens(max(0, lookup.max_length)) // size
        rows: list[list[Block]] = [[pool.null_block] * start for _ in lookup.group_ids]
        for index in range(start, lookup.max_length // size):
            found = pool.get_cached_blocks(hashes[index], lookup.group_ids)
            if found is None:
                break
            for row, block in zip(rows, found, strict=True):
                row.append(block)
        return GroupHit(rows, len(rows[0]) * size)
