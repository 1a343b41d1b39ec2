"""Plays a recording as the engine published it: the same numbers and payloads, PUB and replay socket, at any speed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from types import TracebackType

from kvhash._errors import UsageError

from .message import parse_message
from .publisher import Publisher
from .recording import Record

__all__ = ["Player"]


class Player:
    """Publishers for what a recording holds: one for each (endpoint, rank) in it, ranks on neighbouring ports.

    ``endpoint`` and ``replay_endpoint`` are those of rank 0. ``speed``: 1.0 as it was received, N times as fast, or
    None for as fast as it goes. A second pass has the same numbers and payloads, so a subscriber that saw
    the first takes it for repetitions. ``bind`` as in
    `Publisher`. Raises EndpointError, and UsageError when two recorded endpoints had the same rank (play one of them:
    `only_endpoint`).
    """

    def __init__(
        self,
        records: Iterable[Record],
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        speed: float | None = 1.0,
        only_endpoint: str | None = None,
        release: str = "latest",
        bind: bool | None = None,
    ) -> None:
        if speed is not None and not 0 < speed < float("inf"):
            raise UsageError(f"a speed is a number above 0, got {speed:g}", code="invalid-speed")
        self._records = [r for r in records if only_endpoint in (None, r.endpoint)]
        if not self._records:
            raise UsageError("the recording holds no message to play", code="empty-input")
        self._speed = speed
        self._stop = threading.Event()
        self._ranks = [_rank_of(record) for record in self._records]
        endpoints = {(record.endpoint, rank) for record, rank in zip(self._records, self._ranks, strict=True)}
        if len(endpoints) > len({rank for _, rank in endpoints}):
            names = ", ".join(sorted({name for name, _ in endpoints}))
            raise UsageError(
                f"several endpoints of the same rank ({names}); play one of them", code="several-endpoints"
            )
        self._publishers: dict[int, Publisher] = {}
        try:
            for rank in sorted(set(self._ranks)):
                self._publishers[rank] = Publisher(
                    endpoint, replay_endpoint, data_parallel_rank=rank, release=release, bind=bind
                )
        except BaseException:
            self.close()
            raise

    @property
    def endpoints(self) -> dict[int, tuple[str, str | None]]:
        """Where each rank publishes and replays."""
        return {rank: (p.endpoint, p.replay_endpoint) for rank, p in self._publishers.items()}

    def play(self) -> int:
        """Publish all messages once, in order and pace; return how many."""
        begun = time.monotonic()
        first = self._records[0].received_ns
        played = 0
        for record, rank in zip(self._records, self._ranks, strict=True):
            if self._speed is not None:
                due = begun + (record.received_ns - first) / 1e9 / self._speed
                self._stop.wait(max(0.0, due - time.monotonic()))
            if self._stop.is_set():
                break
            self._publishers[rank].publish_payload(record.payload, seq=record.seq, topic=record.topic)
            played += 1
        return played

    def stop(self) -> None:
        """End `play` soon, from another thread or a signal handler."""
        self._stop.set()

    def close(self, timeout: float = 1.0) -> None:
        """Publish what is queued, then close the sockets."""
        self._stop.set()
        for publisher in self._publishers.values():
            publisher.close(timeout)

    def __enter__(self) -> Player:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _rank_of(record: Record) -> int:
    if record.rank is not None:
        return record.rank
    message = parse_message(list(record.frames), record.endpoint, record.received_ns)
    return getattr(message, "rank", None) or 0
