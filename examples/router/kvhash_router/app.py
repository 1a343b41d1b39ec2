"""The ASGI application: the proxy and the router's own endpoints, with everything that runs beside them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvhash import KvHashError

from .bodies import ClientGoneError, RefusedError, parse_body, read_body
from .config import RouterConfig
from .decision_log import DecisionLog
from .health import HealthChecker
from .index_choice import make_residency
from .metrics import RouterMetrics
from .proxy import Proxy
from .residency import Residency
from .router import EngineView, Router

__all__ = ["make_app"]

_log = logging.getLogger(__name__)


def make_app(
    config: RouterConfig,
    *,
    residency: Residency | None = None,
    config_file: Path | None = None,
    decision_log: DecisionLog | None = None,
    watch_s: float = 1.0,
) -> Starlette:
    """Return the router's application; everything starts and stops with its lifespan.

    ``residency``: the index, else the one that `config` names. ``config_file`` is watched, and read again when it
    changes, or `app.state.read_again()` is called; a file that cannot be used leaves all as it is. Raises ConfigError.
    """
    own = _Own(config, residency or make_residency(config), config_file, decision_log, watch_s)
    routes = [
        Route("/health", own.answer_health),
        Route("/metrics", own.answer_metrics),
        Route("/debug/residency", own.answer_residency, methods=["GET", "POST"]),
        Route("/v1/models", own.answer_models),
        Route("/{path:path}", _Endpoint(own.pass_on), methods=["POST"]),
    ]
    app = Starlette(routes=routes, lifespan=own.lifespan, exception_handlers={HTTPException: _answer_error})
    app.state.read_again = own.read_again
    return app


class _Endpoint:
    """An ASGI endpoint, which Starlette takes for one only where it is no function."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


async def _answer_error(_: Request, error: Exception) -> Response:
    """Say in the API's form what Starlette itself refuses: a method, or a path that is none."""
    assert isinstance(error, HTTPException)
    answer = _bad(
        error.status_code, error.detail, "NotFoundError" if error.status_code == 404 else "BadRequestError"
    )
    answer.headers.update(error.headers or {})
    return answer


def _client(config: RouterConfig) -> aiohttp.ClientSession:
    proxy = config.proxy
    return aiohttp.ClientSession(
        # Below the 5 s after which uvicorn, and so vLLM, closes a silent connection.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=proxy.connect_timeout_s, sock_read=proxy.read_timeout_s
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
    )


class _Own:
    def __init__(
        self,
        config: RouterConfig,
        residency: Residency,
        config_file: Path | None,
        decision_log: DecisionLog | None,
        watch_s: float,
    ) -> None:
        self._router = Router(config, residency)
        self._metrics = RouterMetrics()
        self._file = config_file
        self._watch_s = watch_s
        self._log = decision_log
        self._config = config
        self._proxy: Proxy | None = None
        self._again = False

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Check and watch while the application runs."""
        client = _client(self._config)
        health = HealthChecker(
            self._router.fleet, client, self._config.health, came_back=self._router.came_back
        )
        self._proxy = Proxy(self._router, client, self._metrics, health, self._log)
        tasks = [asyncio.ensure_future(health.run())]
        if self._file is not None:
            tasks.append(asyncio.ensure_future(self._watch(self._file)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await client.close()
            await asyncio.to_thread(self._router.close)
            if self._log is not None:
                await asyncio.to_thread(self._log.close)

    async def pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to an engine."""
        assert self._proxy is not None, "the application's lifespan has not begun"
        await self._proxy(scope, receive, send)

    def read_again(self) -> None:
        """Read the watched file at the next look at it, though it may not have changed."""
        self._again = True

    async def _watch(self, file: Path) -> None:
        seen = _stamp(file)
        while True:
            await asyncio.sleep(self._watch_s)
            stamp = _stamp(file)
            if stamp == seen and not self._again:
                continue
            seen, self._again = stamp, False
            try:
                config = await asyncio.to_thread(RouterConfig.load, file)
                await self._router.reload(config)
            except KvHashError as error:
                self._metrics.config_errors.inc()
                _log.error("the new configuration cannot be used, the old one stays: %s", error)
            except Exception:  # whatever it is, the next file is read
                self._metrics.config_errors.inc()
                _log.exception("the new configuration cannot be used, the old one stays")
            else:
                _log.warning("%s was read again: %d engines", file, len(config.engines))

    async def answer_health(self, _: Request) -> Response:
        """200 while an engine takes requests."""
        up = any(engine.up for engine in self._router.fleet.engines.values())
        return Response(status_code=200 if up else 503)

    async def answer_metrics(self, _: Request) -> Response:
        """Prometheus' text."""
        views = await self._router.view()
        text = self._metrics.render(views, self._router.residency)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def answer_models(self, _: Request) -> Response:
        """The models and adapters that are served."""
        cards = []
        for name, model in self._router.config.models.items():
            cards.append(_card(name, None))
            cards += [_card(adapter, name) for adapter in model.adapters]
        return JSONResponse({"object": "list", "data": cards})

    async def answer_residency(self, http: Request) -> Response:
        """GET: what is known of every engine. POST: where a request would go, by its body, without sending it."""
        if http.method == "POST":
            return await self._answer_where(http)
        views = await self._router.view()
        stats = await self._router.in_thread(self._router.residency.stats)
        return JSONResponse(
            {
                "engines": {name: _view_json(view) for name, view in views.items()},
                "index": _plain(stats),
                "store_down_since": self._router.residency.store_down_since,
                "time": time.time(),
            }
        )

    def _is_up(self, name: str) -> bool:
        engine = self._router.fleet.engines.get(name)
        return engine is not None and engine.up

    async def _answer_where(self, http: Request) -> Response:
        proxy = self._router.config.proxy
        try:
            data = await read_body(http.receive, proxy.max_body_bytes, proxy.stream_idle_s)
            body = parse_body(data)
        except ClientGoneError:
            return Response()  # which nobody gets
        except RefusedError as refusal:
            return _bad(refusal.status, str(refusal), refusal.kind)
        name = body.get("model")
        served = self._router.config.model_of(name if isinstance(name, str) else None)
        if served is None:
            return _bad(404, self._router.config.no_such_model(name), "NotFoundError")
        survey = await self._router.survey(*served, body, len(data))
        decision = self._router.choose(survey)
        if decision is None:
            return _bad(503, f"there is no engine of {served[0]!r}")
        return JSONResponse(
            {
                "engine": decision.engine,
                "basis": decision.basis.value,
                "prompt_tokens": survey.plan.prompt_tokens,
                "unhashed": survey.plan.unhashed,
                "matched_tokens": {
                    one.candidate.engine: one.candidate.matched_tokens for one in decision.scored
                },
                "down": [name for name in survey.matched_tokens if not self._is_up(name)],
                "cost_s": {one.candidate.engine: one.cost for one in decision.scored},
            }
        )


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        stat = file.stat()
    except (OSError, ValueError):
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _bad(status: int, message: str, kind: str = "BadRequestError") -> Response:
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": error}, status_code=status)


def _card(name: str, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "owned_by": "kvhash-router",
        "root": parent or name,
        "parent": parent,
    }


def _view_json(view: EngineView) -> dict[str, Any]:
    verification = view.verification
    return {
        "url": view.url,
        "model": view.model,
        "up": view.up,
        "down": None if view.up else view.last_failure,
        "last_failure": view.last_failure,
        "knowledge": view.known.knowledge.value,
        "reason": view.known.reason,
        "since": view.known.since,
        "hashes": {
            "matched": verification.matched,
            "mismatched": verification.mismatched,
            "not_derivable": verification.not_derivable,
            "faults": {adapter or "": fault for adapter, fault in verification.faults.items()},
        },
        "in_flight": view.in_flight,
        "requests": view.requests,
        "queued_tokens": view.queued_tokens,
        "tokens_per_second": view.speed,
        "records": dict(view.records),
        "last_record_at": view.last_record_at,
    }


def _plain(value: Any) -> Any:
    """Return the index's statistics as JSON values."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(one) for one in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    return str(value)
