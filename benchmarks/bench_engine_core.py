"""What a step costs in the engine's core, and what hashing a long prompt does to the steps beside it.

Run it with `make bench`, or `python benchmarks/bench_engine_core.py`. A decode step over 256 running requests is timed
from planning to the encoded event batch, without the runner; beside it vLLM's own KV cache manager, where the vllm
package can be imported, for the same calls. Then the same steps run in the engine's thread while prompts of 100,000
tokens are hashed on its input thread.
"""

from __future__ import annotations

import gc
import inspect
import os
import platform
import queue
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import kvhash
from engine_ref.coordinator import CacheConfig
from engine_ref.core import EngineCore
from engine_ref.engine import Engine
from engine_ref.report import EngineRequest, StepReport
from engine_ref.request import Request
from engine_ref.runner import ModelRunner
from engine_ref.scheduler import SchedulerConfig, StepPlan
from engine_ref.spec import FullAttentionSpec
from kvhash.events.encode import encode_batch
from kvhash.events.schema import EventBatch

BLOCK = 16
RUNNING = 256
PROMPT = 512
STEPS = 400
LONG = 100_000
PROMPTS = 20
HASHER = kvhash.BlockHasher(block_size=BLOCK, algorithm="sha256_cbor", hash_seed="0")


class OneTokenRunner:
    """Gives every request the same token and counts its own time apart."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> dict[str, list[int]]:
        """Return one token for each request that samples."""
        began = time.perf_counter()
        sampled = {i: [7] for i, samples in plan.samples.items() if samples and i in requests}
        self.seconds += time.perf_counter() - began
        return sampled


def make_core(runner: ModelRunner, *, max_num_batched_tokens: int = 8192, publish: Any = None) -> EngineCore:
    """Return an engine with room for everything."""
    cache = CacheConfig(
        groups=(FullAttentionSpec(block_size=BLOCK),),
        num_blocks=60_000,
        hash_block_size=BLOCK,
        scheduler_block_size=BLOCK,
        max_model_len=LONG + 1000,
    )
    config = SchedulerConfig(cache=cache, max_num_seqs=512, max_num_batched_tokens=max_num_batched_tokens)
    return EngineCore(config, runner, publish=publish or _encode)


def _encode(events: Sequence[Any]) -> None:
    encode_batch(EventBatch(ts=time.time(), events=tuple(events), data_parallel_rank=0), drop_fields=True)


def prompt(number: int, length: int = PROMPT) -> list[int]:
    """Return a prompt of its own."""
    draw = random.Random(number)
    return [draw.randrange(32_000) for _ in range(length)]


def time_steps() -> list[float]:
    """Return the milliseconds of decode steps over 256 running requests."""
    runner = OneTokenRunner()
    core = make_core(runner)
    for number in range(RUNNING):
        # Lengths differ, so that blocks fill in every step and not all in one.
        tokens = prompt(number, PROMPT + number % BLOCK)
        core.add_request(Request(str(number), tokens, hasher=HASHER, max_tokens=10 * STEPS))
    while any(r.num_output_tokens < 2 for r in core.scheduler.requests.values()):
        core.step()
    assert len(core.scheduler.running) == RUNNING
    gc.collect()
    gc.freeze()
    times = []
    for _ in range(STEPS):
        runner.seconds, began = 0.0, time.perf_counter()
        core.step()
        times.append((time.perf_counter() - began - runner.seconds) * 1000)
    return times


def time_vllm() -> list[float] | None:
    """Return the milliseconds of vLLM's KV cache manager for the allocations of such steps; None without vllm."""
    try:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec as VllmSpec
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request as VllmRequest
    except ImportError:
        return None
    init_none_hash(sha256_cbor)
    spec = VllmSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=60_000, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    settings: dict[str, Any] = {
        "max_model_len": LONG + 1000,
        "scheduler_block_size": BLOCK,
        "hash_block_size": BLOCK,
        "enable_caching": True,
        "enable_kv_cache_events": True,
    }
    known = inspect.signature(KVCacheManager).parameters
    manager = KVCacheManager(config, **{name: value for name, value in settings.items() if name in known})
    hasher = get_request_block_hasher(BLOCK, sha256_cbor)
    requests = []
    for number in range(RUNNING):
        request = VllmRequest(
            request_id=str(number),
            prompt_token_ids=prompt(number, PROMPT + number % BLOCK),
            sampling_params=SamplingParams(max_tokens=10 * STEPS),
            pooling_params=None,
            block_hasher=hasher,
        )
        manager.allocate_slots(request, request.num_tokens)
        request.num_computed_tokens = request.num_tokens
        requests.append(request)
    times = []
    gc.collect()
    gc.freeze()
    for _ in range(STEPS):
        began = time.perf_counter()
        manager.new_step_starts()
        for request in requests:
            request.append_output_token_ids(7)
            manager.allocate_slots(request, 1)
            request.num_computed_tokens += 1
        manager.take_events()
        times.append((time.perf_counter() - began) * 1000)
    return times


def time_beside_hashing(prompts: int, *, hashed: bool = True) -> tuple[list[list[float]], float]:
    """Return the milliseconds between the ends of ten steps after each of `prompts` long prompts, and one's hashing.

    Not `hashed`: the same steps, with no such prompt.
    """
    ends: list[float] = []
    reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()

    def deliver(report: StepReport) -> None:
        if len(report.outputs) == RUNNING:
            ends.append(time.perf_counter())
        reports.put(report)

    def refuse_long(request: Request) -> None:
        # It is hashed by now and goes no further: what is measured is the hashing, not the prompt's own steps.
        if request.num_prompt_tokens == LONG:
            raise kvhash.UsageError("hashed, which is all that was wanted", code="not-wanted")

    engine = Engine(make_core(OneTokenRunner()), HASHER, deliver, validate=refuse_long)
    engine.start()
    for number in range(RUNNING):
        tokens = prompt(number)
        engine.add(EngineRequest(request_id=str(number), prompt_token_ids=tokens, max_tokens=LONG // 2))
    long_prompts = [prompt(10_000 + number, LONG) for number in range(prompts)]
    gc.collect()
    gc.freeze()  # as the server does: what lives as long as the engine need not be looked at again
    alone: list[float] = []
    for tokens in long_prompts:
        began = time.perf_counter()
        HASHER.chain(tokens)
        alone.append(time.perf_counter() - began)
    settled = len(ends) + 50
    while len(ends) < settled:
        reports.get(timeout=60)
    marks = []
    for number, tokens in enumerate(long_prompts):
        marks.append(len(ends))
        if hashed:
            engine.add(EngineRequest(request_id=f"long-{number}", prompt_token_ids=tokens, max_tokens=1))
        while len(ends) < marks[-1] + 10:
            reports.get(timeout=60)
    engine.close()
    gaps = [[(b - a) * 1000 for a, b in pairwise(ends[mark - 1 : mark + 10])] for mark in marks]
    return gaps, min(alone) * 1000


def describe(times: Sequence[float]) -> str:
    """Return median, 99th percentile and maximum."""
    ordered = sorted(times)
    high = ordered[int(len(ordered) * 0.99)]
    return f"median {statistics.median(ordered):6.2f} ms  p99 {high:6.2f} ms  max {ordered[-1]:6.2f} ms"


def main() -> int:
    """Print the three measurements."""
    print(
        f"python {platform.python_version()}, {os.cpu_count()} processors, kvhash backend: {kvhash.backend()}"
    )
    print(f"a decode step over {RUNNING} running requests (blocks of {BLOCK}, {STEPS} steps):")
    print(f"  engine_ref: scheduler, cache, hashes, events  {describe(time_steps())}")
    theirs = time_vllm()
    if theirs is None:
        print("  vLLM's KVCacheManager: the vllm package is not installed here")
    else:
        print(f"  vLLM: KVCacheManager and hashes alone         {describe(theirs)}")
    alone, _ = time_beside_hashing(PROMPTS, hashed=False)
    beside, hashing = time_beside_hashing(PROMPTS)
    print("steps of the engine's thread, the runner and the report included; the longest of ten each time:")
    print(f"  alone                                         {describe(list(map(max, alone)))}")
    print(f"  while a prompt of {LONG:,} tokens is hashed    {describe(list(map(max, beside)))}")
    usual = statistics.median(gap for gaps in alone for gap in gaps)
    late = [max(gaps) - usual for gaps in beside]
    print(
        f"  the step that waits longest takes {statistics.median(late):.1f} ms more than the usual {usual:.1f} ms"
        f" (of {PROMPTS} prompts the median; at most {max(late):.1f}); hashing one alone takes {hashing:.1f} ms"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
