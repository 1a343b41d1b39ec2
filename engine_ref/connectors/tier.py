"""What every tier does alike: keep pages under their block hash, say what it dropped, and count."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from typing import ClassVar

__all__ = ["Breaker", "Tier"]

_log = logging.getLogger(__name__)


class Tier(ABC):
    """A store of pages.

    A key is a `BlockHashWithGroupId`. No method raises for what the store does (it is full, broken, away): that is a
    miss, counted in ``counters`` and logged when it begins. Methods may be called from several threads.
    """

    #: How its events name it.
    medium: ClassVar[str]
    #: How metrics name what comes from it.
    source: ClassVar[str]
    #: Where it is, seen from the engine.
    locality: ClassVar[str] = "LOCAL"
    #: Whether `contains` and `get` are quick enough for the engine's own thread.
    fast: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.counters: Counter[str] = Counter()
        # What came and went, in order, and has not been told yet.
        self._changes: deque[tuple[bytes, bool]] = deque()

    @abstractmethod
    def bind(self, fingerprint: bytes) -> list[bytes]:
        """Take the digest of the runner's fingerprint and return the keys that are there already, if it can tell."""

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return those of the keys that are there."""

    @abstractmethod
    def get(self, key: bytes) -> bytes | None:
        """Return a page, or None."""

    @abstractmethod
    def put(self, key: bytes, page: bytes) -> bool | None:
        """Keep a page; False if it was there already, None if it could not be kept."""

    @abstractmethod
    def clear(self) -> bool:
        """Drop every page of this fingerprint; False if that could not be done."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Let go of files and sockets."""

    def take_changes(self) -> list[tuple[bytes, bool]]:
        """Return what came (True) and went (False) since the last call, in order."""
        changes: list[tuple[bytes, bool]] = []
        while self._changes:
            changes.append(self._changes.popleft())
        return changes


class Breaker:
    """Leaves a store that fails alone for a while, twice as long each time, and logs when that begins and ends."""

    def __init__(self, name: str, *, first: float = 0.25, longest: float = 30.0) -> None:
        self._name = name
        self._first, self._longest = first, longest
        self._pause = 0.0
        self._until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the store is to be left alone now."""
        return self._pause > 0 and time.monotonic() < self._until

    @property
    def is_degraded(self) -> bool:
        """Whether the last attempt failed."""
        return self._pause > 0

    def failed(self, error: BaseException) -> None:
        """Hear that an attempt failed."""
        if not self._pause:
            _log.warning("%s does not answer; going on without it: %s", self._name, error)
        self._pause = min(self._pause * 2 or self._first, self._longest)
        self._until = time.monotonic() + self._pause

    def worked(self) -> None:
        """Hear that an attempt succeeded."""
        if self._pause:
            _log.warning("%s answers again", self._name)
            self._pause = 0.0
