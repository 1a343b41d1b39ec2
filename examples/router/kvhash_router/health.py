"""Health checks: GET /health of every engine, again and again; says who is down and who is back.

An engine is down after `HealthConfig.failures` failed checks in a row, and at once when it refuses a connection: then
its process is gone, and with it its cache. A check that had no time here, because this process had none, says nothing.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import time
from collections.abc import Callable

import aiohttp

from .config import HealthConfig
from .fleet import EngineState, Fleet

__all__ = ["HealthChecker", "is_own_fault"]

_log = logging.getLogger(__name__)


#: Seconds between two looks at whether this process is late, and the share of a check's time that it may be late by.
_LOOK_S = 0.1
_LATE_SHARE = 0.1
#: This process, or machine, has no file left for a connection.
_OWN_FAULTS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EADDRNOTAVAIL))


def is_own_fault(error: aiohttp.ClientConnectorError) -> bool:
    """Whether a connection failed for want of something here, which says nothing of the engine."""
    return error.os_error.errno in _OWN_FAULTS


class HealthChecker:
    """Checks a fleet's engines. ``came_back`` is called for an engine whose process was gone and is there again."""

    def __init__(
        self,
        fleet: Fleet,
        client: aiohttp.ClientSession,
        config: HealthConfig,
        *,
        came_back: Callable[[EngineState], None],
    ) -> None:
        self._fleet = fleet
        self._client = client
        self._config = config
        self._came_back = came_back
        self._gone: set[str] = set()
        self._suspects: dict[str, asyncio.Task[None]] = {}
        self._late_at = -math.inf

    async def run(self) -> None:
        """Check for ever."""
        watch = asyncio.ensure_future(self._watch_lateness())
        try:
            while True:
                await self.check_all()
                await asyncio.sleep(self._config.interval_s)
        finally:
            watch.cancel()

    async def _watch_lateness(self) -> None:
        """Note when this process came to its own work later than an engine's answer may be."""
        while True:
            due = time.monotonic() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            if time.monotonic() - due > _LATE_SHARE * self._config.timeout_s:
                self._late_at = time.monotonic()

    async def check_all(self) -> None:
        """Check every engine once, all at the same time."""
        await asyncio.gather(*(self._check(engine) for engine in list(self._fleet.engines.values())))

    async def _check(self, engine: EngineState) -> None:
        began = time.monotonic()
        try:
            timeout = aiohttp.ClientTimeout(total=self._config.timeout_s)
            async with self._client.get(f"{engine.config.url}/health", timeout=timeout) as response:
                status = response.status
        except aiohttp.ClientConnectorError as error:
            if is_own_fault(error):
                _log.error("engine %s cannot be checked: %s", engine.name, error)
                return
            self.gone(engine, f"health check: {error}")
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            if isinstance(error, asyncio.TimeoutError) and self._late_at >= began:
                _log.warning(
                    "engine %s could not be checked in time: the router itself is too busy", engine.name
                )
                return
            self._failed(engine, f"health check: {type(error).__name__}")
        else:
            if status == 200:
                self._well(engine)
            else:
                self._failed(engine, f"health check: status {status}")

    def suspect(self, engine: EngineState) -> None:
        """Check an engine now, since a request to it failed: the check, not the request, says whether it is down."""
        if engine.name not in self._suspects:
            self._suspects[engine.name] = task = asyncio.ensure_future(self._check(engine))
            task.add_done_callback(lambda _: self._suspects.pop(engine.name, None))

    def _failed(self, engine: EngineState, reason: str) -> None:
        engine.failures += 1
        engine.last_failure = reason
        if engine.up and engine.failures >= self._config.failures:
            engine.up = False
            _log.warning("engine %s is down: %s", engine.name, reason)
            for leave in list(engine.leaving):
                leave()

    def gone(self, engine: EngineState, reason: str) -> None:
        """Take an engine that refuses connections for down at once."""
        engine.failures = max(engine.failures, self._config.failures - 1)
        self._gone.add(engine.name)
        self._failed(engine, reason)

    def _well(self, engine: EngineState) -> None:
        engine.failures = 0
        if engine.name in self._gone:
            self._gone.discard(engine.name)
            self._came_back(engine)
        if not engine.up:
            engine.up = True
            _log.warning("engine %s is up", engine.name)
