"""The engine's thread: steps while there is work, and takes requests, aborts and resets between steps.

Requests are made, and so hashed, by whoever submits them; the step loop never hashes a prompt.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from .core import EngineCore
from .metrics import EngineMetrics
from .request import Request, RequestStatus

__all__ = ["EngineLoop", "Output"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of a request; ``finished``: these are its last."""

    token_ids: tuple[int, ...]
    finished: bool
    status: RequestStatus


class _Listener(Protocol):
    def __call__(self, output: Output, /) -> None: ...


class EngineLoop:
    """Drives one engine core in a thread of its own. Listeners are called from that thread and must not block."""

    def __init__(self, core: EngineCore, metrics: EngineMetrics | None = None) -> None:
        self.core = core
        self.metrics = metrics
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[str, _Listener] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the engine can take requests."""
        return self._thread.is_alive() and not self._closing

    def submit(self, request: Request, listener: _Listener) -> None:
        """Queue a request; `listener` gets its tokens as they come."""

        def add() -> None:
            self.core.add_request(request)
            self._listeners[request.request_id] = listener

        self._inbox.put(add)

    def abort(self, request_id: str) -> None:
        """End a request whose client is gone; a finished one is passed over."""

        def end() -> None:
            self._listeners.pop(request_id, None)
            for request in self.core.abort([request_id]):
                if self.metrics:
                    self.metrics.observe_finished(request)

        self._inbox.put(end)

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> Future[bool]:
        """Reset between two steps; the future holds whether it was done."""

        def reset() -> bool:
            done = self.core.reset_prefix_cache(reset_running_requests=reset_running_requests)
            if done:
                self.core.publish_events()
                if self.metrics:
                    self.metrics.hit_rate.reset()
            return done

        return self._call(reset)

    def close(self, *, timeout: float = 10.0) -> bool:
        """Abort what still runs, publish what is queued and stop; returns whether it did within `timeout` seconds."""
        self._closing = True
        self._inbox.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _call(self, function: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def _run(self) -> None:
        while self._take_inbox():
            if self.core.has_work:
                self._step()
        self.core.abort(list(self.core.scheduler.requests))
        self.core.publish_events()
        for listener in self._listeners.values():
            listener(Output((), True, RequestStatus.FINISHED_ABORTED))

    def _take_inbox(self) -> bool:
        """Do what was asked for; wait for it while there is nothing to step. False: stop."""
        wait = not self.core.has_work
        while True:
            try:
                job = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if job is None:
                return False
            wait = False
            try:
                job()
            except Exception:
                _log.exception("an operation on the engine failed")

    def _step(self) -> None:
        result = self.core.step()
        ended = {request.request_id: request for request in result.finished}
        for request_id, token_ids in result.tokens.items():
            listener = self._listeners.get(request_id)
            request = ended.get(request_id)
            status = request.status if request else RequestStatus.RUNNING
            if listener and (token_ids or request):
                listener(Output(tuple(token_ids), request is not None, status))
        for request_id, request in ended.items():
            self._listeners.pop(request_id, None)
            if self.metrics:
                self.metrics.observe_finished(request)
        if self.metrics:
            self.metrics.observe_step(self.core.scheduler, sum(map(len, result.tokens.values())))
