"""Which blocks of which group a prefix needs, so that a request can go on after it."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from ..block_pool import block_key, hashes_at
from ..cache_manager import CacheManager
from ..request import Request
from ..spec import FullAttentionSpec

__all__ = ["Page", "PrefixGeometry"]


@dataclass(frozen=True, slots=True)
class Page:
    """One block to be loaded. ``first``: the first token of the request in it."""

    first: int
    group: int
    block_id: int
    key: bytes


class PrefixGeometry:
    """The groups of a cache, as connectors see them.

    ``groups``: for each group its id, its manager and its block size in tokens. ``unit``: tokens that a prefix to be
    loaded is a multiple of.
    """

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self.groups = [
            (group, manager, manager.block_size) for group, manager in enumerate(cache.coordinator.managers)
        ]
        self.unit = cache.config.scheduler_block_size

    def size(self, group: int) -> int:
        """Return a group's block size in tokens."""
        return self.groups[group][2]

    def limit(self, request: Request) -> int:
        """Return the longest prefix that could be loaded: whole units, hashed, and a token left to compute."""
        hashed = len(request.block_hashes) * self._cache.pool.hash_block_size
        return min(request.num_tokens - 1, hashed) // self.unit * self.unit

    def keys(self, request: Request, start: int, end: int) -> dict[int, list[bytes]]:
        """Return for each group the keys of its blocks of the tokens `start` to `end`."""
        unit = self._cache.pool.hash_block_size
        return {
            group: [
                block_key(value, group)
                for value in hashes_at(request.block_hashes, unit, size)[start // size : end // size]
            ]
            for group, _, size in self.groups
        }

    def pages(self, keys: Mapping[int, Sequence[bytes]], start: int, end: int) -> list[Page]:
        """Return the blocks that a prefix of `end` tokens needs beyond the local hit of `start`."""
        pages: list[Page] = []
        for group, manager, size in self.groups:
            first = start // size
            needed = max(first, manager.num_skipped_tokens(end) // size)
            pages += (
                Page(index * size, group, 0, keys[group][index - first])
                for index in range(needed, end // size)
            )
        return pages

    def longest(
        self, keys: Mapping[int, Sequence[bytes]], start: int, limit: int, where: Container[bytes]
    ) -> int:
        """Return the longest prefix, in whole units, all of whose blocks are there; `start` if there is none."""
        for group, _, size in self.groups:
            if isinstance(self._cache.config.groups[group], FullAttentionSpec):
                there = next((i for i, key in enumerate(keys[group]) if key not in where), len(keys[group]))
                limit = min(limit, start + there * size)
        end = limit // self.unit * self.unit
        if self._cache.config.use_eagle:
            end -= self.unit  # the drafter needs the hidden states of the last unit, so that is computed
        while end > start:
            if all(page.key in where for page in self.pages(keys, start, end)):
                return end
            end -= self.unit
        return start
