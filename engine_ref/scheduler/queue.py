"""Waiting requests in the order of the policy."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Iterator

from ..request import Request

__all__ = ["FcfsQueue", "PriorityQueue", "WaitingQueue", "make_queue"]


class FcfsQueue:
    """First come, first served; a preempted request goes back to the front."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def add(self, request: Request) -> None:
        """Put a request at the back."""
        self._queue.append(request)

    def put_back(self, requests: Iterable[Request]) -> None:
        """Put requests at the front, one after the other: the last given comes out first."""
        self._queue.extendleft(requests)

    def peek(self) -> Request:
        """Return the next request."""
        return self._queue[0]

    def pop(self) -> Request:
        """Take the next request."""
        return self._queue.popleft()

    def remove(self, requests: Collection[Request]) -> None:
        """Take out requests from wherever they are."""
        self._queue = deque(request for request in self._queue if request not in requests)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)


class PriorityQueue:
    """The lowest priority value first, then the oldest, wherever a request comes from."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, str], Request]] = []

    def add(self, request: Request) -> None:
        """Put a request where its priority says."""
        heapq.heappush(self._heap, (request.queue_key(), request))

    def put_back(self, requests: Iterable[Request]) -> None:
        """Put requests where their priority says."""
        for request in requests:
            self.add(request)

    def peek(self) -> Request:
        """Return the next request."""
        return self._heap[0][1]

    def pop(self) -> Request:
        """Take the next request."""
        return heapq.heappop(self._heap)[1]

    def remove(self, requests: Collection[Request]) -> None:
        """Take out requests from wherever they are."""
        self._heap = [entry for entry in self._heap if entry[1] not in requests]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (entry[1] for entry in sorted(self._heap, key=lambda entry: entry[0]))


WaitingQueue = FcfsQueue | PriorityQueue


def make_queue(policy: str) -> WaitingQueue:
    """Return an empty queue for ``"fcfs"`` or ``"priority"``."""
    if policy == "fcfs":
        return FcfsQueue()
    if policy == "priority":
        return PriorityQueue()
    raise ValueError(f'unknown scheduling policy {policy!r}; expected "fcfs" or "priority"')
