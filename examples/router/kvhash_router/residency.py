"""What the router needs of a residency index, and a guard around it that takes a store's failures for ignorance.

The index is `kvhash.index`'s: in this process, or in a store that several routers share. Whatever the store does, a
lookup answers: with what is known, or that nothing is.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvhash import KvHashError
from kvhash.block_hash import ChainValue
from kvhash.events.records import Record
from kvhash.index import EngineSettings, PrefixMatch
from kvhash.index import Knowledge as IndexKnowledge

from .decision import Knowledge

__all__ = ["Known", "Residency", "ResidencyIndex", "StoreUnavailableError"]

_log = logging.getLogger(__name__)


class ResidencyIndex(Protocol):
    """The part of `kvhash.index.ResidencyIndex` that is used here."""

    def configure(self, engine: str, settings: EngineSettings) -> None:
        """Tell what events do not say of an engine."""
        ...

    def apply_record(self, engine: str, record: Any) -> Any:
        """Take in a record of a subscriber: a batch, or what it noticed between batches."""
        ...

    def longest_prefix(
        self,
        hashes: Sequence[ChainValue],
        engines: Collection[str] | None = None,
        *,
        num_tokens: int | None = None,
    ) -> Mapping[str, PrefixMatch]:
        """Return by engine how much of the chain it holds."""
        ...

    def knowledge(self, engine: str) -> IndexKnowledge:
        """Return the state of knowledge of an engine."""
        ...

    def remove(self, engine: str) -> Any:
        """Forget an engine."""
        ...

    def stats(self) -> Any:
        """Return counts."""
        ...


class Store(Protocol):
    """What an index that routers share has besides."""

    def hold(self, engine: str) -> bool:
        """Take or keep the right to write for an engine."""
        ...

    def lost(self, engine: str) -> bool:
        """Return whether the store has lost what this router wrote for an engine."""
        ...

    def release(self, engine: str) -> None:
        """Give it up."""
        ...

    def begin(self, engine: str, *, forget: bool) -> None:
        """Begin to write for an engine, from the start of its stream."""
        ...


class StoreUnavailableError(KvHashError):
    """The store behind the index does not answer."""

    code = "store-unavailable"


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of an engine's cache, since when (seconds since the epoch, None: always) and why not exactly."""

    knowledge: Knowledge
    reason: str | None = None
    since: float | None = None


class Residency:
    """An index that may be called from any thread and whose store may fail.

    After StoreUnavailableError, lookups give nothing for ``backoff_s`` without asking the store, so that one that hangs
    does not hold up requests. ``store``: the index again, where other routers share it; it may then be called by
    several threads at once, one router at a time writes for an engine, and nothing is dropped when this one ends.
    """

    def __init__(
        self,
        index: ResidencyIndex,
        *,
        backoff_s: float = 0.5,
        store: Store | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._backoff_s = backoff_s
        self._clock = clock
        self._store = store
        self._lock: contextlib.AbstractContextManager[Any] = (
            contextlib.nullcontext() if store is not None else threading.Lock()
        )
        self._down_since: float | None = None
        self._asked_at = 0.0
        self._outages = 0
        self._begun: dict[str, int] = {}
        #: How often the store did not answer.
        self.store_failures = 0

    @property
    def store_down_since(self) -> float | None:
        """When the store stopped answering, in seconds since the epoch; None while it answers."""
        return self._down_since

    def _call(self, function: Callable[[], Any]) -> Any:
        try:
            with self._lock:
                result = function()
        except StoreUnavailableError as error:
            self.store_failures += 1
            self._asked_at = self._clock()
            if self._down_since is None:
                self._down_since = time.time()
                self._outages += 1
                _log.warning("the shared index does not answer, load alone decides: %s", error)
            raise
        if self._down_since is not None:
            _log.warning("the shared index answers again")
            self._down_since = None
        return result

    def configure(self, engine: str, settings: EngineSettings) -> None:
        """Tell what events do not say of an engine; raises StoreUnavailableError."""
        self._call(lambda: self._index.configure(engine, settings))

    def apply_record(self, engine: str, record: Record) -> None:
        """Take in a subscriber's record; raises StoreUnavailableError."""
        self._call(lambda: self._index.apply_record(engine, record))

    def hold(self, engine: str) -> bool:
        """Return whether this router writes for an engine, taking that right where it is free."""
        store = self._store
        return True if store is None else bool(self._call(lambda: store.hold(engine)))

    def lost(self, engine: str) -> bool:
        """Return whether the index no longer holds what this router wrote for an engine.

        A store that is shared can tell; what another index holds after an outage is not known, and counts as lost.
        """
        if self._store is None:
            return self._begun.get(engine) != self._outages
        return self._store.lost(engine)

    def begin(self, engine: str, *, forget: bool) -> None:
        """Begin to write for an engine, from the start of its stream."""
        store = self._store
        self._begun[engine] = self._outages
        self._call(
            lambda: self._index.remove(engine) if store is None else store.begin(engine, forget=forget)
        )

    def end(self, engine: str) -> None:
        """End to write for an engine: forget it, or leave it to the routers that share it."""
        self._begun.pop(engine, None)
        store = self._store
        self._call(lambda: self._index.remove(engine) if store is None else store.release(engine))

    def matches(
        self, hashes: Sequence[ChainValue], num_tokens: int, engines: Collection[str]
    ) -> Mapping[str, PrefixMatch]:
        """Return by engine what it holds of a prompt of `num_tokens`; nothing while the store does not answer."""
        if not hashes or not engines or self._resting():
            return {}
        try:
            matches: Mapping[str, PrefixMatch] = self._call(
                lambda: self._index.longest_prefix(hashes, engines, num_tokens=num_tokens)
            )
        except StoreUnavailableError:
            return {}
        return matches

    def knowledge(self, engine: str) -> Known:
        """Return what the index says of an engine; UNKNOWN while the store does not answer."""
        if not self._resting():
            try:
                return _known(self._call(lambda: self._index.knowledge(engine)))
            except StoreUnavailableError:
                pass
        return Known(Knowledge.UNKNOWN, "store-unavailable", self._down_since)

    def stats(self) -> Any:
        """Return the index's statistics, or None while the store does not answer."""
        if self._resting():
            return None
        try:
            return self._call(self._index.stats)
        except StoreUnavailableError:
            return None

    def _resting(self) -> bool:
        return self._down_since is not None and self._clock() < self._asked_at + self._backoff_s


def _known(value: IndexKnowledge) -> Known:
    return Known(Knowledge(value.state.value), ", ".join(value.reasons) or None, value.since)
