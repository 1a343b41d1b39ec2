"""The ASGI application: routes, streaming, and what happens when a client hangs up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..report import EngineRequest
from .answers import Answer, Choice
from .errors import ApiError, bad_request, error_body, handlers
from .frontend import Frontend
from .prompts import Prompts
from .protocol import MAX_BODY, ChatBody, CompletionBody, DetokenizeBody, SamplingBody, TokenizeBody, decode

__all__ = ["make_app", "merge_streams"]

_encode = msgspec.json.Encoder().encode


def make_app(
    frontend: Frontend,
    prompts: Prompts,
    *,
    dev_mode: bool = False,
    log_interval_s: float | None = None,
    release: str = "latest",
) -> Starlette:
    """Return the application of engines that are not started yet; its lifespan starts and ends them.

    ``dev_mode``: with the cache reset, as VLLM_SERVER_DEV_MODE. ``log_interval_s``: seconds between log lines, None
    for none. ``release``: what ``/version`` answers.
    """
    api = _Api(frontend, prompts, release)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        frontend.start()
        logging_task = asyncio.create_task(_log_stats(frontend, log_interval_s))
        try:
            yield
        finally:
            logging_task.cancel()
            frontend.workers.close()
            await asyncio.to_thread(frontend.close)

    routes = [
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/health", api.health),
        Route("/ping", api.health, methods=["GET", "POST"]),
        Route("/version", api.version),
        Route("/metrics", api.metrics),
    ]
    if dev_mode:
        routes.append(Route("/reset_prefix_cache", api.reset, methods=["POST"]))
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


async def _log_stats(frontend: Frontend, interval_s: float | None) -> None:
    while interval_s is not None:
        await asyncio.sleep(interval_s)
        frontend.log_stats()


class _Api:
    def __init__(self, frontend: Frontend, prompts: Prompts, release: str) -> None:
        self._frontend = frontend
        self._prompts = prompts
        self._release = release

    # ---- what the engine is

    async def health(self, _: HttpRequest) -> Response:
        return Response(status_code=200 if self._frontend.alive else 503)

    async def version(self, _: HttpRequest) -> Response:
        return JSONResponse({"version": self._release})

    async def metrics(self, _: HttpRequest) -> Response:
        return Response(self._frontend.metrics.render(), media_type="text/plain; version=0.0.4")

    async def models(self, _: HttpRequest) -> Response:
        base = self._prompts.model_names[0]
        card = {"object": "model", "created": 0, "owned_by": "engine_ref"}
        cards = [
            {"id": name, **card, "root": self._prompts.options.model, "parent": None}
            | {"max_model_len": self._prompts.options.max_model_len}
            for name in self._prompts.model_names
        ]
        cards += [
            {"id": adapter.name, **card, "root": adapter.path, "parent": base}
            for adapter in self._prompts.adapters.values()
        ]
        return JSONResponse({"object": "list", "data": cards})

    async def reset(self, http: HttpRequest) -> Response:
        flags = {name: _flag(http, name) for name in ("reset_running_requests", "reset_external")}
        return JSONResponse({"success": await self._frontend.reset_prefix_cache(**flags)})

    # ---- tokens

    async def tokenize(self, http: HttpRequest) -> Response:
        body = decode(await _read(http), TokenizeBody)
        self._prompts.adapter(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("expected either 'prompt' or 'messages'")
        make = self._prompts.text_tokens if body.messages is None else self._prompts.chat_tokens
        tokens = await self._frontend.workers.run(make, body)
        tokenizer = self._prompts.tokenizer
        assert tokenizer is not None
        return JSONResponse(
            {
                "count": len(tokens),
                "max_model_len": self._prompts.options.max_model_len,
                "tokens": tokens,
                "token_strs": tokenizer.token_strings(tokens) if body.return_token_strs else None,
            }
        )

    async def detokenize(self, http: HttpRequest) -> Response:
        body = decode(await _read(http), DetokenizeBody)
        tokenizer = self._prompts.tokenizer
        self._prompts.adapter(body.model)
        if tokenizer is None:
            raise bad_request("the engine has no tokenizer; give it one with --tokenizer")
        self._prompts.check_vocabulary(body.tokens, "tokens")
        text = await self._frontend.workers.run(tokenizer.decode, body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text})

    # ---- generation

    async def completions(self, http: HttpRequest) -> Response:
        body = decode(await _read(http), CompletionBody)
        requests = await self._frontend.workers.run(self._prompts.completion, body)
        return await self._generate(http, body, requests, "text", echo=bool(body.echo))

    async def chat(self, http: HttpRequest) -> Response:
        body = decode(await _read(http), ChatBody)
        request = await self._frontend.workers.run(self._prompts.chat, body)
        return await self._generate(http, body, [request], "chat", echo=False)

    async def _generate(
        self,
        http: HttpRequest,
        body: SamplingBody,
        requests: Sequence[EngineRequest],
        kind: Any,
        *,
        echo: bool,
    ) -> Response:
        n = body.n or 1
        rank = _rank(http)
        stream = bool(body.stream)
        choices: list[Choice] = []
        try:
            for request in requests:
                for one in _copies(request, n):
                    choices.append(self._choice(len(choices), body, one, rank, echo=echo))
        except BaseException:
            self._leave(choices)
            raise
        answer = Answer(
            kind=kind,
            id=requests[0].request_id.removesuffix("-0") if kind == "text" else requests[0].request_id,
            model=body.model or self._prompts.model_names[0],
            token_ids=bool(body.return_token_ids) or self._prompts.tokenizer is None,
            prompt_token_ids=bool(body.return_token_ids),
        )
        if stream:
            lines = self._stream(answer, body, choices, n)
            return StreamingResponse(lines, media_type="text/event-stream")
        try:
            await _unless_gone(http, asyncio.gather(*map(self._finish, choices)))
        finally:
            self._leave(choices)
        return Response(_encode(answer.whole(choices, n)), media_type="application/json")

    def _choice(
        self, index: int, body: SamplingBody, request: EngineRequest, rank: int | None, *, echo: bool
    ) -> Choice:
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        generation = self._frontend.submit(request, rank=rank, whole=not body.stream)
        return Choice(
            index,
            generation,
            self._prompts.tokenizer,
            stop=stop,
            include_stop=body.include_stop_str_in_output,
            echo=self._prompts.text_of(request.prompt_token_ids) if echo else "",
            only_echo=body.max_tokens == 0,
        )

    def _leave(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            self._frontend.leave(choice.generation)

    async def _finish(self, choice: Choice) -> None:
        async for token_ids in self._frontend.stream(choice.generation):
            choice.push(token_ids)
            if choice.finish_reason:
                return

    async def _stream(
        self, answer: Answer, body: SamplingBody, choices: Sequence[Choice], n: int
    ) -> AsyncIterator[bytes]:
        options = body.stream_options
        running = bool(options and options.continuous_usage_stats)
        try:
            async for line in merge_streams([self._lines(answer, choice, running) for choice in choices]):
                yield line
            if options is not None and options.include_usage:
                yield _line(answer.usage_chunk(choices, n))
        except ApiError as error:
            yield _line(error_body(error))
        finally:
            self._leave(choices)
        yield b"data: [DONE]\n\n"

    async def _lines(self, answer: Answer, choice: Choice, running: bool) -> AsyncIterator[bytes]:
        """Yield the lines of one choice; `running`: each with what the choice has used so far."""
        first = answer.begin(choice)
        if first is not None:
            yield _line(first | {"usage": answer.running_usage(choice)} if running else first)
        async for token_ids in self._frontend.stream(choice.generation):
            text = choice.push(token_ids)
            chunk = answer.chunk(choice, text, token_ids)
            if running:
                chunk["usage"] = answer.running_usage(choice)
            yield _line(chunk)
            if choice.finish_reason:
                return


async def merge_streams(streams: Sequence[AsyncIterator[bytes]]) -> AsyncIterator[bytes]:
    """Yield what several streams give as it comes; an error of one ends all.

    Where nobody takes what they give the streams wait: their tokens gather, at no cost, until one line says them all.
    """
    if len(streams) == 1:
        async for line in streams[0]:
            yield line
        return
    queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(len(streams))

    async def pump(stream: AsyncIterator[bytes]) -> None:
        try:
            async for line in stream:
                await queue.put(line)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()


async def _unless_gone(http: HttpRequest, work: asyncio.Future[Any]) -> None:
    """Wait for `work`; cancel it when the client hangs up first."""
    gone = asyncio.ensure_future(_until_gone(http))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            raise ClientDisconnect
        await work
    finally:
        gone.cancel()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)  # what was cancelled is nobody's error


async def _until_gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _read(http: HttpRequest) -> bytes:
    """Return the body; raises ApiError for one past `MAX_BODY`, without keeping the rest of it."""
    data = bytearray()
    async for part in http.stream():
        data += part
        if len(data) > MAX_BODY:
            raise ApiError(
                f"the body has more than {MAX_BODY} bytes", status=413, kind="RequestEntityTooLargeError"
            )
    return bytes(data)


def _copies(request: EngineRequest, n: int) -> list[EngineRequest]:
    """Return a request as often as its choices are wanted, under ids of their own."""
    if n == 1:
        return [request]
    return [msgspec.structs.replace(request, request_id=f"{request.request_id}-{i}") for i in range(n)]


def _line(chunk: dict[str, Any]) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"


def _rank(http: HttpRequest) -> int | None:
    """Return the rank that a router asks for in its header, as vLLM reads it."""
    text = http.headers.get("x-data-parallel-rank")
    try:
        return None if text is None else int(text)
    except ValueError:  # what is no number asks for none; a number that is no rank is refused later
        return None


def _flag(http: HttpRequest, name: str) -> bool:
    text = http.query_params.get(name, "false").lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise bad_request(f"expected true or false, got {text!r}", param=name)
