"""Full attention: the hit is the longest run of cached blocks from the start of the prompt."""

from __future__ import annotations

from itertools import islice

from ..block import Block, cdiv
from ..block_pool import hashes_at
from ..request import Request
from .base import GroupManager
from .lookup import GroupHit, Lookup

__all__ = ["FullAttentionManager"]


class FullAttentionManager(GroupManager):
    """Keeps every block of a request until it ends."""

    fine_grained = True

    def find_longest_hit(self, lookup: Lookup) -> GroupHit:
        """Walk whole blocks from the left until the first miss, then try the boundaries inside the next block."""
        size, pool = self.block_size, lookup.pool
        blocks: list[list[Block]] = [[] for _ in lookup.group_ids]
        whole = hashes_at(lookup.hashes, pool.hash_block_size, size)
        for block_hash in islice(whole, lookup.max_length // size):
            found = pool.get_cached_blocks(block_hash, lookup.group_ids)
            if found is None:
                break
            for row, block in zip(blocks, found, strict=True):
                row.append(block)
        length = len(blocks[0]) * size
        unit = lookup.alignment
        if unit < size and size % unit == 0:
            first = length // unit
            last = min(first + size // unit - 1, lookup.max_length // unit, len(lookup.hashes))
            for index in range(last - 1, first - 1, -1):
                found = pool.get_cached_blocks(lookup.hashes[index], lookup.group_ids)
                if found is not None:
                    for row, block in zip(blocks, found, strict=True):
                        row.append(block)
                    length = (index + 1) * unit
                    break
        if lookup.drop_eagle and length > 0:
            length -= min(unit, size)
        length -= length % unit
        for row in blocks:
            del row[cdiv(length, size) :]
        return GroupHit(blocks, length)

    def has_room(self, request: Request, num_tokens: int) -> bool:
        """Whether the blocks held are enough and all full ones are cached; so it is in most steps of a decode."""
        request_id, size = request.request_id, self.block_size
        cached = self.num_cached.get(request_id)
        return (
            cached is not None
            and num_tokens <= len(self.req_to_blocks[request_id]) * size
            and min(num_tokens, request.num_tokens) < (cached + 1) * size
            and size == self.pool.hash_block_size
            and request_id not in self._partial_hits
        )

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Cache full blocks, and the prompt's last hash boundary where it lies inside a block."""
        super().cache_blocks(request, num_tokens)
        if self.block_size != self.pool.hash_block_size:
            self._cache_prompt_tail(request, num_tokens)

    def _cache_prompt_tail(self, request: Request, num_tokens: int) -> None:
        unit = self.pool.hash_block_size
        limit = request.num_prompt_tokens - (not self.use_eagle)  # a resend recomputes its last token
        boundary = min(limit // unit, len(request.block_hashes)) * unit
        if boundary == 0 or boundary > num_tokens or boundary % self.block_size == 0:
            return
        blocks = self.req_to_blocks[request.request_id]
        index = boundary // self.block_size
        if index < len(blocks):
            self.pool.cache_partial_block(request, blocks[index], num_tokens=boundary, group_id=self.group_id)
