"""A tier connector whose threads run when a test says so, which loses pages, and which does not let go at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from engine_ref.block import Block
from engine_ref.connectors import ConnectorOutput, HostTier, TierConnector
from engine_ref.request import Request

__all__ = ["ChaosConnector", "FlakyTier"]


class FlakyTier(HostTier):
    """A tier that gives `spared` more of the pages asked for, then loses `fails`."""

    medium = "STORAGE"
    source = "disk"
    fast = False
    fails = 0
    spared = 0

    def get(self, key: bytes) -> bytes | None:
        """Return a page, or lose it."""
        if self.fails and self.spared:
            self.spared -= 1
        elif self.fails:
            self.fails -= 1
            with self._lock:
                page = self._pages.pop(key, None)
                if page is not None:
                    self.num_bytes -= len(page)
                    self._changes.append((key, False))
            return None
        return super().get(key)


class _Threads:
    """An executor whose jobs wait to be run by hand."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()

    def submit(self, function: Callable[..., Any], *values: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs.append((future, function, values))
        return future

    def run(self, count: int) -> None:
        for _ in range(min(count, len(self.jobs))):
            future, function, values = self.jobs.popleft()
            future.set_result(function(*values))

    def shutdown(self, **_: Any) -> None:
        self.jobs.clear()


class _Direct:
    """A save queue that saves at once."""

    def __init__(self, save: Callable[[bytes, bytes], None]) -> None:
        self._save = save

    def put(self, key: bytes, page: bytes) -> bool:
        self._save(key, page)
        return True

    def drop(self, **_: Any) -> bool:
        return True

    def flush(self, **_: Any) -> bool:
        return True

    def close(self, **_: Any) -> bool:
        return True


class ChaosConnector(TierConnector):
    """`stubborn`: loads cannot be given up. `clings`: ended requests' blocks are kept for that many steps."""

    def __init__(self, *, host_bytes: int, disk_bytes: int, load_async: bool | None, policy: str) -> None:
        self.flaky = FlakyTier(max_bytes=disk_bytes, name="flaky")
        tiers = [HostTier(max_bytes=host_bytes), self.flaky]
        super().__init__(tiers, load_async=load_async, kv_load_failure_policy=policy)
        assert self._queue is not None
        self._queue.close(timeout=5)
        self._threads.shutdown()
        self._queue = _Direct(self._save_slow)  # type: ignore[assignment]
        self.threads = _Threads()
        self._threads = self.threads  # type: ignore[assignment]
        self.stubborn = False
        self.clings = 0
        self._sending: dict[str, int] = {}

    def wait(self, timeout: float) -> None:
        """Nothing happens by itself."""

    def cancel_load(self, request_id: str) -> bool:
        """Refuse while the load is under way, if stubborn."""
        return not (self.stubborn and request_id in self._loading) and super().cancel_load(request_id)

    def request_finished(self, request: Request, blocks: tuple[list[Block], ...], num_tokens: int) -> bool:
        """Keep the blocks for a while."""
        super().request_finished(request, blocks, num_tokens)
        if self.clings and request.request_id not in self._loading:
            self._sending[request.request_id] = self.clings
            return True
        return False

    def get_finished(self) -> ConnectorOutput:
        """Let go of blocks whose time is over."""
        output = super().get_finished()
        sent = [request_id for request_id, steps in self._sending.items() if steps <= 1]
        self._sending = {i: steps - 1 for i, steps in self._sending.items() if i not in sent}
        return ConnectorOutput(
            finished_recving=output.finished_recving, failed_loads=output.failed_loads, finished_sending=sent
        )
