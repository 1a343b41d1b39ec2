"""An engine to try the router with, where there is no GPU: the reference engine with a clock.

It answers as vLLM does (token-id prompts, streaming, KV events, replay) and takes as long as it is told: a step takes
`--step-ms` and the time of its tokens at `--tokens-per-second`. `POST /debug/longest_prefix` says what its own map
holds of a list of hashes, so that a router that sees the engines' maps can be compared with.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

import uvicorn
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine_ref.coordinator import CacheConfig
from engine_ref.core import EngineCore
from engine_ref.event_config import KVEventsConfig
from engine_ref.loop import EngineLoop
from engine_ref.metrics import EngineMetrics
from engine_ref.publisher import ZmqEventPublisher
from engine_ref.request import Request
from engine_ref.runner import NullRunner
from engine_ref.scheduler import SchedulerConfig, StepPlan
from engine_ref.server import make_app
from engine_ref.spec import FullAttentionSpec
from kvhash import BlockHasher
from kvhash.block_hash import BlockHash


class TimedRunner(NullRunner):
    """Makes tokens as `NullRunner` does, and takes its time."""

    def __init__(self, *, step_s: float, tokens_per_second: float) -> None:
        super().__init__()
        self._step_s = step_s
        self._tokens_per_second = tokens_per_second
        #: Tokens computed, of prompts and output.
        self.computed = 0

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> dict[str, list[int]]:
        """Run the plan, then wait for what is left of its time."""
        until = time.monotonic() + self._step_s + plan.total_tokens / self._tokens_per_second
        self.computed += plan.total_tokens
        tokens = super().execute(plan, requests)
        time.sleep(max(0.0, until - time.monotonic()))
        return tokens


def main() -> None:
    """Serve until ended; the first line of stdout says where: HTTP port, events, replay."""
    parser = argparse.ArgumentParser(description="The reference engine with a clock.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--events", default="tcp://127.0.0.1:*")
    parser.add_argument("--replay", default="tcp://127.0.0.1:*")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-blocks", type=int, default=4096)
    parser.add_argument("--hash-algo", default="sha256_cbor")
    parser.add_argument("--hash-seed", default="0")
    parser.add_argument("--tokens-per-second", type=float, default=20_000.0)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--max-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    options = parser.parse_args()

    hasher = BlockHasher(
        algorithm=options.hash_algo, block_size=options.block_size, hash_seed=options.hash_seed
    )
    events = KVEventsConfig(
        enable_kv_cache_events=True, endpoint=options.events, replay_endpoint=options.replay
    )
    publisher = ZmqEventPublisher(events)
    cache = CacheConfig(
        groups=(FullAttentionSpec(block_size=options.block_size),),
        num_blocks=options.num_blocks,
        hash_block_size=options.block_size,
        scheduler_block_size=options.block_size,
        max_model_len=32_768,
        enable_events=True,
    )
    config = SchedulerConfig(
        cache=cache,
        max_num_batched_tokens=options.max_batched_tokens,
        max_num_seqs=options.max_num_seqs,
    )
    runner = TimedRunner(step_s=options.step_ms / 1000, tokens_per_second=options.tokens_per_second)
    metrics = EngineMetrics(options.model)
    core = EngineCore(config, runner, publish=publisher.publish)
    loop = EngineLoop(core, metrics)
    loop.start()
    app = make_app(
        loop,
        metrics,
        hasher=hasher,
        model_name=options.model,
        max_model_len=32_768,
        vocab_size=runner.vocab_size,
        dev_mode=True,
    )

    async def longest_prefix(http: HttpRequest) -> Response:
        pool = core.scheduler.cache.pool
        count = 0
        for text in (await http.json())["hashes"]:
            if pool.get_cached_blocks(BlockHash(bytes.fromhex(text)), [0]) is None:
                break
            count += 1
        stats: dict[str, Any] = {"blocks": count, "computed_tokens": runner.computed}
        return JSONResponse(stats)

    app.router.routes.append(Route("/debug/longest_prefix", longest_prefix, methods=["POST"]))
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", options.port))
    listener.listen(1024)
    port = listener.getsockname()[1]
    sys.stdout.write(f"http://127.0.0.1:{port} {publisher.endpoint} {publisher.replay_endpoint}\n")
    sys.stdout.flush()
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    try:
        server.run(sockets=[listener])
    finally:
        loop.close()
        publisher.close()


if __name__ == "__main__":
    main()
