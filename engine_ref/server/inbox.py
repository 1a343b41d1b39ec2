"""Brings the engines' step reports into one event loop, in order, and lets no engine run far ahead of its reader.

An engine can step faster than a loop can tell its clients. Were every report a callback of its own, the loop's turns
would grow with what has piled up, and in between it would answer nobody. Here a turn takes reports until it has used
its share of time or outputs, everything else then has its turn, and an engine that is `LIMIT` reports ahead waits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from ..report import StepReport

__all__ = ["LIMIT", "TURN_OUTPUTS", "ReportInbox"]

_log = logging.getLogger(__name__)

#: Reports that may wait to be taken before the thread that brings one more has to wait.
LIMIT = 64
#: Outputs after which a turn takes no further report: those of a step of many requests, or of many steps of a few.
TURN_OUTPUTS = 512
#: Seconds after which it takes none either, where outputs are dear: the text of each may be searched for stop strings.
_TURN_S = 0.005
#: Seconds between two looks at whether the loop is still there, for one that waits.
_LOOK_S = 1.0


class ReportInbox:
    """Hands reports to `take`, which is called in the loop that `open` was called in."""

    def __init__(self, take: Callable[[StepReport], None]) -> None:
        self._take = take
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: int | None = None
        self._reports: deque[StepReport] = deque()
        self._scheduled = self._closed = False
        self._changed = threading.Condition()

    def open(self) -> None:
        """Begin to hand out; what was put before comes first."""
        with self._changed:
            self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
            self._schedule()

    def close(self) -> None:
        """Let nobody wait any more: the loop may be about to wait for the engines."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def put(self, report: StepReport) -> None:
        """Add a report, from any thread; waits while `LIMIT` reports are not taken, unless it is the loop's own."""
        with self._changed:
            if threading.get_ident() != self._thread:
                while len(self._reports) >= LIMIT and not self._nobody_reads():
                    self._changed.wait(_LOOK_S)
            self._reports.append(report)
            self._schedule()

    def _nobody_reads(self) -> bool:
        return self._closed or (self._loop is not None and self._loop.is_closed())

    def _schedule(self) -> None:
        if self._scheduled or self._loop is None or not self._reports:
            return
        try:
            self._loop.call_soon_threadsafe(self._hand_out)
        except RuntimeError:  # the loop is closed: nobody reads any more
            self._closed = True
            self._reports.clear()
        else:
            self._scheduled = True

    def _hand_out(self) -> None:
        until, outputs = time.monotonic() + _TURN_S, 0
        # What comes meanwhile belongs to a later turn: an engine in a hurry must not make this one longer.
        for _ in range(len(self._reports)):
            with self._changed:
                report = self._reports.popleft()
            try:
                self._take(report)
            except Exception:  # the reports behind it belong to others
                _log.exception("a report of rank %d could not be taken in", report.rank)
            outputs += len(report.outputs)
            if outputs >= TURN_OUTPUTS or time.monotonic() >= until:
                break
        with self._changed:
            self._scheduled = False
            self._schedule()
            self._changed.notify_all()
