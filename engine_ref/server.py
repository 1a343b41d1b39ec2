"""The HTTP front: OpenAI completions over token-id prompts, health, metrics, and vLLM's cache reset.

Prompts are hashed here, on a worker thread, before the engine's thread sees them. Without a tokenizer a prompt is a
list of token ids and the text of a completion is its token ids, separated by spaces.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvhash import BlockHasher, KvHashError

from .loop import EngineLoop, Output
from .metrics import EngineMetrics
from .request import Request

__all__ = ["BadRequestError", "make_app"]


class BadRequestError(Exception):
    """The client asked for something that cannot be done; answered with 400 and the message."""


def make_app(
    loop: EngineLoop,
    metrics: EngineMetrics,
    *,
    hasher: BlockHasher,
    model_name: str,
    max_model_len: int,
    vocab_size: int,
    dev_mode: bool = False,
) -> Starlette:
    """Return the ASGI application of one running engine loop."""
    server = _Server(loop, metrics, hasher, model_name, max_model_len, vocab_size)
    routes = [
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/models", server.models),
        Route("/health", server.health),
        Route("/metrics", server.metrics_text),
    ]
    if dev_mode:
        routes.append(Route("/reset_prefix_cache", server.reset, methods=["POST"]))
    return Starlette(
        routes=routes, exception_handlers={BadRequestError: _bad_request, KvHashError: _bad_request}
    )


async def _bad_request(_: HttpRequest, error: Exception) -> Response:
    body = {"message": str(error), "type": "BadRequestError", "param": None, "code": 400}
    return JSONResponse({"error": body}, status_code=400)


class _Server:
    def __init__(
        self,
        loop: EngineLoop,
        metrics: EngineMetrics,
        hasher: BlockHasher,
        model_name: str,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self._loop = loop
        self._metrics = metrics
        self._hasher = hasher
        self._model_name = model_name
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size

    async def health(self, _: HttpRequest) -> Response:
        return Response(status_code=200 if self._loop.alive else 503)

    async def metrics_text(self, _: HttpRequest) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")

    async def models(self, _: HttpRequest) -> Response:
        card = {"id": self._model_name, "object": "model", "max_model_len": self._max_model_len}
        return JSONResponse({"object": "list", "data": [card]})

    async def reset(self, http: HttpRequest) -> Response:
        running = http.query_params.get("reset_running_requests", "false").lower() in ("1", "true")
        future = self._loop.reset_prefix_cache(reset_running_requests=running)
        return JSONResponse({"success": await asyncio.wrap_future(future)})

    async def completions(self, http: HttpRequest) -> Response:
        body = _parse(await http.body())
        if body.get("model", self._model_name) != self._model_name:
            raise BadRequestError(f"the model {body['model']!r} does not exist")
        request = await asyncio.to_thread(self._make_request, body)
        outputs = self._run(request)
        if body.get("stream", False):
            return StreamingResponse(self._stream(request, outputs), media_type="text/event-stream")
        token_ids: list[int] = []
        reason = "stop"
        watcher = asyncio.ensure_future(_until_gone(http))
        try:
            async for output in outputs:
                token_ids += output.token_ids
                reason = output.status.value
                if watcher.done():
                    break
        finally:
            watcher.cancel()
            await outputs.aclose()  # type: ignore[attr-defined]
        answer = self._chunk(request, token_ids, reason)
        answer["usage"] = self._usage(request, len(token_ids))
        return JSONResponse(answer)

    def _make_request(self, body: dict[str, Any]) -> Request:
        prompt, max_tokens = body.get("prompt"), body.get("max_tokens", 16)
        if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
            raise BadRequestError("expected the prompt as a list of token ids; no tokenizer is loaded")
        if not all(0 <= token < self._vocab_size for token in prompt):
            raise BadRequestError(f"a token id is out of the vocabulary of {self._vocab_size}")
        if type(max_tokens) is not int or max_tokens < 1:
            raise BadRequestError("expected max_tokens as an integer of at least 1")
        if len(prompt) + max_tokens > self._max_model_len:
            raise BadRequestError(
                f"{len(prompt)} prompt tokens and {max_tokens} output tokens are more than the maximum of "
                f"{self._max_model_len}"
            )
        return Request(
            f"cmpl-{uuid.uuid4().hex}",
            prompt,
            hasher=self._hasher,
            max_tokens=max_tokens,
            cache_salt=body.get("cache_salt"),
            priority=body["priority"] if type(body.get("priority")) is int else 0,
            arrival_time=time.monotonic(),
            skip_reading_prefix_cache=body.get("prompt_logprobs") is not None,
        )

    async def _run(self, request: Request) -> AsyncIterator[Output]:
        """Yield what the engine gives; leaving early aborts the request."""
        outputs: asyncio.Queue[Output] = asyncio.Queue()
        here = asyncio.get_running_loop()

        def listen(output: Output) -> None:
            here.call_soon_threadsafe(outputs.put_nowait, output)

        self._loop.submit(request, listen)
        finished = False
        try:
            while not finished:
                output = await outputs.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._loop.abort(request.request_id)

    async def _stream(self, request: Request, outputs: AsyncIterator[Output]) -> AsyncIterator[str]:
        count = 0
        try:
            async for output in outputs:
                count += len(output.token_ids)
                reason = output.status.value if output.finished else None
                yield f"data: {json.dumps(self._chunk(request, list(output.token_ids), reason))}\n\n"
            yield f"data: {json.dumps({'choices': [], 'usage': self._usage(request, count)})}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]

    def _chunk(self, request: Request, token_ids: list[int], reason: str | None) -> dict[str, Any]:
        choice = {
            "index": 0,
            "text": " ".join(map(str, token_ids)),
            "token_ids": token_ids,
            "finish_reason": reason,
        }
        return {
            "id": request.request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._model_name,
            "choices": [choice],
        }

    def _usage(self, request: Request, generated: int) -> dict[str, Any]:
        prompt = request.num_prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": request.num_cached_tokens},
        }


def _parse(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequestError("expected a JSON object")
    return body


async def _until_gone(http: HttpRequest) -> None:
    while not await http.is_disconnected():
        await asyncio.sleep(0.05)
