"""The KV cache manager: what the scheduler asks for a request's cached prefix and for its blocks."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from .block import Block
from .block_pool import BlockPool
from .coordinator import CacheConfig, Coordinator, Hit
from .events import KVEvent
from .request import Request, RequestStatus

__all__ = ["CacheManager", "CacheStats"]


@dataclass(slots=True)
class CacheStats:
    """Tokens asked for and tokens hit by admitted requests; those of preempted requests apart."""

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def record(self, queries: int, hits: int, *, preempted: bool) -> None:
        """Count the lookup of one request."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += queries
            self.preempted_hits += hits
        else:
            self.requests += 1
            self.queries += queries
            self.hits += hits


class CacheManager:
    """One engine's KV cache."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.pool = BlockPool(
            config.num_blocks,
            hash_block_size=config.hash_block_size,
            groups=config.groups,
            enable_caching=config.enable_caching,
            enable_events=config.enable_events,
            external_form=config.event_hash_form,
        )
        self.coordinator = Coordinator(config, self.pool)
        self.watermark_blocks = int(config.watermark * config.num_blocks)
        self.stats = CacheStats()

    def get_computed_blocks(self, request: Request) -> Hit:
        """Return the cached prefix of a request, at most all tokens but the last (its logits are needed).

        Sets ``shared_prefix_boundary`` where another request's longer prefix lacks a state.
        """
        if not self.config.enable_caching or request.skip_reading_prefix_cache:
            return self.no_hit()
        return self.coordinator.find_longest_hit(request, request.num_tokens - 1)

    def no_hit(self) -> Hit:
        """Return the empty hit."""
        return Hit(tuple([] for _ in self.config.groups), 0, 0)

    def record_lookup(self, request: Request, num_hit_tokens: int) -> None:
        """Count an admitted request's lookup; one that skips the cache is not counted."""
        if not self.config.enable_caching or request.skip_reading_prefix_cache:
            return
        self.stats.record(request.num_tokens, num_hit_tokens, preempted=request.num_preemptions > 0)

    def has_room(self, request: Request, num_tokens: int) -> bool:
        """Whether a running request can go on to `num_tokens` with nothing to take, cache or free.

        Then `allocate_slots` would change nothing; so it is in most steps of a decode.
        """
        if num_tokens > self.config.max_model_len:
            return False
        for manager in self.coordinator.managers:  # noqa: SIM110  (a generator costs more than the answer)
            if not manager.has_room(request, num_tokens):
                return False
        return True

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        *,
        hit: Hit | None = None,
        num_lookahead_tokens: int = 0,
        num_external_tokens: int = 0,
        delay_cache_blocks: bool = False,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_requests: bool = True,
    ) -> tuple[list[Block], ...] | None:
        """Give a request slots for `num_new_tokens` more tokens; returns the new blocks, or None if they do not fit.

        `hit`: the cached prefix of a request that is not running. `num_lookahead_tokens`: slots for drafts, never
        cached. `num_external_tokens`: tokens after the hit that a connector has; with `delay_cache_blocks` they are
        loaded later and nothing is cached yet. `full_sequence_must_fit`: refuse unless all tokens that the request
        has now would fit. `reserved_blocks`: free blocks to leave to others. A refusal changes nothing but that
        blocks which slid out of a window are freed.
        """
        if num_new_tokens == 0 and num_external_tokens == 0 and (hit is None or hit.num_tokens == 0):
            raise ValueError("an allocation needs new tokens, hit tokens or external tokens")
        hit_blocks: Sequence[Sequence[Block]] = hit.blocks if hit else [()] * len(self.config.groups)
        max_len = self.config.max_model_len
        local = request.num_computed_tokens + (hit.num_tokens if hit else 0)
        total = min(local + num_external_tokens, max_len)
        watermark = 0
        if has_scheduled_requests and request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            watermark = self.watermark_blocks
        if full_sequence_must_fit:
            all_tokens = min(request.num_tokens, max_len)
            needed = self.coordinator.num_blocks_to_allocate(
                request.request_id,
                num_tokens=all_tokens,
                hit_blocks=hit_blocks,
                total_computed_tokens=total,
                local_computed_tokens=local,
                main_model_tokens=all_tokens,
                apply_cap=True,
            )
            if needed + watermark > self.pool.num_free_blocks:
                return None
        main_model_tokens = total + num_new_tokens
        num_tokens = min(main_model_tokens + num_lookahead_tokens, max_len)
        # Steps in flight may still read what slid out since; only settled tokens count.
        self.coordinator.remove_skipped_blocks(
            request.request_id, max(0, total - request.num_in_flight_tokens)
        )
        needed = self.coordinator.num_blocks_to_allocate(
            request.request_id,
            num_tokens=num_tokens,
            hit_blocks=hit_blocks,
            total_computed_tokens=local + num_external_tokens,
            local_computed_tokens=local,
            main_model_tokens=main_model_tokens,
        )
        if needed + watermark > self.pool.num_free_blocks - reserved_blocks:
            return None
        if any(hit_blocks) or num_external_tokens > 0:
            self.coordinator.add_computed_blocks(
                request.request_id, hit_blocks, local_tokens=local, external_tokens=num_external_tokens
            )
        new_blocks = self.coordinator.allocate_new_blocks(request.request_id, num_tokens, main_model_tokens)
        if not delay_cache_blocks:
            # Draft tokens are not among the request's tokens, so they are never cached.
            self.cache_blocks(request, min(total + num_new_tokens, request.num_tokens))
        return new_blocks

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Make the blocks that these tokens fill findable."""
        if self.config.enable_caching:
            self.coordinator.cache_blocks(request, num_computed_tokens)

    def remaining_blocks(self, request: Request) -> int:
        """Return how many blocks more a request needs to hold all the tokens that it has."""
        num_tokens = min(request.num_tokens, self.config.max_model_len)
        return self.coordinator.num_blocks_to_allocate(
            request.request_id,
            num_tokens=num_tokens,
            hit_blocks=[()] * len(self.config.groups),
            total_computed_tokens=request.num_computed_tokens,
            local_computed_tokens=request.num_computed_tokens,
            main_model_tokens=num_tokens,
            apply_cap=True,
        )

    def first_token_in(self, rows: Sequence[Sequence[int]], block_ids: Container[int]) -> int | None:
        """Return the first token of a block table (one row a group) that lies in one of these blocks, if any does."""
        return min(
            (
                index * manager.block_size
                for manager, row in zip(self.coordinator.managers, rows, strict=True)
                for index, block_id in enumerate(row)
                if block_id in block_ids
            ),
            default=None,
        )

    def block_ids_from(self, rows: Sequence[Sequence[int]], first: int) -> set[int]:
        """Return the ids in a block table that hold the token `first` or later ones, the null block apart."""
        return {
            block_id
            for manager, row in zip(self.coordinator.managers, rows, strict=True)
            for block_id in row[first // manager.block_size :]
            if block_id != self.pool.null_block.block_id
        }

    def free(self, request: Request) -> None:
        """Free a request's blocks."""
        self.coordinator.free(request.request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget every hash; False, and nothing changed, while any block is held."""
        return self.pool.reset()

    def block_ids(self, request_id: str) -> list[list[int]]:
        """Return a request's block table as ids, one row a group, 0 where there is no block."""
        return [[block.block_id for block in row] for row in self.coordinator.blocks_of(request_id)]

    def take_copies(self) -> tuple[list[tuple[int, int]], list[Block]]:
        """Return the (source, copy) block ids to be copied before the step, and the blocks to free after that."""
        pairs = [pair for manager in self.coordinator.managers for pair in manager.take_pending_copies()]
        ids = [(source.block_id, copy.block_id) for source, copy in pairs]
        return ids, [block for pair in pairs for block in pair]

    def take_events(self) -> list[KVEvent]:
        """Return the events since the last call."""
        return self.pool.take_events()

    def new_step_starts(self) -> None:
        """Tell the cache that a new scheduling step begins."""
        self.coordinator.new_step_starts()
