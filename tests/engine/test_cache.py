"""Promises of the cache and the scheduler that one small example shows."""

from __future__ import annotations

import pytest

from engine_ref.block import Block
from engine_ref.coordinator import CacheConfig
from engine_ref.core import EngineCore
from engine_ref.free_queue import FreeBlockQueue
from engine_ref.request import Request, RequestStatus
from engine_ref.runner import NullRunner
from engine_ref.scheduler import SchedulerConfig
from engine_ref.spec import FullAttentionSpec
from kvhash import BlockHasher
from kvhash.events.schema import AllBlocksCleared

HASHER = BlockHasher(block_size=16, algorithm="sha256_cbor")


def engine(num_blocks: int = 300, *, asynchronous: bool = False, batch: int = 8192) -> EngineCore:
    """Return an engine with blocks of 16."""
    cache = CacheConfig(
        groups=(FullAttentionSpec(block_size=16),),
        num_blocks=num_blocks,
        hash_block_size=16,
        scheduler_block_size=16,
        max_model_len=8192,
    )
    config = SchedulerConfig(cache=cache, async_scheduling=asynchronous, max_num_batched_tokens=batch)
    return EngineCore(config, NullRunner())


def send(core: EngineCore, request_id: str, prompt: list[int], **options: object) -> Request:
    """Send one request and run it to its end."""
    request = Request(request_id, prompt, hasher=HASHER, max_tokens=4, **options)  # type: ignore[arg-type]
    core.add_request(request)
    while core.has_work:
        core.step()
    return request


def test_whole_prompt_hit_leaves_the_last_block() -> None:
    """A prompt of 4,096 tokens sent again hits 4,080: the last token is computed, and with it its block."""
    core = engine()
    assert send(core, "a", list(range(4096))).num_cached_tokens == 0
    assert send(core, "b", list(range(4096))).num_cached_tokens == 4080
    stats = core.scheduler.cache.stats
    assert (stats.requests, stats.queries, stats.hits) == (2, 8192, 4080)


def test_request_that_skips_the_cache_hits_nothing_and_is_not_counted() -> None:
    """Prompt logprobs need every token computed, so such a request looks nothing up."""
    core = engine()
    send(core, "a", list(range(64)))
    assert send(core, "b", list(range(64)), skip_reading_prefix_cache=True).num_cached_tokens == 0
    assert core.scheduler.cache.stats.queries == 64


@pytest.mark.parametrize("asynchronous", [False, True])
def test_preemption_changes_no_token(asynchronous: bool) -> None:
    """Requests that are preempted for lack of blocks give the tokens that they give alone."""
    prompts = {f"r{i}": [i] * 40 for i in range(6)}
    alone = {i: send(engine(), i, prompt).output_token_ids for i, prompt in prompts.items()}
    core = engine(14, asynchronous=asynchronous)
    requests = {i: Request(i, prompt, hasher=HASHER, max_tokens=60) for i, prompt in prompts.items()}
    for request in requests.values():
        core.add_request(request)
    while core.has_work:
        core.step()
    assert sum(request.num_preemptions for request in requests.values()) > 0
    assert {i: request.output_token_ids[:4] for i, request in requests.items()} == alone
    assert {request.num_output_tokens for request in requests.values()} == {60}
    assert core.scheduler.cache.pool.num_free_blocks == 13


def test_reset_under_load_needs_the_running_requests() -> None:
    """A reset is refused while blocks are held; preempting the running requests makes it succeed, with one event."""
    core = engine()
    core.add_request(Request("a", list(range(64)), hasher=HASHER))
    core.step()
    core.scheduler.take_events()
    assert not core.reset_prefix_cache()
    assert core.scheduler.take_events() == []
    assert core.reset_prefix_cache(reset_running_requests=True)
    assert core.scheduler.take_events() == [AllBlocksCleared()]


def test_abort_frees_the_blocks_at_once() -> None:
    """A request cut off while its step is in flight holds nothing, and its late tokens are dropped."""
    core = engine(asynchronous=True)
    request = Request("a", list(range(64)), hasher=HASHER)
    core.add_request(request)
    core.step()
    assert core.abort(["a", "nobody"]) == [request]
    assert request.status is RequestStatus.FINISHED_ABORTED
    assert core.scheduler.cache.pool.num_free_blocks == 299
    while core.has_work:
        core.step()
    assert request.num_output_tokens == 0


def test_duplicate_request_id_is_refused() -> None:
    """Two live requests cannot share an id."""
    core = engine()
    core.add_request(Request("a", [1], hasher=HASHER))
    with pytest.raises(ValueError, match="'a'"):
        core.add_request(Request("a", [1], hasher=HASHER))


def test_free_queue_removes_from_the_middle() -> None:
    """Any block can leave the queue; those that do not wait in it cannot."""
    blocks = [Block(i) for i in range(5)]
    queue = FreeBlockQueue(blocks)
    queue.remove(blocks[2])
    queue.append([blocks[2]])
    queue.prepend(queue.pop(1))
    assert [block.block_id for block in queue] == [0, 1, 3, 4, 2]
    with pytest.raises(ValueError, match="not in the free queue"):
        queue.remove(Block(9))
    with pytest.raises(IndexError):
        queue.pop(6)
