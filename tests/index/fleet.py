"""Reference engines that publish over real sockets, with the truth of every moment kept for the tests."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from engine_ref.coordinator import CacheConfig
from engine_ref.core import EngineCore
from engine_ref.events import KVEvent
from engine_ref.request import Request
from engine_ref.runner import NullRunner
from engine_ref.scheduler import SchedulerConfig
from engine_ref.spec import FullAttentionSpec, GroupSpec, SlidingWindowSpec
from kvhash import BlockHasher
from kvhash.block_hash import get_block_hash, get_group_id, low64
from kvhash.events.encode import encode_batch
from kvhash.events.publisher import Publisher
from kvhash.events.schema import EventBatch

from ..ports import free_endpoints

SIZE = 4
HASHER = BlockHasher(vllm="0.33.0", algorithm="sha256_cbor", block_size=SIZE)
#: What an engine holds: (group, key) -> copies.
HashMap = dict[tuple[int, int], int]

FULL: tuple[GroupSpec, ...] = (FullAttentionSpec(block_size=SIZE),)
HYBRID: tuple[GroupSpec, ...] = (*FULL, SlidingWindowSpec(block_size=SIZE, sliding_window=10))


class LiveEngine:
    """One engine and its publisher. ``truth``: its hash map after each batch of each life, by the batch's time."""

    def __init__(
        self, groups: tuple[GroupSpec, ...] = FULL, *, num_blocks: int = 60, buffer_steps: int = 10_000
    ) -> None:
        self.groups, self.num_blocks, self.buffer_steps = groups, num_blocks, buffer_steps
        self.truth: dict[float | None, HashMap] = {None: {}}
        self.restarts = 0
        self.endpoints = free_endpoints()
        self._requests = 0
        self._start()

    def _start(self) -> None:
        deadline = time.monotonic() + 10
        while True:
            try:
                self.publisher = Publisher(*self.endpoints, buffer_steps=self.buffer_steps, bind=True)
                break
            except Exception:  # the ports of the former life are not free yet
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert self.publisher.replay_endpoint is not None
        self.endpoints = (self.publisher.endpoint, self.publisher.replay_endpoint)
        cache = CacheConfig(
            groups=self.groups,
            num_blocks=self.num_blocks,
            hash_block_size=SIZE,
            scheduler_block_size=SIZE,
            max_model_len=1024,
        )
        self.core = EngineCore(SchedulerConfig(cache=cache), NullRunner(), publish=self._publish)
        self.batches = 0
        self.began = time.time()

    def _publish(self, events: Sequence[KVEvent]) -> None:
        ts = time.time()
        while ts in self.truth:
            ts = time.time()
        self.truth[ts] = self.hash_map()
        self.batches += 1
        self.publisher.publish_payload(encode_batch(EventBatch(ts, tuple(events), 0), "0.33.0"))

    def hash_map(self) -> HashMap:
        """Return what the engine's cache holds now."""
        return {
            (get_group_id(key), low64(get_block_hash(key))): len(blocks)
            for key, blocks in self.core.scheduler.cache.pool.cached_keys.items()
        }

    def serve(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Queue a request."""
        self._requests += 1
        self.core.add_request(
            Request(str(self._requests), list(prompt), hasher=HASHER, max_tokens=max_tokens)
        )

    def work(self, steps: int) -> None:
        """Run up to so many steps."""
        for _ in range(steps):
            if self.core.has_work:
                self.core.step()

    def finish(self) -> None:
        """Run until no request is left."""
        for _ in range(10_000):
            if not self.core.has_work:
                return
            self.core.step()
        raise AssertionError("a request never ends; does it fit the pool?")

    def clear(self) -> None:
        """Forget the cache and publish it, as an operator's reset does at the next step."""
        self.finish()
        assert self.core.reset_prefix_cache()
        self.core.publish_events()

    def restart(self) -> None:
        """Begin a new life on the same ports, with an empty cache."""
        self.publisher.close(timeout=2)
        self.restarts += 1
        self._start()

    def close(self) -> None:
        """End the engine."""
        self.publisher.close(timeout=2)


class Chats:
    """Chat sessions that share a system prompt and grow turn by turn."""

    def __init__(self, rng: random.Random, sessions: int = 8, system: int = 24) -> None:
        self._rng = rng
        start = [rng.randrange(32000) for _ in range(system)]
        self._sessions = [list(start) for _ in range(sessions)]

    def turn(self) -> list[int]:
        """Return the next prompt of one of the sessions."""
        number = self._rng.randrange(len(self._sessions))
        session = self._sessions[number]
        if len(session) > 60:  # with its output it must fit an engine's pool, or it waits for ever
            session = self._sessions[number] = session[:24]
        session += [self._rng.randrange(32000) for _ in range(self._rng.randrange(3, 20))]
        return list(session)


def held(index: Any, engine: str) -> HashMap:
    """Return what an index says an engine holds."""
    return {
        (place.group, key): copies
        for (_, place), blocks in index.holdings(engine).items()
        for key, copies in blocks.items()
    }
