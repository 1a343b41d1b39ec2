"""A data-parallel rank in a process of its own, driven over a pipe: requests go in, reports come out.

The process ends when the pipe does, so it never outlives the server, however that ends.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from kvhash import UsageError

from .build import freeze_heap, make_engine
from .engine import Engine
from .options import EngineOptions
from .report import EngineRequest, EngineStats, Output, StepReport

__all__ = ["RankProcess"]

_log = logging.getLogger(__name__)
_START_S = 60.0
#: Seconds between two looks at whether the engine of a process lives.
_WATCH_S = 0.2


class RankProcess:
    """One rank in a child process; its methods are those of `Engine`."""

    def __init__(self, options: EngineOptions, deliver: Callable[[StepReport], None], *, rank: int) -> None:
        self._rank = rank
        self._deliver = deliver
        self._lock = threading.Lock()
        self._resets: dict[int, Future[bool]] = {}
        self._numbers = itertools.count()
        self._requests: set[str] = set()
        self._closed: Future[bool] = Future()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_run, args=(theirs, options, rank, logging.getLogger().level), name=f"engine-rank-{rank}"
        )
        self._process.start()
        theirs.close()
        self.endpoints: tuple[str | None, str | None] = (None, None)
        self._thread = threading.Thread(target=self._read, name=f"engine-rank-{rank}", daemon=True)

    def wait_ready(self) -> None:
        """Wait until the engine's sockets are open; raises UsageError with the child's message where they cannot be."""
        kind, value = self._first_answer()
        if kind != "ready":
            self._process.join(5)
            raise UsageError(f"rank {self._rank}: {value}", code="rank-not-started")
        self.endpoints = value

    def _first_answer(self) -> Any:
        try:
            if self._pipe.poll(_START_S):
                return self._pipe.recv()
        except (EOFError, OSError):
            return "failed", "its process ended at once"
        self._process.kill()
        return "failed", f"its process did not start within {_START_S:g} s"

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()
        self._send("start", None)

    @property
    def alive(self) -> bool:
        """Whether the process can take requests."""
        return self._process.is_alive() and not self._closed.done()

    def add(self, request: EngineRequest) -> None:
        """Queue a request; it is hashed in the rank's process."""
        with self._lock:
            gone = self._closed.done()
            if not gone:
                self._requests.add(request.request_id)
        if gone:
            self._answer_died([request.request_id])
        else:
            self._send("add", request)

    def abort(self, request_id: str) -> None:
        """End a request."""
        self._send("abort", request_id)

    def reset_prefix_cache(
        self, *, reset_running_requests: bool = False, reset_external: bool = False
    ) -> Future[bool]:
        """Reset between two steps; the future holds whether it was done."""
        future: Future[bool] = Future()
        with self._lock:
            number = next(self._numbers)
            self._resets[number] = future
            if self._closed.done():  # nobody will answer
                del self._resets[number]
                future.set_result(False)
        self._send("reset", (number, reset_running_requests, reset_external))
        return future

    def close(self, *, timeout: float = 10.0) -> bool:
        """Publish every queued event and end the process; returns whether all went out in time."""
        done = False
        if not self._thread.is_alive():  # it was never started, or has failed: there is nothing to wait for
            self._pipe.close()
        else:
            self._send("close", timeout)
            with contextlib.suppress(FutureTimeoutError):
                done = self._closed.result(timeout + 5)
        self._process.join(5)
        if self._process.is_alive():
            _log.error("the process of rank %d does not end; it is killed", self._rank)
            self._process.kill()
        return done

    def _send(self, kind: str, value: object) -> None:
        try:
            with self._lock:
                self._pipe.send((kind, value))
        except (OSError, ValueError):  # the process is gone; the reader says so
            return

    def _read(self) -> None:
        while True:
            try:
                kind, value = self._pipe.recv()
            except (EOFError, OSError):
                break
            if kind == "report":
                self._note(value)
                self._deliver(value)
            elif kind == "reset":
                number, done = value
                with self._lock:
                    future = self._resets.pop(number)
                future.set_result(done)
            elif kind == "closed":
                self._closed.set_result(value)
        if not self._closed.done():
            self._fail()

    def _note(self, report: StepReport) -> None:
        with self._lock:
            self._requests -= {output.request_id for output in report.outputs if output.finish_reason}

    def _fail(self) -> None:
        """Answer everything that the process can no longer answer."""
        self._process.join(1)
        _log.error("the engine of rank %d has died (exit code %s)", self._rank, self._process.exitcode)
        self._closed.set_result(False)
        with self._lock:
            lost, self._requests = sorted(self._requests), set()
            resets, self._resets = self._resets, {}
        for future in resets.values():
            future.set_result(False)
        self._answer_died(lost)

    def _answer_died(self, request_ids: Sequence[str]) -> None:
        outputs = [
            Output(request_id, [], "error", error="the engine has died", stopped=True)
            for request_id in request_ids
        ]
        self._deliver(StepReport(self._rank, outputs, EngineStats()))


def _send_reset(send: Callable[[str, object], None], number: int, done: Future[bool]) -> None:
    send("reset", (number, done.exception() is None and done.result()))


def _end_with(engine: Engine, closing: threading.Event) -> None:
    """End the process when its engine fails, so that the server knows."""
    while engine.alive and not closing.wait(_WATCH_S):
        pass
    if not closing.is_set():
        engine.close(timeout=5)
        os._exit(1)


def _run(pipe: Connection, options: EngineOptions, rank: int, log_level: int) -> None:
    """Be a rank: the child's whole life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server's own handling ends this process
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(
        stream=sys.stderr,
        level=log_level,
        format=f"%(levelname)s %(asctime)s [rank {rank} %(name)s] %(message)s",
        datefmt="%m-%d %H:%M:%S",
    )
    sending = threading.Lock()

    def send(kind: str, value: object) -> None:
        with sending:
            try:
                pipe.send((kind, value))
            except OSError:  # the server is gone, and so is this process soon
                return

    try:
        engine = make_engine(options, lambda report: send("report", report), rank=rank)
    except Exception as error:
        send("failed", str(error))
        return
    freeze_heap()
    send("ready", engine.endpoints)
    closing = threading.Event()
    while True:
        try:
            kind, value = pipe.recv()
        except (EOFError, OSError):
            os._exit(1)  # nobody is left to answer
        if kind == "start":
            engine.start()
            threading.Thread(target=_end_with, args=(engine, closing), daemon=True).start()
        elif kind == "add":
            engine.add(value)
        elif kind == "abort":
            engine.abort(value)
        elif kind == "reset":
            number, running, external = value
            future = engine.reset_prefix_cache(reset_running_requests=running, reset_external=external)
            future.add_done_callback(partial(_send_reset, send, number))
        elif kind == "close":
            closing.set()
            send("closed", engine.close(timeout=value))
            return
