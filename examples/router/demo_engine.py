"""An engine to try the router with where there is no GPU: the reference engine's core, with a clock, behind HTTP.

It answers as vLLM does (completions of token-id prompts, streamed or not, KV events, replay) and takes as long as it
is told: a step takes ``--step-ms`` and the time of its tokens at ``--tokens-per-second``. Its own map can be asked,
at ``/debug/longest_prefix``, so that a router that sees the engines' maps can be compared with.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import queue
import socket
import sys
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engine_ref.coordinator import CacheConfig
from engine_ref.core import EngineCore
from engine_ref.request import Request
from engine_ref.runner import NullRunner
from engine_ref.scheduler import SchedulerConfig, StepPlan
from engine_ref.spec import FullAttentionSpec
from kvhash import BlockHasher, KvHashError
from kvhash.block_hash import BlockHash
from kvhash.events.publisher import Publisher
from kvhash.events.schema import EventBatch

#: Tokens and whether they are the last.
_Listener = Callable[[Sequence[int], bool], object]
_MAX_MODEL_LEN = 32_768


class TimedRunner(NullRunner):
    """Makes tokens as `NullRunner` does, and takes its time."""

    def __init__(self, *, step_s: float, tokens_per_second: float) -> None:
        super().__init__()
        self._step_s = step_s
        self._tokens_per_second = tokens_per_second

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> dict[str, list[int]]:
        """Run the plan, then wait for what is left of its time."""
        until = time.monotonic() + self._step_s + plan.total_tokens / self._tokens_per_second
        tokens = super().execute(plan, requests)
        time.sleep(max(0.0, until - time.monotonic()))
        return tokens


class EngineThread:
    """Steps a core while it has work; what is asked of it is done between steps."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.aborted = 0
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[str, _Listener] = {}
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, request: Request, listener: _Listener) -> None:
        """Queue a request; `listener` is called from the engine's thread."""

        def add() -> None:
            self._listeners[request.request_id] = listener
            self.core.add_request(request)

        self._asked.put(add)

    def abort(self, request_id: str) -> None:
        """End a request whose client is gone."""

        def end() -> None:
            if self._listeners.pop(request_id, None) is not None:
                self.aborted += 1
                self.core.abort([request_id])

        self._asked.put(end)

    def _run(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._asked.get(block=not self.core.has_work)()
            result = self.core.step()
            ended = {request.request_id for request in result.finished}
            for request_id in {*result.tokens, *ended}:
                listener, made = self._listeners.get(request_id), result.tokens.get(request_id, ())
                if listener is not None and (made or request_id in ended):
                    listener(made, request_id in ended)
            for request_id in ended:
                self._listeners.pop(request_id, None)


class Api:
    """The HTTP side."""

    def __init__(self, engine: EngineThread, hasher: BlockHasher, model: str) -> None:
        self._engine = engine
        self._hasher = hasher
        self._model = model
        self._counts = {"requests": 0, "prompt_tokens": 0, "computed_prompt_tokens": 0}
        self._running: set[str] = set()

    def app(self) -> Starlette:
        """Return the ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/health", self.health),
                Route("/debug/counts", self.counts),
                Route("/debug/longest_prefix", self.longest_prefix, methods=["POST"]),
            ]
        )

    async def health(self, _: HttpRequest) -> Response:
        """Always well."""
        return Response()

    async def counts(self, _: HttpRequest) -> Response:
        """What was asked for, and what of it had to be computed."""
        return JSONResponse({**self._counts, "aborted": self._engine.aborted, "running": len(self._running)})

    async def longest_prefix(self, http: HttpRequest) -> Response:
        """How many of a chain's blocks are in this engine's own map now."""
        pool = self._engine.core.scheduler.cache.pool
        blocks = 0
        for text in (await http.json())["hashes"]:
            if pool.get_cached_blocks(BlockHash(bytes.fromhex(text)), [0]) is None:
                break
            blocks += 1
        return JSONResponse({"blocks": blocks})

    async def completions(self, http: HttpRequest) -> Response:
        """Complete a prompt of token ids."""
        try:
            body = await http.json()
            request = await asyncio.to_thread(self._request, body)
        except (ValueError, KeyError, TypeError, KvHashError) as error:
            message = {"message": str(error), "type": "BadRequestError", "param": None, "code": 400}
            return JSONResponse({"error": message}, status_code=400)
        if body.get("stream"):
            return StreamingResponse(self._stream(request), media_type="text/event-stream")
        made: list[int] = []
        answer = asyncio.ensure_future(self._collect(request, made))
        gone = asyncio.ensure_future(_until_gone(http))
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        for task in (answer, gone):
            task.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)
        chunk = self._chunk(request, made)
        return JSONResponse({**chunk, "usage": self._usage(request, len(made))})

    def _request(self, body: dict[str, Any]) -> Request:
        prompt = body["prompt"]
        if not isinstance(prompt, list) or not prompt or not all(type(one) is int for one in prompt):
            raise ValueError("expected the prompt as a list of token ids; no tokenizer is loaded")
        if not all(0 <= one < 32_000 for one in prompt):
            raise ValueError("a token id is outside of the vocabulary of 32000")
        output = int(body.get("max_tokens", 16))
        if len(prompt) + output > _MAX_MODEL_LEN:
            raise ValueError(f"more than the maximum of {_MAX_MODEL_LEN} tokens")
        request_id = f"cmpl-{uuid.uuid4().hex}"
        return Request(
            request_id, prompt, hasher=self._hasher, max_tokens=output, cache_salt=body.get("cache_salt")
        )

    async def _tokens(self, request: Request) -> AsyncGenerator[Sequence[int], None]:
        """Yield tokens as they come; leaving early ends the request."""
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[tuple[Sequence[int], bool]] = asyncio.Queue()
        self._engine.submit(
            request, lambda made, last: loop.call_soon_threadsafe(outputs.put_nowait, (made, last))
        )
        self._running.add(request.request_id)
        last = False
        try:
            while not last:
                made, last = await outputs.get()
                yield made
        finally:
            self._running.discard(request.request_id)
            if not last:
                self._engine.abort(request.request_id)

    async def _collect(self, request: Request, made: list[int]) -> None:
        async with contextlib.aclosing(self._tokens(request)) as tokens:
            async for some in tokens:
                made += some

    async def _stream(self, request: Request) -> AsyncIterator[bytes]:
        count = 0
        async with contextlib.aclosing(self._tokens(request)) as tokens:
            async for some in tokens:
                count += len(some)
                yield _line(self._chunk(request, some))
        yield _line({"choices": [], "usage": self._usage(request, count)})
        yield b"data: [DONE]\n\n"

    def _chunk(self, request: Request, tokens: Sequence[int]) -> dict[str, Any]:
        text = "".join(f" {token}" for token in tokens)
        choice = {"index": 0, "text": text, "token_ids": list(tokens), "finish_reason": None}
        return {
            "id": request.request_id,
            "object": "text_completion",
            "model": self._model,
            "choices": [choice],
        }

    def _usage(self, request: Request, generated: int) -> dict[str, Any]:
        prompt, cached = request.num_prompt_tokens, request.num_cached_tokens
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += prompt
        self._counts["computed_prompt_tokens"] += prompt - cached
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _line(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def _until_gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def main() -> None:
    """Serve until ended; the first line of stdout says where: HTTP address, events, replay."""
    parser = argparse.ArgumentParser(description="The reference engine with a clock.")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--events", default="tcp://127.0.0.1:*")
    parser.add_argument("--replay", default="tcp://127.0.0.1:*")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-blocks", type=int, default=4096)
    parser.add_argument("--hash-algo", default="sha256_cbor")
    parser.add_argument("--hash-seed", default="0")
    parser.add_argument("--tokens-per-second", type=float, default=20_000.0)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    options = parser.parse_args()

    size = options.block_size
    hasher = BlockHasher(algorithm=options.hash_algo, block_size=size, hash_seed=options.hash_seed)
    publisher = Publisher(options.events, options.replay, bind=True)
    cache = CacheConfig(
        groups=(FullAttentionSpec(block_size=size),),
        num_blocks=options.num_blocks,
        hash_block_size=size,
        scheduler_block_size=size,
        max_model_len=_MAX_MODEL_LEN,
    )
    core = EngineCore(
        SchedulerConfig(cache=cache, max_num_seqs=256, max_num_batched_tokens=options.max_num_batched_tokens),
        TimedRunner(step_s=options.step_ms / 1000, tokens_per_second=options.tokens_per_second),
        publish=lambda events: _publish(publisher, events),
    )
    # With its protocol named, asyncio turns Nagle's algorithm off on what is accepted.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", options.port))
    listener.listen(1024)
    sys.stdout.write(
        f"http://127.0.0.1:{listener.getsockname()[1]} {publisher.endpoint} {publisher.replay_endpoint}\n"
    )
    sys.stdout.flush()
    app = Api(EngineThread(core), hasher, options.model).app()
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    try:
        server.run(sockets=[listener])
    finally:
        publisher.close()


def _publish(publisher: Publisher, events: Sequence[Any]) -> None:
    publisher.publish(EventBatch(ts=time.time(), events=tuple(events), data_parallel_rank=0))


if __name__ == "__main__":
    main()
