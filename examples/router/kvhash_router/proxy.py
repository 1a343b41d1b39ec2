"""Takes OpenAI requests, has the router choose an engine for each, and makes another attempt where one fails.

* An attempt that fails before the first byte of an answer is made again at the next best engine.
* A client that hangs up cancels the request at its engine.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from urllib.parse import unquote

import aiohttp
from starlette.types import Receive, Scope, Send

from .accounts import Accounts
from .bodies import ClientGoneError, RefusedError, parse_body, read_body
from .decision_log import DecisionLog
from .exchange import Exchange
from .health import HealthChecker
from .metrics import RouterMetrics
from .router import Router, Survey
from .upstream import TryAgainError, Upstream

__all__ = ["Proxy"]

_log = logging.getLogger(__name__)

#: Endpoints that change the one engine that they reach.
_OF_ONE_ENGINE = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"))
_STOPPED = "the router was stopped"


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
        self._metrics = metrics
        self._upstream = Upstream(router, client, health)
        self._accounts = Accounts(metrics, log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; return early when its client has gone."""
        headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in scope["headers"]]
        given = next((value for name, value in headers if name == "x-request-id"), None)
        exchange = Exchange(
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

    async def _serve(self, exchange: Exchange) -> None:
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
                self._accounts.take(exchange)
            except Exception:  # what is said of a request must not change its answer
                _log.exception("the request %s could not be accounted for", exchange.request_id)

    async def _survey(self, exchange: Exchange) -> Survey:
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

    async def _route(self, exchange: Exchange, survey: Survey) -> None:
        while len(exchange.attempts) <= self._router.config.proxy.retries:
            tried = [attempt["engine"] for attempt in exchange.attempts]
            decision = self._router.choose(survey, excluded=tried)
            if decision is None:
                break
            exchange.decision = decision
            self._metrics.decisions.labels(decision.basis.value).inc()
            ticket = self._router.begin(survey, decision)
            try:
                await self._upstream.attempt(exchange, ticket)
                return
            except TryAgainError as fault:
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
