"""A tier in host memory: the pages used last, up to a number of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from .tier import Tier

__all__ = ["HostTier"]


class HostTier(Tier):
    """Keeps at most `max_bytes` bytes of pages; the one unused for longest goes first."""

    medium = "CPU"
    source = "host"
    fast = True

    def __init__(self, *, max_bytes: int, name: str = "host") -> None:
        super().__init__(name)
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._pages: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def bind(self, fingerprint: bytes) -> list[bytes]:
        """Nothing is there: the memory is the engine's own."""
        del fingerprint
        return []

    def contains(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return the keys that are there."""
        with self._lock:
            return {key for key in keys if key in self._pages}

    def get(self, key: bytes) -> bytes | None:
        """Return a page, which becomes the last to go."""
        with self._lock:
            page = self._pages.get(key)
            if page is None:
                self.counters["misses"] += 1
                return None
            self._pages.move_to_end(key)
            self.counters["hits"] += 1
            return page

    def put(self, key: bytes, page: bytes) -> bool | None:
        """Keep a page; one that is there becomes the last to go."""
        with self._lock:
            if key in self._pages:
                self._pages.move_to_end(key)
                return False
            if len(page) > self.max_bytes:
                self.counters["too_large"] += 1
                return None
            self._pages[key] = page
            self.num_bytes += len(page)
            self.counters["stores"] += 1
            self._changes.append((key, True))
            while self.num_bytes > self.max_bytes:
                old, dropped = self._pages.popitem(last=False)
                self.num_bytes -= len(dropped)
                self.counters["evictions"] += 1
                self._changes.append((old, False))
            return True

    def clear(self) -> bool:
        """Drop every page."""
        with self._lock:
            self._changes.extend((key, False) for key in self._pages)
            self._pages.clear()
            self.num_bytes = 0
            return True
