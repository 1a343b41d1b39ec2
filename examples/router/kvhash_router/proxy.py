"""Passes OpenAI requests on to the engine that the router chooses, and its answer back, streamed or whole.

* An attempt that fails before the first byte of an answer is made again at the next best engine.
* A client that hangs up cancels the request at its engine.
* An engine that dies within a stream gives an error event in the form that OpenAI's clients raise; the events passed
  on until then are whole.
* An answer that is not streamed is passed on when it is whole, so an engine that dies before is retried too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import aiohttp
from starlette.types import Receive, Scope, Send
from yarl import URL

from .bodies import MAX_ANSWER_BYTES, ClientGoneError, RefusedError, parse_body, read_body, usage_of
from .decision import Decision, Scored
from .decision_log import DecisionLog, prompt_json
from .doubts import Predictions
from .fleet import Ticket
from .health import HealthChecker, is_own_fault
from .metrics import RouterMetrics
from .prompts import Plan
from .router import Router, Survey
from .sse import EventCutter, EventTooLongError, error_event, is_done, usage_in

__all__ = ["Proxy"]

_log = logging.getLogger(__name__)

#: Hop-by-hop fields, and those that are written anew.
_DROPPED = frozenset(
    (
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
#: Endpoints that change the one engine that they reach.
_OF_ONE_ENGINE = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"))
_STOPPED = "the router was stopped"
#: What vLLM reads to choose a data parallel rank.
_RANK = "x-data-parallel-rank"
#: The engine cannot take the request now; another may.
_UNAVAILABLE = frozenset((502, 503, 504))


#: The longest answer, not streamed, that is kept until it is whole; longer ones are passed on as they come.
_MAX_WHOLE_BYTES = 64 * 1024 * 1024
#: No request has more tokens; what an engine reports beyond is not counted.
_MOST_TOKENS = 1 << 40
#: What an engine's connection raises.
_FAILURES = (aiohttp.ClientError, asyncio.TimeoutError, OSError)


class _TryAgainError(Exception):
    """The attempt failed before the first byte."""


@dataclass(slots=True)
class _Exchange:
    """One request on its way: what came, what goes back, and what is said of it in the log."""

    request_id: str
    method: str
    path: str
    query: bytes
    headers: list[tuple[str, str]]
    body: bytes
    send: Send
    began: float = field(default_factory=time.monotonic)
    began_at: float = field(default_factory=time.time)
    survey: Survey | None = None
    decision: Decision | None = None
    attempts: list[dict[str, str]] = field(default_factory=list)
    started: bool = False
    streamed: bool = False
    gone: bool = False
    stopped: bool = False
    first_byte_s: float | None = None
    status: int | None = None
    usage: dict[str, Any] | None = None
    outcome: str = "error"
    fault: str | None = None

    async def start(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        """Send the status and headers."""
        self.started = True
        self.status = status
        self.first_byte_s = time.monotonic() - self.began
        raw = [(_bytes(name), _bytes(value)) for name, value in headers]
        raw.append((b"x-request-id", self.request_id.encode("latin-1", "replace")))  # it came as Latin-1
        await self.send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes, *, more: bool) -> None:
        """Send a piece of the body."""
        await self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def refuse(self, status: int, message: str, kind: str) -> None:
        """Send an error as OpenAI's API gives it."""
        body = json.dumps(
            {"error": {"message": message, "type": kind, "param": None, "code": status}}
        ).encode()
        await self.start(status, [("content-type", "application/json"), ("content-length", str(len(body)))])
        await self.write(body, more=False)

    async def break_off(self, message: str) -> None:
        """End the answer with an error, wherever it is."""
        if not self.started:
            await self.refuse(503, message, "router_stopped")
        elif self.streamed:
            await self.write(error_event(message, code=503, kind="router_stopped"), more=True)
            await self.write(b"", more=False)


class Proxy:
    """The ASGI endpoint of everything that goes to an engine."""

    def __init__(
        self,
        router: Router,
        client: aiohttp.ClientSession,
        metrics: RouterMetrics,
        health: HealthChecker,
        log: DecisionLog | None,
    ) -> None:
        self._router = router
        self._client = client
        self._metrics = metrics
        self._health = health
        self._log = log
        self._told: set[str] = set()
        self._predictions = Predictions()
        if log is not None:
            log.on_drop = metrics.log_dropped.inc

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; return early when its client has gone."""
        headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in scope["headers"]]
        given = next((value for name, value in headers if name == "x-request-id"), None)
        exchange = _Exchange(
            given or f"kvhash-{uuid.uuid4().hex}",
            scope["method"],
            scope.get("raw_path", scope["path"].encode()).decode("latin-1").partition("?")[0],
            scope.get("query_string", b""),
            headers,
            b"",
            send,
        )
        proxy = self._router.config.proxy
        try:
            _check_path(exchange.path)
            exchange.body = await read_body(receive, proxy.max_body_bytes, proxy.stream_idle_s)
        except ClientGoneError:
            return
        except asyncio.CancelledError:
            await exchange.break_off(_STOPPED)
            return
        except RefusedError as refusal:
            await exchange.refuse(refusal.status, str(refusal), refusal.kind)
            return
        job = asyncio.ensure_future(self._serve(exchange))
        watch = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait((job, watch), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the server ends, and its patience with it
            exchange.stopped = not watch.done() and not job.done()
        gone = exchange.gone = watch.done() or not job.done()
        watch.cancel()
        if not job.done():
            job.cancel()
        await asyncio.gather(job, watch, return_exceptions=True)
        if exchange.stopped:
            await exchange.break_off(_STOPPED)
        elif not gone:
            job.result()

    async def _serve(self, exchange: _Exchange) -> None:
        try:
            survey = exchange.survey = await self._survey(exchange)
            await self._route(exchange, survey)
        except RefusedError as refusal:
            exchange.outcome, exchange.fault = "refused", str(refusal)
            await exchange.refuse(refusal.status, str(refusal), refusal.kind)
        except asyncio.CancelledError:
            exchange.outcome = "router-stopped" if exchange.stopped else "client-gone"
            raise
        finally:
            try:
                self._account(exchange)
            except Exception:  # what is said of a request must not change its answer
                _log.exception("the request %s could not be accounted for", exchange.request_id)

    async def _survey(self, exchange: _Exchange) -> Survey:
        coding = next((value for name, value in exchange.headers if name == "content-encoding"), "identity")
        if coding.lower() != "identity":
            raise RefusedError(415, f"the body is compressed ({coding:.20}), which is not read")
        body = parse_body(exchange.body)
        name = body.get("model")
        served = self._router.config.model_of(name if isinstance(name, str) else None)
        if served is None:
            raise RefusedError(404, self._router.config.no_such_model(name), "NotFoundError")
        survey = await self._router.survey(*served, body, len(exchange.body), path=exchange.path)
        self._metrics.deciding.observe(survey.seconds)
        if survey.plan.unhashed is not None:
            self._metrics.unhashed.labels(survey.plan.unhashed.partition(":")[0]).inc()
        return survey

    async def _route(self, exchange: _Exchange, survey: Survey) -> None:
        while len(exchange.attempts) <= self._router.config.proxy.retries:
            tried = [attempt["engine"] for attempt in exchange.attempts]
            decision = self._router.choose(survey, excluded=tried)
            if decision is None:
                break
            exchange.decision = decision
            self._metrics.decisions.labels(decision.basis.value).inc()
            ticket = self._router.begin(survey, decision)
            try:
                await self._attempt(exchange, ticket)
                return
            except _TryAgainError as fault:
                exchange.attempts.append({"engine": decision.engine, "fault": str(fault)})
                self._metrics.retries.labels(decision.engine).inc()
            finally:
                ticket.close()
        exchange.outcome = "no-engine"
        if exchange.attempts:
            tried_text = "; ".join(f"{one['engine']}: {one['fault']}" for one in exchange.attempts)
            await exchange.refuse(502, f"no engine could answer ({tried_text})", "engine_error")
        else:
            await exchange.refuse(503, f"there is no engine of {survey.plan.model!r}", "engine_error")

    async def _attempt(self, exchange: _Exchange, ticket: Ticket) -> None:
        """Pass the request to the ticket's engine; raises _TryAgainError when it fails before the first byte.

        So does an engine that goes down before it answers, where another one is up.
        """
        task, left = asyncio.current_task(), False

        def leave() -> None:
            nonlocal left
            if task is not None and not left and not exchange.started and self._elsewhere(exchange, ticket):
                left = True
                task.cancel()

        ticket.engine.leaving.add(leave)
        try:
            await self._ask(exchange, ticket)
        except asyncio.CancelledError:
            if not left or exchange.gone:
                raise
            if task is not None and sys.version_info >= (3, 11):
                task.uncancel()
            raise _TryAgainError(f"it went down: {ticket.engine.last_failure}") from None
        except _FAILURES as error:
            if exchange.started:
                raise  # the client's side failed, not the engine's
            # To take the engine for down makes its requests leave; this one has left, and must not be cancelled.
            ticket.engine.leaving.discard(leave)
            if isinstance(error, aiohttp.ClientConnectorError) and not is_own_fault(error):
                self._health.gone(ticket.engine, f"request: {error}")
            else:
                self._health.suspect(ticket.engine)
            raise _TryAgainError(_text(error)) from error
        finally:
            ticket.engine.leaving.discard(leave)

    def _elsewhere(self, exchange: _Exchange, ticket: Ticket) -> bool:
        """Whether another attempt is left, and an engine that is up to make it at."""
        if len(exchange.attempts) >= self._router.config.proxy.retries:
            return False
        tried = [ticket.engine.name, *(attempt["engine"] for attempt in exchange.attempts)]
        return any(one.up for one in self._router.fleet.available(ticket.engine.config.model, excluded=tried))

    async def _ask(self, exchange: _Exchange, ticket: Ticket) -> None:
        engine = ticket.engine
        query = f"?{exchange.query.decode('latin-1')}" if exchange.query else ""
        dropped = {*_DROPPED, *_hop_by_hop(exchange.headers), "x-request-id"}
        headers = [(name, _sent(name, value)) for name, value in exchange.headers if name not in dropped]
        headers += [
            ("x-request-id", _sent("x-request-id", exchange.request_id)),
            ("accept-encoding", "identity"),
        ]
        rank = exchange.survey.ranks.get(engine.name) if exchange.survey else None
        if rank is not None and engine.config.ranks > 1 and not any(name == _RANK for name, _ in headers):
            headers.append((_RANK, str(rank)))
        async with self._client.request(
            exchange.method,
            URL(f"{engine.config.url}{exchange.path}{query}", encoded=True),
            data=exchange.body,
            headers=headers,
            allow_redirects=False,
        ) as response:
            if response.status in _UNAVAILABLE:
                raise _TryAgainError(f"status {response.status}")
            if not 200 <= response.status <= 599:
                raise _TryAgainError(f"an answer with the status {response.status}, which HTTP does not have")
            if _is_stream(response):
                await self._pass_stream(exchange, ticket, response)
            else:
                await self._pass_whole(exchange, ticket, response)

    async def _pass_whole(
        self, exchange: _Exchange, ticket: Ticket, response: aiohttp.ClientResponse
    ) -> None:
        """Pass an answer on when it is whole, or, where it is longer than what is kept, as it comes from there on."""
        pieces: list[bytes] = []
        size = 0
        content = response.content.iter_any()
        async for piece in content:
            pieces.append(piece)
            size += len(piece)
            if size > _MAX_WHOLE_BYTES:
                await self._pass_long(exchange, ticket, response, pieces, content)
                return
        if response.status < 400:
            exchange.outcome = "ok"
            exchange.usage = usage_of(b"".join(pieces)) if size <= MAX_ANSWER_BYTES else None
            if exchange.usage is not None:
                self._measure(exchange, ticket, streamed=False)
        else:
            exchange.outcome = "engine-refused"
        ticket.close()
        length = [] if response.status in (204, 304) else [("content-length", str(size))]
        await exchange.start(response.status, [*self._headers(response, ticket), *length])
        for piece in pieces:
            await exchange.write(piece, more=True)
        await exchange.write(b"", more=False)

    async def _pass_long(
        self,
        exchange: _Exchange,
        ticket: Ticket,
        response: aiohttp.ClientResponse,
        pieces: list[bytes],
        content: AsyncIterator[bytes],
    ) -> None:
        """Pass on the pieces and what follows; what it reports is not learned."""
        length = response.content_length
        fields = [] if length is None else [("content-length", str(length))]
        await exchange.start(response.status, [*self._headers(response, ticket), *fields])
        for piece in pieces:
            await exchange.write(piece, more=True)
        pieces.clear()
        try:
            async for piece in content:
                await exchange.write(piece, more=True)
        except _FAILURES as error:
            # There is no other way to tell the client than to break its connection off, as the server does now.
            exchange.outcome, exchange.fault = "engine-died", _text(error)
            self._health.suspect(ticket.engine)
        else:
            exchange.outcome = "ok" if response.status < 400 else "engine-refused"
            await exchange.write(b"", more=False)
        finally:
            ticket.close()

    def _headers(self, response: aiohttp.ClientResponse, ticket: Ticket) -> list[tuple[str, str]]:
        return [*_response_headers(response), ("x-kvhash-engine", ticket.engine.name)]

    async def _pass_stream(
        self, exchange: _Exchange, ticket: Ticket, response: aiohttp.ClientResponse
    ) -> None:
        exchange.streamed = True
        cutter = EventCutter()
        done = False
        fault: str | None = None
        silence = _Silence(response.content, self._router.config.proxy.stream_idle_s)
        try:
            async for piece in response.content.iter_any():
                silence.broken()
                events = cutter.feed(piece)
                if not events:
                    if exchange.started:
                        silence.begins()
                    continue
                if b"data:" in events:  # not a comment, which keeps the connection alive
                    ticket.first()
                if not exchange.started:
                    await exchange.start(
                        response.status,
                        self._headers(response, ticket),
                    )
                ticket.progress(events.count(b"data:"))
                done = done or is_done(events)
                exchange.usage = usage_in(events) or exchange.usage
                await exchange.write(events, more=True)
                silence.begins()
        except _FAILURES as error:
            if not exchange.started:
                raise
            fault = silence.fault or _text(error)
            self._health.suspect(ticket.engine)
        except EventTooLongError as error:
            fault = str(error)
            if not exchange.started:
                raise _TryAgainError(fault) from None
        else:
            if (
                not done and exchange.started and is_done(cutter.rest)
            ):  # the end mark, but no empty line behind it
                done = True
                await exchange.write(cutter.rest + b"\n\n", more=True)
            if not done:
                fault = "the stream ended without its end mark"
                if not exchange.started:
                    raise _TryAgainError(fault)
        finally:
            silence.end()
        if fault is None:
            exchange.outcome = "ok"
            self._measure(exchange, ticket, streamed=True)
        else:
            exchange.outcome, exchange.fault = "engine-died", fault
            message = (
                f"the engine {ticket.engine.name} failed within the answer, which is incomplete: {fault}"
            )
            await exchange.write(error_event(message), more=True)
        ticket.close()
        await exchange.write(b"", more=False)

    def _measure(self, exchange: _Exchange, ticket: Ticket, *, streamed: bool) -> None:
        usage = exchange.usage or {}
        uncached = ticket.uncached_tokens
        cached, prompt = _cached_tokens(usage), _count(usage.get("prompt_tokens"))
        if cached is not None and prompt is not None:
            uncached = float(max(0, prompt - cached))
        output = _count(usage.get("completion_tokens"))
        if output is None:
            output = ticket.generated
        ticket.finished(uncached_tokens=uncached, output_tokens=output, streamed=streamed)

    # --- what is said of it ---------------------------------------------------------------------------------------

    def _account(self, exchange: _Exchange) -> None:
        decision, survey = exchange.decision, exchange.survey
        engine = "" if decision is None else decision.engine
        self._metrics.requests.labels(engine, exchange.outcome).inc()
        if decision is None or survey is None:
            return
        if exchange.first_byte_s is not None and exchange.outcome == "ok":
            self._metrics.first_byte.labels(engine).observe(exchange.first_byte_s)
        self._metrics.prompt_tokens.labels(engine).inc(survey.plan.prompt_tokens)
        self._metrics.predicted_tokens.labels(engine).inc(decision.chosen.candidate.matched_tokens)
        usage = exchange.usage or {}
        cached, counted = _cached_tokens(usage), _count(usage.get("prompt_tokens"))
        if survey.plan.prompts and counted is not None and counted != survey.plan.prompt_tokens:
            self._say_other_prompt(survey.plan, engine, counted)
        predicted = decision.chosen.candidate.matched_tokens
        doubt = self._predictions.saw(engine, predicted=predicted, reported=cached)
        if doubt is not None:
            _log.warning("%s", doubt)
        if cached:
            self._metrics.cached_tokens.labels(engine).inc(cached)
        if self._log is not None:
            self._log.write(self._record(exchange, survey, decision, cached, counted))

    def _say_other_prompt(self, plan: Plan, engine: str, counted: int) -> None:
        """Say that an engine made other tokens of a prompt than were hashed: nothing of it can match there."""
        self._metrics.other_prompts.labels(engine).inc()
        if engine not in self._told:  # once: the log has it of each request
            self._told.add(engine)
            _log.warning(
                "engine %s counted %d prompt tokens where %d were hashed: its tokenizer, chat template or defaults are "
                "not those that model %r is configured with",
                engine,
                counted,
                plan.prompt_tokens,
                plan.model,
            )

    def _record(
        self,
        exchange: _Exchange,
        survey: Survey,
        decision: Decision,
        cached: int | None,
        counted: int | None,
    ) -> dict[str, Any]:
        assert self._log is not None
        plan = survey.plan
        return {
            "v": 1,
            "id": exchange.request_id,
            "time": round(exchange.began_at, 3),
            "path": exchange.path,
            "model": plan.model,
            "adapter": plan.adapter,
            "engine": decision.engine,
            "basis": decision.basis.value,
            "prompt_tokens": plan.prompt_tokens,
            "matched_tokens": decision.chosen.candidate.matched_tokens,
            "cached_tokens": cached,
            "reported_prompt_tokens": counted,
            "unhashed": plan.unhashed,
            "outcome": exchange.outcome,
            "fault": exchange.fault,
            "status": exchange.status,
            "first_byte_s": None if exchange.first_byte_s is None else round(exchange.first_byte_s, 4),
            "total_s": round(time.monotonic() - exchange.began, 4),
            "attempts": exchange.attempts,
            "candidates": [_candidate_json(one, survey) for one in decision.scored],
            "prompts": [prompt_json(one, with_tokens=self._log.with_tokens) for one in plan.prompts],
        }


class _Silence:
    """Breaks off a stream that an engine has begun and goes on no longer; a slow client is no silence."""

    def __init__(self, content: aiohttp.StreamReader, limit_s: float) -> None:
        self._content, self._limit_s = content, limit_s
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: What is wrong, once it was broken off.
        self.fault: str | None = None

    def begins(self) -> None:
        """All that came was passed on."""
        self._since = self._loop.time()
        if self._timer is None:  # one timer that looks again, not one for each piece
            self._timer = self._loop.call_later(self._limit_s, self._look)

    def broken(self) -> None:
        """Something came."""
        self._since = None

    def end(self) -> None:
        """The stream is over."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        left = self._limit_s if self._since is None else self._since + self._limit_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
            return
        self.fault = f"it sent nothing for {self._limit_s:g} s"
        self._content.set_exception(asyncio.TimeoutError(self.fault))


def _candidate_json(scored: Scored, survey: Survey) -> dict[str, Any]:
    candidate = scored.candidate
    known = survey.known.get(candidate.engine)
    return {
        "engine": candidate.engine,
        "matched_tokens": candidate.matched_tokens,
        "knowledge": candidate.knowledge.value,
        "reason": None if known is None else known.reason,
        "uncached_tokens": round(scored.uncached_tokens, 1),
        "queued_tokens": round(candidate.queued_tokens, 1),
        "recent_tokens": round(candidate.recent_tokens, 1),
        "tokens_per_second": round(candidate.speed, 1),
        "cost_s": round(scored.cost, 6),
    }


def _text(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientResponseError):  # whose text has the engine's address and many lines
        said = error.message.partition("\n")[0].rstrip(":")
        return f"an answer that is not HTTP: {said:.100}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _cached_tokens(usage: dict[str, Any]) -> int | None:
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return _count(cached)


def _count(value: Any) -> int | None:
    """Return a number of tokens that an engine reports, or None where it is none that can be."""
    return value if type(value) is int and 0 <= value <= _MOST_TOKENS else None


def _response_headers(response: aiohttp.ClientResponse) -> list[tuple[str, str]]:
    fields = [(name, value) for name, value in response.headers.items()]
    dropped = {*_DROPPED, *_hop_by_hop(fields), "date", "server", "x-request-id"}
    return [(name, value) for name, value in fields if name.lower() not in dropped]


def _hop_by_hop(fields: Iterable[tuple[str, str]]) -> set[str]:
    """Return the names that a message's own Connection fields give: they are of this connection, as that one is."""
    named = (value for name, value in fields if name.lower() == "connection")
    return {name.strip().lower() for value in named for name in value.split(",")}


def _is_stream(response: aiohttp.ClientResponse) -> bool:
    """Whether events can be read in the answer as they come: not in an error's, nor where they are compressed."""
    kind = response.headers.get("content-type", "").lower()
    plain = response.headers.get("content-encoding", "identity").lower() == "identity"
    return response.status < 400 and plain and kind.startswith("text/event-stream")


def _bytes(text: str) -> bytes:
    """Return a field as it came: aiohttp reads UTF-8 with surrogates for other bytes; ASGI's own are Latin-1."""
    return text.encode("utf-8", "surrogateescape")


def _sent(name: str, value: str) -> str:
    """Return a client's field, read as Latin-1, as aiohttp sends it unchanged: it writes UTF-8, and nothing else."""
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeDecodeError:
        raise RefusedError(400, f"the header {name:.100} has bytes that are not UTF-8") from None


def _check_path(path: str) -> None:
    """Raise RefusedError unless requests to `path`, as it came, are one engine's as well as another's.

    An engine has other endpoints, such as those that pause it or abort others' requests; they are not for clients.
    """
    plain = unquote(path)
    if not path.startswith("/v1/") or "\\" in plain or {"", ".", ".."} & set(plain.split("/")[1:]):
        raise RefusedError(404, f"there is no {path:.100} here; requests go to /v1/...", "NotFoundError")
    if plain in _OF_ONE_ENGINE:
        raise RefusedError(404, f"{plain} is of one engine, not of the router", "NotFoundError")


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
