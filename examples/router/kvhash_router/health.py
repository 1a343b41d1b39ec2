"""Health checks: GET /health of every engine, again and again; says who is down and who is back.

An engine is down after `HealthConfig.failures` failed checks in a row, and at once when it refuses a connection: then
its process is gone, and with it its cache.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import httpx

from .config import HealthConfig
from .fleet import EngineState, Fleet

__all__ = ["HealthChecker"]

_log = logging.getLogger(__name__)


class HealthChecker:
    """Checks a fleet's engines. ``came_back`` is called for an engine whose process was gone and is there again."""

    def __init__(
        self,
        fleet: Fleet,
        client: httpx.AsyncClient,
        config: HealthConfig,
        *,
        came_back: Callable[[EngineState], None],
    ) -> None:
        self._fleet = fleet
        self._client = client
        self._config = config
        self._came_back = came_back
        self._gone: set[str] = set()

    async def run(self) -> None:
        """Check for ever."""
        while True:
            await self.check_all()
            await asyncio.sleep(self._config.interval_s)

    async def check_all(self) -> None:
        """Check every engine once, all at the same time."""
        await asyncio.gather(*(self._check(engine) for engine in list(self._fleet.engines.values())))

    async def _check(self, engine: EngineState) -> None:
        try:
            response = await self._client.get(f"{engine.config.url}/health", timeout=self._config.timeout_s)
        except httpx.ConnectError as error:
            self.gone(engine, str(error) or "connection refused")
        except httpx.HTTPError as error:
            self.failed(engine, f"health check: {type(error).__name__}")
        else:
            if response.status_code == 200:
                self._well(engine)
            else:
                self.failed(engine, f"health check: status {response.status_code}")

    def failed(self, engine: EngineState, reason: str) -> None:
        """Count a failure."""
        engine.failures += 1
        engine.last_failure = reason
        if engine.up and engine.failures >= self._config.failures:
            engine.up = False
            _log.warning("engine %s is down: %s", engine.name, reason)

    def gone(self, engine: EngineState, reason: str) -> None:
        """Take an engine that refuses connections for down at once."""
        engine.failures = max(engine.failures, self._config.failures - 1)
        self._gone.add(engine.name)
        self.failed(engine, reason)

    def _well(self, engine: EngineState) -> None:
        engine.failures = 0
        if engine.name in self._gone:
            self._gone.discard(engine.name)
            self._came_back(engine)
        if not engine.up:
            engine.up = True
            _log.warning("engine %s is up", engine.name)
