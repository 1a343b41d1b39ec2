"""The books balance after every step, whatever requests and connectors do, and events tell the whole truth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from engine_ref.connectors import HostTier
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

from .chaos_connector import ChaosConnector

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
    connector: ChaosConnector | None = None

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
        self.connector = self.make_connector()
        self.engine = EngineCore(
            SchedulerConfig(
                cache=cache,
                max_num_seqs=4,
                max_num_batched_tokens=12,
                policy="priority" if priority else "fcfs",
                async_scheduling=asynchronous,
                num_speculative_tokens=0 if stateful else drafts,
            ),
            NullRunner(vocab_size=3, cache=cache),
            publish=self.publish,
            connector=self.connector,
        )
        self.hasher = BlockHasher(block_size=unit, algorithm="sha256_cbor", hash_seed="0")
        self.index: Counter[tuple[int, int]] = Counter()
        self.tiers: dict[str, set[tuple[int, int]]] = {"CPU": set(), "STORAGE": set()}
        self.unheard: set[tuple[int, int]] = set()
        self.count = 0
        self.ended: list[str] = []

    def make_connector(self) -> ChaosConnector | None:
        """Return the connector of the engine."""
        return None

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Keep the index that a subscriber would have."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.index.clear()
                for known in self.tiers.values():
                    self.unheard |= known  # cleared for a subscriber, though a tier may have it still
                    known.clear()
                continue
            assert event.group_idx is not None
            assert event.medium is not None
            keys = [(event.group_idx, low64(value)) for value in event.block_hashes]
            if event.medium != "GPU":
                self.tiers[event.medium] -= set(keys)
                if isinstance(event, BlockStored):
                    self.tiers[event.medium] |= set(keys)
            elif isinstance(event, BlockStored):
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

    @rule(running=st.booleans(), external=st.booleans())
    def reset(self, running: bool, external: bool) -> None:
        """Reset; with the running requests it succeeds unless a connector holds on, without only when all is free."""
        pool, remote = self.engine.scheduler.cache.pool, self.engine.scheduler.remote
        idle = pool.num_free_blocks == pool.num_blocks - 1
        blocks_of = self.engine.scheduler.cache.coordinator.blocks_of
        stuck = any(not block.is_null for i in remote.keeps for row in blocks_of(i) for block in row)
        if self.connector is not None and self.connector.stubborn:
            stuck |= any(r.request_id in self.connector._loading for r in remote.queue)
        done = self.engine.reset_prefix_cache(reset_running_requests=running, reset_external=external)
        assert done is (idle or (running and not stuck))

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
        held = Counter({_known_as(k): len(v) for k, v in keys.items()})
        assert +self.index == held
        self.tiers_are_followed()

    def tiers_are_followed(self) -> None:
        """What a subscriber knows of the tiers is there, and it lacks only what it was told is cleared."""
        for tier in self.connector.tiers if self.connector else ():
            assert isinstance(tier, HostTier)
            there = {_known_as(key) for key in tier._pages}
            assert self.tiers[tier.medium] <= there
            assert there - self.tiers[tier.medium] <= self.unheard

    def teardown(self) -> None:
        """Let all requests end: none is lost, no block is kept."""
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if not self.engine.has_work:
                break
            if self.connector is not None:
                self.connector.clings = 0
                self.connector.threads.run(3)
            self.ended += [request.request_id for request in self.engine.step().finished]
            self.books_balance()
        assert not self.engine.has_work, "the engine is stuck"
        assert sorted(self.ended) == sorted(f"r{i + 1}" for i in range(self.count))
        pool = self.engine.scheduler.cache.pool
        assert pool.num_free_blocks == pool.num_blocks - 1


class ConnectedBooks(Books):
    """The same with a connector that is slow, loses pages and holds on."""

    def make_connector(self) -> ChaosConnector | None:
        """Return a connector whose tiers hold a few pages."""
        return ChaosConnector(
            host_bytes=self.options[0],
            disk_bytes=self.options[1],
            load_async=self.options[2],
            policy=self.policy,
        )

    @initialize(
        asynchronous=st.booleans(),
        drafts=st.sampled_from([0, 2]),
        priority=st.booleans(),
        size=st.integers(24, 40),
        host=st.sampled_from([0, 200, 400]),
        disk=st.sampled_from([0, 500, 100_000]),
        load_async=st.sampled_from([None, True, False]),
        policy=st.sampled_from(["recompute", "recompute", "fail"]),
    )
    def start(  # type: ignore[override]
        self,
        asynchronous: bool,
        drafts: int,
        priority: bool,
        size: int,
        host: int,
        disk: int,
        load_async: bool | None,
        policy: str,
    ) -> None:
        """Start an engine with few blocks and tiers of a few pages."""
        self.options, self.policy = (host, disk, load_async), policy
        Books.start(self, asynchronous=asynchronous, drafts=drafts, priority=priority, size=size)

    @rule(shared=st.sampled_from([8, 16, 24]), count=st.integers(1, 3), output=st.integers(1, 6))
    def admit_same(self, shared: int, count: int, output: int) -> None:
        """Send requests whose prefix was probably sent before."""
        for _ in range(count):
            self.admit(shared=shared, own=self.count % 2 + 1, output=output, salt=None)

    @rule(batches=st.integers(1, 3))
    def forget(self, batches: int) -> None:
        """Let the pool forget what the tiers keep."""
        for _ in range(batches * 8):
            assert self.connector is not None
            if not self.engine.has_work:
                break
            self.connector.threads.run(2)
            self.step(times=1)
        self.reset(running=True, external=False)

    @rule(count=st.integers(1, 3), spared=st.integers(0, 3), steps=st.integers(1, 3))
    def lose_while_others_hit(self, count: int, spared: int, steps: int) -> None:
        """Let pages not come that several requests wait for."""
        self.fill_and_forget()
        self.lose(count=count, spared=spared)
        self.admit_same(shared=24, count=3, output=3)
        for _ in range(steps):
            assert self.connector is not None
            self.connector.threads.run(4)
            self.step(times=1)

    def fill_and_forget(self) -> None:
        """Have a prefix in the tiers that the pool does not have."""
        self.admit_same(shared=24, count=2, output=2)
        self.forget(batches=2)

    @rule(external=st.booleans(), abort=st.booleans())
    def stop_while_loading(self, external: bool, abort: bool) -> None:
        """Cut off whatever is loading, by a reset or one by one."""
        self.fill_and_forget()
        self.admit_same(shared=24, count=2, output=2)
        for _ in range(2):
            self.step(times=1)
            assert self.connector is not None
            if not len(self.engine.scheduler.remote.queue):
                self.connector.threads.run(1)
        if abort:
            loading = [request.request_id for request in self.engine.scheduler.remote.queue]
            self.ended += [request.request_id for request in self.engine.abort(loading)]
        else:
            self.reset(running=True, external=external)

    @rule(count=st.integers(1, 4))
    def threads_run(self, count: int) -> None:
        """Answer lookups and fetch pages."""
        assert self.connector is not None
        self.connector.threads.run(count)

    @rule(count=st.integers(1, 3), spared=st.integers(0, 3))
    def lose(self, count: int, spared: int) -> None:
        """Let some pages come and the next ones not."""
        assert self.connector is not None
        self.connector.flaky.fails, self.connector.flaky.spared = count, spared

    @rule(stubborn=st.booleans(), clings=st.integers(0, 3))
    def hold_on(self, stubborn: bool, clings: int) -> None:
        """Change what the connector lets go of."""
        assert self.connector is not None
        self.connector.stubborn, self.connector.clings = stubborn, clings


def _known_as(key: bytes) -> tuple[int, int]:
    return get_group_id(key), low64(get_block_hash(key))


@pytest.mark.parametrize("shape", SHAPES)
def test_books_balance_with_a_connector(shape: str) -> None:
    """Loads, late, failed, given up or not, leak nothing, lose nobody, mix up no KV, and events follow every tier."""
    run_state_machine_as_test(
        type(f"ConnectedBooks_{shape}", (ConnectedBooks,), {"shape": shape}),
        settings=settings(
            max_examples=20, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_books_balance(shape: str) -> None:
    """No sequence of admissions, steps, aborts and resets leaks a block, loses a request or falsifies the index."""
    run_state_machine_as_test(
        type(f"Books_{shape}", (Books,), {"shape": shape}),
        settings=settings(
            max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
