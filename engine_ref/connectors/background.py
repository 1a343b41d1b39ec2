"""The threads of a connector: one that saves in order within a bound of bytes, and a few that look up and fetch."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["SaveQueue"]

_log = logging.getLogger(__name__)


class SaveQueue:
    """Hands pages to `save` in a thread of its own. What does not fit in `max_bytes` waiting bytes is refused."""

    def __init__(self, save: Callable[[bytes, bytes], None], *, max_bytes: int) -> None:
        self._save = save
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._pages: deque[tuple[bytes, bytes]] = deque()
        self._busy = False
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kv-save", daemon=True)
        self._thread.start()

    def put(self, key: bytes, page: bytes) -> bool:
        """Queue a page; False if too much waits already."""
        with self._changed:
            if self._closing or self._num_bytes + len(page) > self._max_bytes:
                return False
            self._pages.append((key, page))
            self._num_bytes += len(page)
            self._changed.notify_all()
            return True

    def drop(self, *, timeout: float) -> bool:
        """Forget what waits, and wait for the page being saved; False if that took longer than `timeout` seconds."""
        with self._changed:
            self._pages.clear()
            self._num_bytes = 0
            return self._changed.wait_for(lambda: not self._busy, timeout)

    def flush(self, *, timeout: float) -> bool:
        """Wait until all is saved; False if that took longer than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy and not self._pages, timeout)

    def close(self, *, timeout: float) -> bool:
        """Save what waits, within `timeout` seconds, and stop; whether all was saved."""
        end = time.monotonic() + timeout
        done = self.flush(timeout=timeout)
        with self._changed:
            self._closing = True
            self._pages.clear()
            self._changed.notify_all()
        self._thread.join(max(0.1, end - time.monotonic()))
        return done

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pages or self._closing)
                if not self._pages:
                    return
                key, page = self._pages.popleft()
                self._num_bytes -= len(page)
                self._busy = True
            try:
                self._save(key, page)
            except Exception:
                _log.exception("a page could not be saved")
            with self._changed:
                self._busy = False
                self._changed.notify_all()
