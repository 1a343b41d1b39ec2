"""Plans that have not run yet, in order, and the block tables with which they will run.

The scheduler's own tables are ahead of these: a request may have ended, or started again, since it was planned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from ..cache_manager import CacheManager
from ..request import Request
from .plan import StepPlan

__all__ = ["InFlight"]

_Rows = list[list[int]]


class InFlight:
    """A queue of plans. Tables are kept only with `tables`, which is for engines with a connector."""

    def __init__(self, cache: CacheManager, *, tables: bool) -> None:
        self._cache = cache
        self._plans: deque[StepPlan] = deque()
        self._tables: dict[str, _Rows] | None = {} if tables else None

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[StepPlan]:
        return iter(self._plans)

    def append(self, plan: StepPlan) -> None:
        """Add a plan."""
        self._plans.append(plan)

    def popleft(self) -> StepPlan:
        """Take the plan that runs next."""
        plan = self._plans.popleft()
        if self._tables is not None:
            _apply(plan, self._tables)
            for request_id in self._tables.keys() - plan.requests.keys():
                if not any(request_id in later.requests for later in self._plans):
                    self._forget_unless_running(request_id)
        return plan

    def stop_readers(self, plan: StepPlan, bad: set[int]) -> list[Request]:
        """Take out of `plan`, which is about to run, and the later ones all requests that would read `bad` blocks.

        What they would have computed is bad too and joins `bad`. Returns those that would have gone on from it.
        """
        assert self._tables is not None
        plans = (plan, *self._plans)
        stopped: list[tuple[int, Request]] = []
        grown = True
        while grown:
            grown = False
            tables = dict(self._tables)
            for number, later in enumerate(plans):
                if number:
                    tables = {i: [list(row) for row in rows] for i, rows in tables.items()}
                    _apply(later, tables)
                for request_id, request in list(later.requests.items()):
                    rows = tables[request_id]
                    first = self._cache.first_token_in(rows, bad)
                    if first is not None:
                        del later.requests[request_id]
                        stopped.append((number, request))
                        bad |= self._cache.block_ids_from(rows, first)
                        grown = True
        return [
            request
            for number, request in stopped
            if not any(later.requests.get(request.request_id) is request for later in plans[number + 1 :])
        ]

    def block_ids(self, request_id: str) -> Sequence[Sequence[int]]:
        """Return the block table of a request in the plan taken last."""
        assert self._tables is not None
        return self._tables[request_id]

    def _forget_unless_running(self, request_id: str) -> None:
        """Forget a table that no later plan can go on with: the scheduler does not have the request's blocks."""
        assert self._tables is not None
        if not any(self._cache.coordinator.blocks_of(request_id)):
            del self._tables[request_id]


def _apply(plan: StepPlan, tables: dict[str, _Rows]) -> None:
    for new in plan.new_requests:
        tables[new.request_id] = [list(row) for row in new.block_ids]
    for cached in plan.cached_requests:
        if cached.new_block_ids is None:
            continue
        if cached.resumed:
            tables[cached.request_id] = [list(row) for row in cached.new_block_ids]
        else:
            for row, more in zip(tables[cached.request_id], cached.new_block_ids, strict=True):
                row += more
