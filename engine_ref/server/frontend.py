"""What stands between HTTP and the engines: chooses a rank, hands tokens to who waits for them, keeps the metrics.

It lives in one event loop. Engines report from threads of their own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import msgspec

from ..metrics import EngineMetrics
from ..report import EngineRequest, EngineStats, Output, StepReport
from ..sampling import TokenLogprobs
from .errors import ApiError, bad_request, not_running
from .inbox import ReportInbox
from .workers import Workers

__all__ = ["Frontend", "Generation", "Rank"]

_log = logging.getLogger(__name__)


class Rank(Protocol):
    """One engine, in this process or in another."""

    def wait_ready(self) -> None:
        """Wait until its sockets are open; raises UsageError where they cannot be."""

    def start(self) -> None:
        """Begin to work."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""

    def abort(self, request_id: str) -> None:
        """End a request."""

    def reset_prefix_cache(self, *, reset_running_requests: bool, reset_external: bool) -> Future[bool]:
        """Reset the cache between two steps."""
        ...

    def close(self, *, timeout: float) -> bool:
        """Publish every queued event and stop."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it can take requests."""
        ...

    @property
    def endpoints(self) -> tuple[str | None, str | None]:
        """Where its events and replays are."""
        ...


class Generation:
    """The tokens of one request as they come. ``whole``: wake the reader only when all are there."""

    def __init__(self, request: EngineRequest, rank: int, *, whole: bool) -> None:
        self.request = request
        self.rank = rank
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_cached_tokens = 0
        self.error: str | None = None
        self.refused = self.stopped = False
        #: Gets tokens as they come, and returns the stop string that has ended their text, if one has.
        self.find_stop: Callable[[Sequence[int]], str | None] | None = None
        self.arrived = time.monotonic()
        self.last_output = 0.0
        #: Whether the reader has all of it.
        self.ended = False
        self.logprobs: list[TokenLogprobs | None] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._whole = whole
        self._read = 0
        self._ready = asyncio.Event()

    @property
    def finished(self) -> bool:
        """Whether no more tokens come."""
        return self.finish_reason is not None

    def take(self, output: Output) -> bool:
        """Take in what the engine gave; returns whether a stop string has ended it, which the engine cannot know."""
        self.token_ids += output.token_ids
        self.num_cached_tokens = output.num_cached_tokens
        self.stop_reason = output.stop_reason
        if output.logprobs is not None:
            self.logprobs += output.logprobs
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.error, self.refused, self.stopped = output.error, output.refused, output.stopped
        self.finish_reason = output.finish_reason
        stop = self.find_stop(output.token_ids) if self.find_stop and output.token_ids else None
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        if self.finished or not self._whole:
            self._ready.set()
        return stop is not None

    async def next(self) -> list[int]:
        """Wait for more; returns the tokens since the last call. Raises ApiError when the engine failed."""
        await self._ready.wait()
        self._ready.clear()
        if self.finish_reason == "error":
            if self.refused:
                raise bad_request(self.error or "the request cannot be served")
            if self.stopped:
                raise not_running(self.error)
            raise ApiError(self.error or "Internal server error", status=500, kind="InternalServerError")
        new = self.token_ids[self._read :]
        self._read = len(self.token_ids)
        self.ended = self.finished
        return new


class Frontend:
    """Serves requests with the ranks that `make_rank` makes: it gets the rank's number and where reports go."""

    def __init__(
        self, make_rank: Callable[[int, Callable[[StepReport], None]], Rank], metrics: EngineMetrics
    ) -> None:
        self.metrics = metrics
        #: Where requests are made of bodies; draining lets nobody wait for them.
        self.workers = Workers()
        self._inbox = ReportInbox(self._take)
        self._generations: dict[str, Generation] = {}
        #: Requests whose texts have ended: however the engine ends them, that is why.
        self._stopped_by_text: set[str] = set()
        self._in_flight = [0] * len(metrics.ranks)
        self._draining = False
        self._idle = asyncio.Event()
        self.ranks: list[Rank] = []
        try:
            for rank in range(len(metrics.ranks)):
                self.ranks.append(make_rank(rank, self._inbox.put))
            for made in self.ranks:
                made.wait_ready()
        except BaseException:
            for made in self.ranks:
                made.close(timeout=0.1)
            raise

    def start(self) -> None:
        """Start the engines; reports come to the running event loop."""
        self._inbox.open()
        for rank in self.ranks:
            rank.start()

    @property
    def alive(self) -> bool:
        """Whether every engine can take requests."""
        return not self._draining and all(rank.alive for rank in self.ranks)

    def submit(self, request: EngineRequest, *, rank: int | None = None, whole: bool = False) -> Generation:
        """Give a request to `rank`, or to the one with the fewest; raises ApiError."""
        if not self.alive:
            raise not_running()
        if request.request_id in self._generations:
            raise ApiError(f"a request {request.request_id!r} is running already", param="request_id")
        chosen = min(range(len(self.ranks)), key=self._in_flight.__getitem__) if rank is None else rank
        if not 0 <= chosen < len(self.ranks):
            raise ApiError(f"there is no data-parallel rank {chosen}; there are {len(self.ranks)}")
        generation = Generation(request, chosen, whole=whole)
        self._generations[request.request_id] = generation
        self._in_flight[chosen] += 1
        self.ranks[chosen].add(request)
        return generation

    def leave(self, generation: Generation) -> None:
        """Say that nobody reads a generation any more: the engine ends it, unless it has ended."""
        if not generation.finished:
            self.ranks[generation.rank].abort(generation.request.request_id)
            self._forget(generation)

    async def stream(self, generation: Generation) -> AsyncIterator[list[int]]:
        """Yield the tokens as they come; leaving early ends the request."""
        try:
            while not generation.ended:
                yield await generation.next()
        finally:
            self.leave(generation)

    async def reset_prefix_cache(self, *, reset_running_requests: bool, reset_external: bool) -> bool:
        """Reset every rank; True when all did. Raises ApiError when an engine is not there any more."""
        if not self.alive:
            raise not_running()
        futures = [
            rank.reset_prefix_cache(
                reset_running_requests=reset_running_requests, reset_external=reset_external
            )
            for rank in self.ranks
        ]
        done = await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
        if not self.alive:
            raise not_running()
        return all(each is True for each in done)

    def log_stats(self) -> None:
        """Write the log line of each rank that did something."""
        for rank, metrics in enumerate(self.metrics.ranks):
            line = metrics.line()
            if line is not None:
                _log.info("Engine %03d: %s", rank, line)

    async def drain(self, timeout: float) -> None:
        """Take no more requests, wait for those under way for `timeout` seconds, and end the rest."""
        self._draining = True
        self.workers.close()  # what becomes a request only now would be refused
        if self._generations and timeout > 0:
            _log.info("waiting for %d requests for up to %g s", len(self._generations), timeout)
            try:
                await asyncio.wait_for(self._wait_until_idle(), timeout)
            except asyncio.TimeoutError:
                _log.warning("%d requests did not end in time", len(self._generations))
        for generation in list(self._generations.values()):
            self.ranks[generation.rank].abort(generation.request.request_id)

    async def _wait_until_idle(self) -> None:
        while self._generations:
            self._idle.clear()
            await self._idle.wait()

    def close(self, *, timeout: float = 10.0) -> bool:
        """Stop the engines; returns whether each published all its events."""
        self._draining = True
        self._inbox.close()
        closed = [rank.close(timeout=timeout) for rank in self.ranks]
        return all(closed)

    def _forget(self, generation: Generation) -> None:
        if self._generations.pop(generation.request.request_id, None) is not None:
            self._in_flight[generation.rank] -= 1
            if not self._generations:
                self._idle.set()

    def _take(self, report: StepReport) -> None:
        self._take_outputs(report.rank, report.outputs)
        if self._stopped_by_text:
            self._name_stops(report.stats)
        self.metrics.observe(report.rank, report.stats)

    def _name_stops(self, stats: EngineStats) -> None:
        for i, request in enumerate(stats.finished):
            if request.request_id in self._stopped_by_text:
                self._stopped_by_text.discard(request.request_id)
                stats.finished[i] = msgspec.structs.replace(request, reason="stop")

    def _take_outputs(self, rank: int, outputs: Sequence[Output]) -> None:
        now = time.monotonic()
        for output in outputs:
            generation = self._generations.get(output.request_id)
            if generation is None:
                continue
            if output.token_ids:
                first = not generation.token_ids
                self.metrics.observe_times(
                    rank,
                    first_token=now - generation.arrived if first else None,
                    between=None if first else now - generation.last_output,
                )
                generation.last_output = now
            if generation.take(output):
                self._stopped_by_text.add(output.request_id)
                if output.finish_reason is None:
                    self.ranks[rank].abort(output.request_id)
            if generation.finished:
                self.metrics.observe_times(rank, whole=now - generation.arrived)
                self._forget(generation)
