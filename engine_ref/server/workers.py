"""Runs calls that may take long, such as a tokenizer's, beside the event loop; no exit waits for one.

An executor's threads are joined when the interpreter ends, however long they take. These are not: once closed, who
waits for a call is answered at once, and what still works is left to itself.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from .errors import not_running

__all__ = ["Workers"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Workers:
    """At most `size` threads, started as they are needed. Belongs to one event loop."""

    def __init__(self, size: int | None = None) -> None:
        self._size = size or min(32, (os.cpu_count() or 1) + 4)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = 0
        self._waiting: set[asyncio.Future[Any]] = set()
        self._lock = threading.Lock()
        self._working = 0
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether a call is at work or queued."""
        return self._working > 0

    async def run(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Return what a call returns, or raise what it raises; ApiError once closed."""
        if self._closed:
            raise not_running()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()

        def answer(value: _T | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(value)  # type: ignore[arg-type]
            else:
                future.set_exception(error)

        def work() -> None:
            value, error = None, None
            try:
                if not future.done():
                    value = call(*args, **kwargs)
            except BaseException as raised:  # it is told to who asked, whatever it is
                error = raised
            with self._lock:
                self._working -= 1
            try:
                loop.call_soon_threadsafe(answer, value, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return

        with self._lock:
            self._working += 1
            start = self._threads < min(self._working, self._size)
            self._threads += start
        self._calls.put(work)
        if start:
            threading.Thread(target=self._serve, name="server-worker", daemon=True).start()
        self._waiting.add(future)
        try:
            return await future
        finally:
            self._waiting.discard(future)

    def close(self) -> None:
        """Answer who waits that the server is ending, and let idle threads end; call it in the loop."""
        if not self._closed:
            self._closed = True
            for _ in range(self._threads):
                self._calls.put(None)
        for future in self._waiting:
            if not future.done():
                future.set_exception(not_running())

    def _serve(self) -> None:
        while (work := self._calls.get()) is not None:
            work()
