"""The books balance after every step, whatever requests do, and events tell the whole truth about the pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from engine_ref.coordinator import CacheConfig
from engine_ref.core import EngineCore
from engine_ref.events import KVEvent
from engine_ref.request import Request
from engine_ref.runner import NullRunner
from engine_ref.scheduler import SchedulerConfig
from engine_ref.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    GroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kvhash import BlockHasher
from kvhash.block_hash import get_block_hash, get_group_id, low64
from kvhash.events.schema import AllBlocksCleared, BlockRemoved, BlockStored

#: Name: groups, hash block size, scheduler block size, Eagle.
SHAPES: dict[str, tuple[tuple[GroupSpec, ...], int, int, bool]] = {
    "full": ((FullAttentionSpec(block_size=4),), 4, 4, False),
    "eagle": ((FullAttentionSpec(block_size=4),), 4, 4, True),
    "window": (
        (FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=4, sliding_window=9)),
        4,
        4,
        False,
    ),
    "window-eagle": (
        (FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=4, sliding_window=9)),
        4,
        4,
        True,
    ),
    "sizes": (
        (
            FullAttentionSpec(block_size=8),
            SlidingWindowSpec(block_size=4, sliding_window=6),
            SlidingWindowSpec(block_size=4, sliding_window=6),
        ),
        4,
        8,
        False,
    ),
    "chunked": (
        (FullAttentionSpec(block_size=4), ChunkedLocalAttentionSpec(block_size=4, attention_chunk_size=16)),
        4,
        4,
        False,
    ),
    "state": ((FullAttentionSpec(block_size=4), MambaSpec(block_size=4)), 4, 4, False),
    "state-fine": ((FullAttentionSpec(block_size=4), MambaSpec(block_size=8)), 4, 8, False),
}


class Books(RuleBasedStateMachine):
    """Requests come, run, end and are cut off; the cache is reset between."""

    shape = "full"

    @initialize(
        asynchronous=st.booleans(),
        drafts=st.sampled_from([0, 2]),
        priority=st.booleans(),
        size=st.integers(24, 40),
    )
    def start(self, asynchronous: bool, drafts: int, priority: bool, size: int) -> None:
        """Start an engine with few blocks."""
        groups, unit, align, eagle = SHAPES[self.shape]
        stateful = any(isinstance(group, MambaSpec) for group in groups)
        cache = CacheConfig(
            groups=groups,
            num_blocks=size,
            hash_block_size=unit,
            scheduler_block_size=align,
            max_model_len=36,
            max_in_flight_tokens=24,
            use_eagle=eagle,
        )
        self.engine = EngineCore(
            SchedulerConfig(
                cache=cache,
                max_num_seqs=4,
                max_num_batched_tokens=12,
                policy="priority" if priority else "fcfs",
                async_scheduling=asynchronous,
                num_speculative_tokens=0 if stateful or asynchronous else drafts,
            ),
            NullRunner(vocab_size=3, cache=cache),
            publish=self.publish,
        )
        self.hasher = BlockHasher(block_size=unit, algorithm="sha256_cbor", hash_seed="0")
        self.index: Counter[tuple[int, int]] = Counter()
        self.count = 0
        self.ended: list[str] = []

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Keep the index that a subscriber would have."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.index.clear()
                continue
            assert event.group_idx is not None
            keys = [(event.group_idx, low64(value)) for value in event.block_hashes]
            if isinstance(event, BlockStored):
                self.index.update(keys)
            else:
                assert isinstance(event, BlockRemoved)
                self.index.subtract(keys)
                assert min(self.index[key] for key in keys) >= 0, "removed, but never stored"

    @rule(
        shared=st.integers(0, 24),
        own=st.integers(1, 8),
        output=st.integers(1, 12),
        salt=st.sampled_from([None, "a"]),
    )
    def admit(self, shared: int, own: int, output: int, salt: str | None) -> None:
        """Send a request that shares a prefix with others."""
        prompt = [7] * min(shared, 30 - own) + [8 + self.count % 3] * own
        self.count += 1
        self.engine.add_request(
            Request(
                f"r{self.count}",
                prompt,
                hasher=self.hasher,
                max_tokens=output,
                cache_salt=salt,
                priority=self.count % 3,
                arrival_time=self.count,
            )
        )

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        """Run steps, with drafts where the engine takes them."""
        scheduler = self.engine.scheduler
        for _ in range(times):
            if scheduler.config.num_speculative_tokens:
                scheduler.update_draft_token_ids({r.request_id: [0, 1] for r in scheduler.running})
            self.ended += [request.request_id for request in self.engine.step().finished]

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Cut off a request wherever it is."""
        if self.engine.scheduler.requests:
            victim = data.draw(st.sampled_from(sorted(self.engine.scheduler.requests)))
            self.ended += [request.request_id for request in self.engine.abort([victim])]

    @rule(running=st.booleans())
    def reset(self, running: bool) -> None:
        """Reset; with the running requests it always succeeds, without only when no block is held."""
        pool = self.engine.scheduler.cache.pool
        idle = pool.num_free_blocks == pool.num_blocks - 1
        done = self.engine.reset_prefix_cache(reset_running_requests=running)
        assert done is (running or idle)

    @invariant()
    def books_balance(self) -> None:
        """Every block is free, held or null; counts, hash map and index agree."""
        if not hasattr(self, "engine"):
            return
        cache = self.engine.scheduler.cache
        pool = cache.pool
        free = [block.block_id for block in pool.free_queue]
        assert len(free) == len(set(free)) == pool.num_free_blocks
        holds = Counter(
            block.block_id
            for manager in cache.coordinator.managers
            for blocks in manager.req_to_blocks.values()
            for block in blocks
            if not block.is_null
        )
        for block in pool.blocks[1:]:
            assert block.ref_cnt == holds[block.block_id], block
            assert (block.block_id in free) is (block.ref_cnt == 0), block
        assert 0 not in free
        keys = {
            key: frozenset(b.block_id for b in pool.blocks if key in pool.keys_of(b))
            for key in pool.cached_keys
        }
        assert pool.cached_keys == keys
        assert sum(len(pool.keys_of(b)) for b in pool.blocks) == sum(map(len, keys.values()))
        self.publish(self.engine.scheduler.take_events())
        held = Counter({(get_group_id(k), low64(get_block_hash(k))): len(v) for k, v in keys.items()})
        assert +self.index == held

    def teardown(self) -> None:
        """Let all requests end: none is lost, no block is kept."""
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.ended += [request.request_id for request in self.engine.step().finished]
            self.books_balance()
        assert not self.engine.has_work, "the engine is stuck"
        assert sorted(self.ended) == sorted(f"r{i + 1}" for i in range(self.count))
        pool = self.engine.scheduler.cache.pool
        assert pool.num_free_blocks == pool.num_blocks - 1


@pytest.mark.parametrize("shape", SHAPES)
def test_books_balance(shape: str) -> None:
    """No sequence of admissions, steps, aborts and resets leaks a block, loses a request or falsifies the index."""
    run_state_machine_as_test(
        type(f"Books_{shape}", (Books,), {"shape": shape}),
        settings=settings(
            max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
