"""Follows one engine's events into the index, in a thread of its own, for as long as the engine is routed to.

It begins with a replay from the start, so an engine that ran before the router did is known too; what its buffer no
longer holds is a loss, and the engine's knowledge degraded. It begins again, from nothing, when the engine's process
was gone and is back, and when a store that did not answer does, or that lost what it held.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import Any

import zmq

from kvhash import KvHashError
from kvhash.events.records import Batch, Record, Restart
from kvhash.events.subscriber import Subscriber
from kvhash.index import EngineSettings

from .config import EngineConfig, ModelConfig
from .decision import Knowledge
from .residency import Known, Residency, StoreUnavailableError
from .verifying import EngineVerifier, Verification

__all__ = ["EngineFollower"]

_log = logging.getLogger(__name__)
#: Seconds between two looks at who writes into the index and whether it lost anything; well within a lease.
_LEASE_CHECK_S = 0.5
#: A replay that has brought nothing for so many seconds is over.
_PAUSE_S = 0.5


class EngineFollower:
    """The residency of one engine, kept up to date. ``after``: a former follower of that name, which must end first."""

    def __init__(
        self,
        engine: EngineConfig,
        model: ModelConfig,
        residency: Residency,
        *,
        context: zmq.Context[Any],
        after: EngineFollower | None = None,
        retry_s: float = 0.5,
    ) -> None:
        self.engine = engine
        self._residency = residency
        self._context = context
        self._retry_s = retry_s
        self._after = after
        self._verifier = EngineVerifier(model)
        self._settings = EngineSettings(
            tokens_per_hash=model.hash.hasher().span,
            use_eagle=model.use_eagle,
            offload_chunk_blocks=model.offload_chunk_blocks,
        )
        self._stop = threading.Event()
        self._again = threading.Event()
        self._forget = False
        self._replaying_until = 0.0
        self._thread: threading.Thread | None = None
        self._fault: tuple[str, float] | None = None
        #: How many records of each kind came, by their name.
        self.records: Counter[str] = Counter()
        #: When the last record came, by time.time(); None before the first.
        self.last_record_at: float | None = None
        if engine.events is not None:
            self._thread = threading.Thread(target=self._run, name=f"follow-{engine.name}", daemon=True)
            self._thread.start()

    def begin_again(self) -> None:
        """Forget what is known of the engine and read its events from the start."""
        self._forget = True
        self._again.set()

    def stop(self) -> None:
        """Ask the thread to end, which it does within half a second; it forgets the engine."""
        self._stop.set()

    def join(self, timeout: float = 5.0) -> None:
        """Wait for the thread's end."""
        if self._thread is not None:
            self._thread.join(timeout)

    @property
    def running(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread is not None and self._thread.is_alive()

    def known(self, adapter: str | None) -> Known:
        """Return what is known of the engine's cache for requests of `adapter`."""
        if self._thread is None:
            return Known(Knowledge.UNKNOWN, "no-events: the engine has no events endpoint")
        if self._fault is not None:
            return Known(Knowledge.UNKNOWN, *self._fault)
        fault = self._verifier.state().fault(adapter)
        if fault is not None:
            return Known(Knowledge.UNKNOWN, fault)
        known = self._residency.knowledge(self.engine.name)
        if known.knowledge is Knowledge.EXACT and self._replaying_until > time.monotonic():
            return Known(Knowledge.DEGRADED, "catching-up: past batches are being replayed")
        return known

    def verification(self) -> Verification:
        """Return how the engine's hashes verify."""
        return self._verifier.state()

    def _run(self) -> None:
        if self._after is not None:
            self._after.join()
            self._after = None
        while not self._stop.is_set():
            try:
                self._follow()
                self._fault = None
            except StoreUnavailableError:
                self._stop.wait(self._retry_s)
            except KvHashError as error:
                self._fail(f"{error.code}: {error}")
            except Exception as error:
                _log.exception("following %s failed", self.engine.name)
                self._fail(f"follower-failed: {error}")
        try:
            self._residency.end(self.engine.name)
        except KvHashError as error:
            _log.warning("engine %s could not be left in the index: %s", self.engine.name, error)

    def _fail(self, reason: str) -> None:
        self._fault = (reason, time.time())
        self._stop.wait(self._retry_s)

    def _follow(self) -> None:
        """Read events until asked to stop or to begin again; raises when the store or the endpoint fails."""
        self._again.clear()
        writing = self._residency.hold(self.engine.name)
        if writing:
            self._residency.begin(self.engine.name, forget=self._forget)
        self._forget = False
        self._residency.configure(self.engine.name, self._settings)
        self._verifier.reset()
        start: Any = "start" if writing else "live"
        with Subscriber(self.engine.sources(), from_seq=start, context=self._context) as subscriber:
            self._fault = None
            held_at = time.monotonic()
            while not self._stop.is_set() and not self._again.is_set():
                record = subscriber.poll(0.25)
                if record is not None:
                    self._take(record, writing)
                if time.monotonic() > held_at + _LEASE_CHECK_S:
                    if self._residency.hold(self.engine.name) != writing:
                        return  # from now on, or no longer, this router writes
                    if writing and self._residency.lost(self.engine.name):
                        _log.warning(
                            "the index lost what engine %s holds, it is read again", self.engine.name
                        )
                        return
                    held_at = time.monotonic()

    def _take(self, record: Record, writing: bool) -> None:
        self.records[type(record).__name__] += 1
        self.last_record_at = time.time()
        if isinstance(record, Batch):
            # Until a live batch follows, or the replay has paused, the index is the engine's past.
            self._replaying_until = time.monotonic() + _PAUSE_S if record.replayed else 0.0
            self._verifier.feed(record.batch)
        elif isinstance(record, Restart):
            self._verifier.reset()
        if writing:
            self._residency.apply_record(self.engine.name, record)
