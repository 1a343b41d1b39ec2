"""The asyncio form of the subscriber: the same records, awaited."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any

import zmq
import zmq.asyncio

from ._options import check_seconds
from .records import Record
from .subscriber import Source, SubscriberCore

__all__ = ["AsyncSubscriber"]


class AsyncSubscriber:
    """Iterate it with ``async for``; takes what `kvhash.events.subscriber.Subscriber` takes."""

    def __init__(
        self,
        sources: Source | str | Sequence[Source | str],
        *,
        idle_timeout: float | None = None,
        **options: Any,
    ) -> None:
        if idle_timeout is not None:
            check_seconds("idle_timeout", idle_timeout)
        self._core = SubscriberCore(sources, **options)
        self._idle_timeout = idle_timeout
        self._ready: deque[Record] = deque()

    async def poll(self, timeout: float | None = None) -> Record | None:
        """Return the next record, or None when none is due within `timeout` seconds (None: wait for ever)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ready:
            if self._core.closed:
                return None
            now = time.monotonic()
            self._ready.extend(self._core.step(now))
            if self._ready:
                break
            if deadline is not None and now >= deadline:
                return None
            poller = zmq.asyncio.Poller()
            for socket in self._core.sockets():
                poller.register(socket, zmq.POLLIN)
            await poller.poll(self._core.wait_ms(now, deadline))
        return self._ready.popleft()

    async def __aiter__(self) -> AsyncIterator[Record]:
        """Yield records until closed, or idle for ``idle_timeout`` seconds."""
        while True:
            record = await self.poll(self._idle_timeout)
            if record is None:
                return
            yield record

    def close(self) -> None:
        """Close all sockets and end the iteration."""
        self._core.close()

    async def __aenter__(self) -> AsyncSubscriber:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
