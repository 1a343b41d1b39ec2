"""The engine's thread: steps while there is work, and takes requests, aborts and resets between steps.

Requests come hashed; the step loop never hashes a prompt. What a step gave goes out as one report.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from .core import EngineCore
from .report import EngineStats, FinishedRequest, Output, StepReport
from .request import Request
from .sampling import TokenLogprobs

__all__ = ["EngineLoop"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

#: Seconds between two steps when requests wait for something outside (a remote load) and nothing can be planned.
_IDLE_STEP_S = 0.001
#: Seconds between two looks at what a connector counted while there is nothing to step.
_IDLE_LOOK_S = 0.25


class EngineLoop:
    """Drives one engine core in a thread of its own.

    `deliver` gets a report after each step and each operation that changed something; it is called from that thread
    and may keep it waiting, for a reader that is behind. A step that raises ends the engine: every request gets an
    error, and `alive` is False.
    """

    def __init__(self, core: EngineCore, deliver: Callable[[StepReport], None], *, rank: int = 0) -> None:
        self.core = core
        self._deliver = deliver
        self._rank = rank
        # What is to be done, and what is done instead once the thread has ended.
        self._inbox: queue.SimpleQueue[tuple[Callable[[], None], Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._ended = False
        self._lock = threading.Lock()
        self._counted = _Counted()
        self._begun: set[str] = set()
        self._idle = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"engine-core-{rank}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the engine can take requests."""
        return self._thread.is_alive() and not self._closing

    def submit(self, request: Request) -> None:
        """Queue a request."""

        def add() -> None:
            try:
                self.core.add_request(request)
            except ValueError as error:  # its id is taken
                self._report([_error(request.request_id, str(error))])

        self._put(add, lambda: self._answer_stopped([request.request_id]))

    def abort(self, request_id: str) -> None:
        """End a request whose client is gone; a finished one is passed over."""

        def end() -> None:
            ended = self.core.abort([request_id])
            self._report([self._output(request, []) for request in ended], ended)

        self._put(end, lambda: None)

    def refuse(self, request_id: str, message: str) -> None:
        """Answer a request that could not be made with an error."""
        self._put(
            lambda: self._report([_error(request_id, message, refused=True)]),
            lambda: self._answer_stopped([request_id]),
        )

    def reset_prefix_cache(
        self, *, reset_running_requests: bool = False, reset_external: bool = False
    ) -> Future[bool]:
        """Reset between two steps; the future holds whether it was done."""

        def reset() -> bool:
            done = self.core.reset_prefix_cache(
                reset_running_requests=reset_running_requests, reset_external=reset_external
            )
            self.core.publish_events()
            self._report([], cache_reset=done)
            return done

        return self.call(reset)

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Run a function between two steps, in the engine's thread; the future holds what it returned.

        Once the thread has ended it holds a RuntimeError.
        """
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._put(run, lambda: future.set_exception(RuntimeError("the engine has stopped")))
        return future

    def close(self, *, timeout: float = 10.0) -> bool:
        """Abort what still runs, hand over its events and stop; returns whether it did within `timeout` seconds."""
        self._closing = True
        self._inbox.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _put(self, job: Callable[[], None], otherwise: Callable[[], None]) -> None:
        with self._lock:
            if not self._ended:
                self._inbox.put((job, otherwise))
                return
        otherwise()

    def _answer_stopped(self, request_ids: Sequence[str], message: str = "the engine has stopped") -> None:
        outputs = [_error(request_id, message, stopped=True) for request_id in request_ids]
        self._deliver(StepReport(self._rank, outputs, EngineStats()))

    def _run(self) -> None:
        try:
            self._drive()
        finally:  # nobody waits for an answer that does not come
            self._closing = True
            with self._lock:
                self._ended = True
            while not self._inbox.empty():
                if (left := self._inbox.get()) is not None:
                    left[1]()

    def _drive(self) -> None:
        try:
            while self._take_inbox():
                if self.core.has_work:
                    self._step()
                elif self._counted.connector_changed(self.core):  # by its own threads
                    self._report([])
        except Exception:
            _log.exception("the engine of rank %d failed and has stopped", self._rank)
            self._closing = True
            self._answer_stopped(list(self.core.scheduler.requests), "the engine failed")
            try:
                self.core.close()
            except Exception:
                _log.exception("what the engine of rank %d was saving is lost", self._rank)
            return
        ended = self.core.abort(list(self.core.scheduler.requests))
        self.core.close()
        self._report([self._output(request, []) for request in ended], ended)

    def _take_inbox(self) -> bool:
        """Do what was asked for; wait for it while there is nothing to step. False: stop."""
        wait: float | None = _IDLE_STEP_S if self._idle else 0.0
        if not self.core.has_work:
            wait = None if self.core.connector is None else _IDLE_LOOK_S
        while True:
            try:
                job = self._inbox.get(block=wait != 0.0, timeout=wait)
            except queue.Empty:
                return True
            if job is None:
                return False
            wait = 0.0
            try:
                job[0]()
            except Exception:
                _log.exception("an operation on the engine failed")

    def _step(self) -> None:
        requests = self.core.scheduler.requests
        result = self.core.step()
        self._idle = not result.tokens
        ended = {request.request_id: request for request in result.finished}
        outputs = []
        for request_id, token_ids in result.tokens.items():
            request = ended.get(request_id) or requests.get(request_id)
            if request is not None and (token_ids or request_id in ended):
                outputs.append(self._output(request, token_ids))
        if result.tokens or ended:
            self._report(outputs, list(ended.values()))

    def _output(self, request: Request, token_ids: list[int]) -> Output:
        return Output(
            request.request_id,
            token_ids,
            request.status.value if request.status.is_finished else None,
            request.stop_reason,
            request.num_cached_tokens,
            request.error,
            logprobs=_logprobs(request, token_ids),
            prompt_logprobs=_prompt_logprobs(request, token_ids),
        )

    def _report(
        self, outputs: list[Output], ended: Sequence[Request] = (), *, cache_reset: bool = False
    ) -> None:
        stats = self._counted.since_last(self.core, cache_reset=cache_reset)
        for output in outputs:
            stats.generation_tokens += len(output.token_ids)
            if output.token_ids and output.request_id not in self._begun:
                self._begun.add(output.request_id)
                self._count_prompt(stats, output.request_id, ended)
        for request in ended:
            self._begun.discard(request.request_id)
            stats.preemptions += self._counted.forget(request)
            stats.finished.append(
                FinishedRequest(
                    request.num_prompt_tokens,
                    request.num_output_tokens,
                    request.max_tokens,
                    request.num_preemptions,
                    request.status.value,
                    request.request_id,
                )
            )
        self._deliver(StepReport(self._rank, outputs, stats))

    def _count_prompt(self, stats: EngineStats, request_id: str, ended: Sequence[Request]) -> None:
        """Count a prompt when its first token is out, by where its KV came from."""
        request = self.core.scheduler.requests.get(request_id) or next(
            (request for request in ended if request.request_id == request_id), None
        )
        if request is not None:
            stats.prompt_tokens += request.num_prompt_tokens
            stats.external_prompt_tokens += request.num_external_tokens
            stats.local_prompt_tokens += request.num_cached_tokens - request.num_external_tokens


class _Counted:
    """What was reported already of the scheduler's running totals."""

    def __init__(self) -> None:
        self._seen = (0,) * 6
        self._sources: dict[str, int] = {}
        self._preemptions: dict[str, int] = {}
        self._connector: dict[tuple[str, str], int] = {}

    def since_last(self, core: EngineCore, *, cache_reset: bool) -> EngineStats:
        scheduler = core.scheduler
        cache = scheduler.cache
        local, remote = cache.stats, scheduler.remote.stats
        now = (local.requests, local.queries, local.hits, remote.requests, remote.queries, remote.hits)
        new = [a - b for a, b in zip(now, self._seen, strict=True)]
        self._seen = now
        sources = scheduler.remote.hits_by_source
        by_source = {name: count - self._sources.get(name, 0) for name, count in sources.items()}
        self._sources = dict(sources)
        stats = EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.requests) - len(scheduler.running),
            kv_cache_usage=cache.pool.usage,
            requests=new[0],
            queries=new[1],
            hits=new[2],
            external_requests=new[3],
            external_queries=new[4],
            external_hits=new[5],
            external_hits_by_source=by_source,
            cache_reset=cache_reset,
            connector=self._connector_news(core),
        )
        running_lora: set[str] = set()
        waiting_lora: set[str] = set()
        running = set(map(id, scheduler.running))
        for request in scheduler.requests.values():
            if request.num_preemptions:
                known = self._preemptions.get(request.request_id, 0)
                stats.preemptions += request.num_preemptions - known
                self._preemptions[request.request_id] = request.num_preemptions
            lora = request.lora
            if lora is not None and lora.name is not None:
                (running_lora if id(request) in running else waiting_lora).add(lora.name)
        stats.running_lora, stats.waiting_lora = sorted(running_lora), sorted(waiting_lora)
        return stats

    def _connector_news(self, core: EngineCore) -> dict[str, dict[str, int]]:
        news: dict[str, dict[str, int]] = {}
        for part, counters in core.connector_stats().items():
            for name, count in counters.items():
                if more := count - self._connector.get((part, name), 0):
                    self._connector[part, name] = count
                    news.setdefault(part, {})[name] = more
        return news

    def connector_changed(self, core: EngineCore) -> bool:
        """Whether a connector has counted something that was not reported."""
        return any(
            count != self._connector.get((part, name), 0)
            for part, counters in core.connector_stats().items()
            for name, count in counters.items()
        )

    def forget(self, request: Request) -> int:
        """Return the preemptions of a request that ended that were not counted yet."""
        return request.num_preemptions - self._preemptions.pop(request.request_id, 0)


def _logprobs(request: Request, token_ids: list[int]) -> list[TokenLogprobs | None] | None:
    if request.sampling.logprobs is None or not request.logprobs:
        return None
    end = request.num_tokens
    return [request.logprobs.get(position) for position in range(end - len(token_ids), end)]


def _prompt_logprobs(request: Request, token_ids: list[int]) -> list[TokenLogprobs | None] | None:
    """Return them with the first output; the first token of a prompt has none."""
    first = 0 < len(token_ids) == request.num_output_tokens
    if request.sampling.prompt_logprobs is None or not request.logprobs or not first:
        return None
    return [request.logprobs.get(position) for position in range(request.num_prompt_tokens)]


def _error(request_id: str, message: str, *, refused: bool = False, stopped: bool = False) -> Output:
    return Output(request_id, [], "error", error=message, refused=refused, stopped=stopped)
