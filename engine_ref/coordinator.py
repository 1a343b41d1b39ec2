"""The coordinator: one hit length that is valid for every KV cache group, and every change made in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvhash.block_hash import ExternalForm

from .block import Block, cdiv
from .block_pool import BlockPool
from .managers import FullAttentionManager, GroupManager, MambaManager, make_manager
from .managers.lookup import Lookup
from .request import Request
from .spec import FullAttentionSpec, GroupSpec, MambaSpec

__all__ = ["CacheConfig", "Coordinator", "Hit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The geometry of a KV cache.

    ``num_blocks``: blocks of the pool, the null block included. ``hash_block_size``: tokens per hash.
    ``scheduler_block_size``: the least common multiple of the groups' block sizes in tokens.
    ``max_in_flight_tokens``: tokens planned and not settled at most; None: ``max_model_len``.
    ``watermark``: share of the pool that admissions leave free. ``event_hash_form``: how events carry hashes.
    """

    groups: tuple[GroupSpec, ...]
    num_blocks: int
    hash_block_size: int
    scheduler_block_size: int
    max_model_len: int
    max_in_flight_tokens: int | None = None
    use_eagle: bool = False
    decode_context_parallel_size: int = 1
    enable_caching: bool = True
    enable_events: bool = True
    watermark: float = 0.0
    event_hash_form: ExternalForm = "uint64"


@dataclass(frozen=True, slots=True)
class Hit:
    """The cached prefix of a request: blocks of each group and their tokens.

    ``longest_tokens``: what the group with the longest prefix has; more than ``num_tokens`` where another lags.
    """

    blocks: tuple[list[Block], ...]
    num_tokens: int
    longest_tokens: int


@dataclass(slots=True)
class _SpecGroup:
    """Groups that share a spec are searched together: a hit must be there in all of them."""

    spec: GroupSpec
    group_ids: list[int]
    drop_eagle: bool


class Coordinator:
    """All groups of one pool."""

    def __init__(self, config: CacheConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self.hybrid = len(config.groups) > 1
        self.fine_grained = self.hybrid and _fine_grained_hits(config)
        self.hit_alignment = config.hash_block_size if self.fine_grained else config.scheduler_block_size
        self.managers: tuple[GroupManager, ...] = tuple(
            make_manager(
                spec,
                pool=pool,
                group_id=group_id,
                hit_alignment=self.hit_alignment,
                decode_context_parallel_size=config.decode_context_parallel_size,
                max_in_flight_tokens=config.max_model_len
                if config.max_in_flight_tokens is None
                else config.max_in_flight_tokens,
                max_model_len=config.max_model_len,
            )
            for group_id, spec in enumerate(config.groups)
        )
        self._spec_groups: list[_SpecGroup] = []
        for group_id, spec in enumerate(config.groups):
            manager = self.managers[group_id]
            manager.use_eagle = config.use_eagle
            if isinstance(manager, MambaManager):
                manager.drop_eagle_checkpoint = config.use_eagle
            same = next((group for group in self._spec_groups if group.spec == spec), None)
            if same is None:
                self._spec_groups.append(_SpecGroup(spec, [group_id], config.use_eagle))
            else:
                same.group_ids.append(group_id)
        # Full attention first: its one walk from the left bounds every other search.
        self._spec_groups.sort(key=lambda group: not isinstance(group.spec, FullAttentionSpec))

    # ---- lookup

    def find_longest_hit(self, request: Request, max_length: int) -> Hit:
        """Return the longest prefix, at most `max_length` tokens, that every group can go on from.

        Each kind of group accepts the length so far or shortens it; after a shortening all are asked again, until
        none objects.
        """
        if not self.config.enable_caching:
            return Hit(tuple([] for _ in self.managers), 0, 0)
        rows: list[list[Block]] = [[] for _ in self.managers]
        found: dict[int, int] = {}
        settled: set[int] = set()  # groups whose Eagle unit is dropped at the current length already
        two_kinds = len(self._spec_groups) == 2 and isinstance(self._spec_groups[0].spec, FullAttentionSpec)
        length, longest = max_length, 0
        while True:
            current = length
            for number, group in enumerate(self._spec_groups):
                if isinstance(group.spec, FullAttentionSpec) and number in found:
                    current = min(current, found[number])  # every prefix of its hit is a hit
                    continue
                drop = group.drop_eagle and number not in settled
                hit = self.managers[group.group_ids[0]].find_longest_hit(
                    Lookup(
                        hashes=request.block_hashes,
                        max_length=self._search_length(group, current, request) if drop else current,
                        group_ids=group.group_ids,
                        pool=self.pool,
                        alignment=self.hit_alignment,
                        drop_eagle=drop,
                    )
                )
                if drop:
                    settled.add(number)
                elif hit.length < current:
                    settled.clear()
                current = found[number] = hit.length
                for group_id, row in zip(group.group_ids, hit.blocks, strict=True):
                    rows[group_id] = row
                longest = max(longest, current)
            if not self.hybrid:
                return Hit(tuple(rows), current, current)
            if current >= length:
                break
            length = current
            if two_kinds:
                break
        for group_id, manager in enumerate(self.managers):
            if isinstance(manager, FullAttentionManager):
                del rows[group_id][cdiv(length, manager.block_size) :]
        return Hit(tuple(rows), length, longest)

    def _search_length(self, group: _SpecGroup, current: int, request: Request) -> int:
        """Return how far to look when a unit will be dropped: one unit more, so that the hit can be `current`."""
        if not self.hybrid or isinstance(group.spec, MambaSpec):
            return current
        manager, unit = self.managers[group.group_ids[0]], self.config.hash_block_size
        inside = self.fine_grained and manager.fine_grained and manager.block_size > unit
        margin = unit if inside else manager.block_size
        return min(current + margin, len(request.block_hashes) * unit)

    def truncate_hit(self, hit: Hit, num_tokens: int) -> Hit:
        """Return a hit cut to `num_tokens`, for a connector to go on from; it may lack the last window or state."""
        rows = tuple(
            row[: num_tokens // manager.block_size]
            for manager, row in zip(self.managers, hit.blocks, strict=True)
        )
        return Hit(rows, num_tokens, hit.longest_tokens)

    # ---- allocation

    def num_blocks_to_allocate(
        self,
        request_id: str,
        *,
        num_tokens: int,
        hit_blocks: Sequence[Sequence[Block]],
        total_computed_tokens: int,
        local_computed_tokens: int,
        main_model_tokens: int,
        apply_cap: bool = False,
    ) -> int:
        """Return how many free blocks an allocation takes in all groups together."""
        return sum(
            manager.num_blocks_to_allocate(
                request_id,
                num_tokens=num_tokens,
                hit_blocks=blocks,
                total_computed_tokens=total_computed_tokens,
                local_computed_tokens=local_computed_tokens,
                main_model_tokens=main_model_tokens,
                apply_cap=apply_cap,
            )
            for manager, blocks in zip(self.managers, hit_blocks, strict=True)
        )

    def add_computed_blocks(
        self,
        request_id: str,
        hit_blocks: Sequence[Sequence[Block]],
        *,
        local_tokens: int,
        external_tokens: int,
    ) -> None:
        """Give a new request its hit blocks, then blocks for what a connector will load.

        The hits of all groups are held before any block is taken, so that taking one group's cannot evict another's.
        """
        if any(request_id in manager.num_cached for manager in self.managers):
            assert not any(hit_blocks), "a running request has no new hits"
            return
        for manager, blocks in zip(self.managers, hit_blocks, strict=True):
            manager.add_hit_blocks(
                request_id, blocks, local_tokens=local_tokens, external_tokens=external_tokens
            )
        if external_tokens > 0:
            for manager in self.managers:
                manager.add_external_blocks(
                    request_id, local_tokens=local_tokens, external_tokens=external_tokens
                )

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, main_model_tokens: int
    ) -> tuple[list[Block], ...]:
        """Take the blocks that are missing in each group."""
        return tuple(
            manager.allocate_new_blocks(request_id, num_tokens, main_model_tokens)
            for manager in self.managers
        )

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Make what `num_computed_tokens` fill findable, as far as a hit can ever reach it."""
        for manager in self.managers:
            manager.cache_blocks(request, self._cacheable(num_computed_tokens, manager))

    def _cacheable(self, num_tokens: int, manager: GroupManager) -> int:
        if not self.hybrid or self.fine_grained:
            return num_tokens
        aligned = num_tokens // self.config.scheduler_block_size * self.config.scheduler_block_size
        if manager.use_eagle and aligned > 0:  # the unit that is dropped must be there
            return min(num_tokens, aligned + manager.block_size)
        return aligned

    def remove_skipped_blocks(self, request_id: str, computed_tokens: int) -> None:
        """Free what slid out of the windows."""
        for manager in self.managers:
            manager.remove_skipped_blocks(request_id, computed_tokens)

    def pop_blocks(self, request_id: str) -> list[Block]:
        """Forget a request and return all its blocks without freeing them."""
        return [block for manager in self.managers for block in manager.pop_blocks(request_id)]

    def free(self, request_id: str) -> None:
        """Free a request's blocks, group by group."""
        for manager in self.managers:
            manager.free(request_id)

    def blocks_of(self, request_id: str) -> tuple[list[Block], ...]:
        """Return the block table of a request, one row a group."""
        return tuple(manager.req_to_blocks.get(request_id, []) for manager in self.managers)

    def new_step_starts(self) -> None:
        """Tell every group that a new scheduling step begins."""
        for manager in self.managers:
            manager.new_step_starts()


def _fine_grained_hits(config: CacheConfig) -> bool:
    """Return whether hits may end inside blocks.

    They may where a state block spans several hashes and every group can be searched at hash boundaries.
    """
    unit, dcp = config.hash_block_size, config.decode_context_parallel_size
    states = [spec.block_size for spec in config.groups if isinstance(spec, MambaSpec)]
    if not any(size > unit or (dcp > 1 and size == unit) for size in states):
        return False
    return all(
        isinstance(spec, (FullAttentionSpec, MambaSpec)) or spec.block_size * dcp == unit
        for spec in config.groups
    )
