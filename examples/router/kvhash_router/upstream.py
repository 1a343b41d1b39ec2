"""One attempt at one engine: the request goes there, and its answer goes back, streamed or whole.

* An engine that dies within a stream gives an error event in the form that OpenAI's clients raise; the events passed
  on until then are whole.
* An answer that is not streamed is passed on when it is whole, so an engine that dies before can be left for another.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import aiohttp
from yarl import URL

from .bodies import MAX_ANSWER_BYTES, usage_of
from .exchange import Exchange
from .fleet import Ticket
from .headers import request_fields, response_fields
from .health import HealthChecker, is_own_fault
from .router import Router
from .sse import EventCutter, EventTooLongError, error_event, is_done, usage_in
from .usage import cached_tokens, count

__all__ = ["TryAgainError", "Upstream"]

#: The engine cannot take the request now; another may.
_UNAVAILABLE = frozenset((502, 503, 504))
#: The longest answer, not streamed, that is kept until it is whole; longer ones are passed on as they come.
_MAX_WHOLE_BYTES = 64 * 1024 * 1024
#: What an engine's connection raises.
_FAILURES = (aiohttp.ClientError, asyncio.TimeoutError, OSError)


class TryAgainError(Exception):
    """The attempt failed before the first byte."""


class Upstream:
    """The engines' side of the proxy."""

    def __init__(self, router: Router, client: aiohttp.ClientSession, health: HealthChecker) -> None:
        self._router, self._client, self._health = router, client, health

    async def attempt(self, exchange: Exchange, ticket: Ticket) -> None:
        """Pass the request to the ticket's engine; raises TryAgainError when it fails before the first byte.

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
            raise TryAgainError(f"it went down: {ticket.engine.last_failure}") from None
        except _FAILURES as error:
            if exchange.started:
                raise  # the client's side failed, not the engine's
            # To take the engine for down makes its requests leave; this one has left, and must not be cancelled.
            ticket.engine.leaving.discard(leave)
            if isinstance(error, aiohttp.ClientConnectorError) and not is_own_fault(error):
                self._health.gone(ticket.engine, f"request: {error}")
            else:
                self._health.suspect(ticket.engine)
            raise TryAgainError(_text(error)) from error
        finally:
            ticket.engine.leaving.discard(leave)

    def _elsewhere(self, exchange: Exchange, ticket: Ticket) -> bool:
        """Whether another attempt is left, and an engine that is up to make it at."""
        if len(exchange.attempts) >= self._router.config.proxy.retries:
            return False
        tried = [ticket.engine.name, *(attempt["engine"] for attempt in exchange.attempts)]
        return any(one.up for one in self._router.fleet.available(ticket.engine.config.model, excluded=tried))

    async def _ask(self, exchange: Exchange, ticket: Ticket) -> None:
        engine = ticket.engine
        query = f"?{exchange.query.decode('latin-1')}" if exchange.query else ""
        ranks = exchange.survey.ranks if exchange.survey is not None and engine.config.ranks > 1 else {}
        async with self._client.request(
            exchange.method,
            URL(f"{engine.config.url}{exchange.path}{query}", encoded=True),
            data=exchange.body,
            headers=request_fields(exchange.headers, exchange.request_id, ranks.get(engine.name)),
            allow_redirects=False,
        ) as response:
            if response.status in _UNAVAILABLE:
                raise TryAgainError(f"status {response.status}")
            if not 200 <= response.status <= 599:
                raise TryAgainError(f"an answer with the status {response.status}, which HTTP does not have")
            if _is_stream(response):
                await self._pass_stream(exchange, ticket, response)
            else:
                await self._pass_whole(exchange, ticket, response)

    async def _pass_whole(self, exchange: Exchange, ticket: Ticket, response: aiohttp.ClientResponse) -> None:
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
        exchange: Exchange,
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
        return [*response_fields(response), ("x-kvhash-engine", ticket.engine.name)]

    async def _pass_stream(
        self, exchange: Exchange, ticket: Ticket, response: aiohttp.ClientResponse
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
                raise TryAgainError(fault) from None
        else:
            if (
                not done and exchange.started and is_done(cutter.rest)
            ):  # the end mark, but no empty line behind it
                done = True
                await exchange.write(cutter.rest + b"\n\n", more=True)
            if not done:
                fault = "the stream ended without its end mark"
                if not exchange.started:
                    raise TryAgainError(fault)
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

    def _measure(self, exchange: Exchange, ticket: Ticket, *, streamed: bool) -> None:
        usage = exchange.usage or {}
        uncached = ticket.uncached_tokens
        cached, prompt = cached_tokens(usage), count(usage.get("prompt_tokens"))
        if cached is not None and prompt is not None:
            uncached = float(max(0, prompt - cached))
        output = count(usage.get("completion_tokens"))
        if output is None:
            output = ticket.generated
        ticket.finished(uncached_tokens=uncached, output_tokens=output, streamed=streamed)


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


def _text(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientResponseError):  # whose text has the engine's address and many lines
        said = error.message.partition("\n")[0].rstrip(":")
        return f"an answer that is not HTTP: {said:.100}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _is_stream(response: aiohttp.ClientResponse) -> bool:
    """Whether events can be read in the answer as they come: not in an error's, nor where they are compressed."""
    kind = response.headers.get("content-type", "").lower()
    plain = response.headers.get("content-encoding", "identity").lower() == "identity"
    return response.status < 400 and plain and kind.startswith("text/event-stream")
