"""Engines for the tests of connectors: a runner that checks every page that it reads, and helpers to run requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from engine_ref.connectors import KVConnector
from engine_ref.coordinator import CacheConfig
from engine_ref.core import EngineCore
from engine_ref.events import KVEvent
from engine_ref.request import Request
from engine_ref.runner import NullRunner
from engine_ref.scheduler import SchedulerConfig
from engine_ref.spec import FullAttentionSpec, GroupSpec
from kvhash import BlockHasher

#: Blocks of 16 tokens.
HASHER = BlockHasher(block_size=16, algorithm="sha256_cbor", hash_seed="0")
FULL = (FullAttentionSpec(block_size=16),)


def engine(
    connector: KVConnector | None = None,
    *,
    num_blocks: int = 80,
    groups: tuple[GroupSpec, ...] = FULL,
    asynchronous: bool = False,
    batch: int = 8192,
    vocab_size: int = 32000,
    publish: Callable[[Sequence[KVEvent]], None] = lambda events: None,
) -> EngineCore:
    """Return an engine with blocks of 16."""
    cache = CacheConfig(
        groups=groups, num_blocks=num_blocks, hash_block_size=16, scheduler_block_size=16, max_model_len=8192
    )
    config = SchedulerConfig(cache=cache, async_scheduling=asynchronous, max_num_batched_tokens=batch)
    runner = NullRunner(vocab_size=vocab_size, cache=cache)
    return EngineCore(config, runner, connector=connector, publish=publish)


def finish(core: EngineCore, *, seconds: float = 20.0) -> None:
    """Run an engine until it has no work."""
    deadline = time.monotonic() + seconds
    while core.has_work:
        core.step()
        assert time.monotonic() < deadline, "the engine is stuck"


def send(core: EngineCore, request_id: str, prompt: Sequence[int], **options: Any) -> Request:
    """Send one request and run the engine until all have ended."""
    options.setdefault("max_tokens", 4)
    request = Request(request_id, prompt, hasher=HASHER, **options)
    core.add_request(request)
    finish(core)
    return request


def alone(prompt: Sequence[int], **options: Any) -> list[int]:
    """Return the tokens that a prompt gives in an engine without a connector."""
    return send(engine(num_blocks=600), "alone", prompt, **options).output_token_ids


def until(true: Callable[[], bool], *, seconds: float = 10.0) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.002)
