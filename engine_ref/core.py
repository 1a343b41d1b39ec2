"""The engine core: plan a step, run it, take in its tokens, and hand over its events as one batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .events import KVEvent
from .request import Request, RequestStatus
from .runner import ModelRunner
from .scheduler import SchedulerConfig, StepPlan, make_scheduler

__all__ = ["EngineCore", "StepResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What came out of one step: new tokens by request, and the requests that ended."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    finished: tuple[Request, ...] = ()


class EngineCore:
    """One engine, to be driven by one thread.

    `publish` gets the events of each step that had any. With async scheduling a step is planned before the one
    before it has its results, so two are in flight.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        runner: ModelRunner,
        *,
        publish: Callable[[Sequence[KVEvent]], None] = lambda events: None,
    ) -> None:
        self.scheduler = make_scheduler(config)
        self.runner = runner
        self._publish = publish
        self._limit = 2 if config.async_scheduling else 1
        self._in_flight: deque[StepPlan] = deque()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_requests or bool(self._in_flight)

    def add_request(self, request: Request) -> None:
        """Queue a request, hashed already by whoever made it."""
        self.scheduler.add_request(request)

    def abort(self, request_ids: Sequence[str]) -> list[Request]:
        """End requests; their blocks are free at once."""
        return self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget the cache; the event goes out with the next step, as in vLLM."""
        return self.scheduler.reset_prefix_cache(reset_running_requests=reset_running_requests)

    def step(self) -> StepResult:
        """Plan a step and take in the results of the oldest in flight, if it is time."""
        planned = False
        if self.scheduler.has_requests:
            plan = self.scheduler.schedule()
            planned = plan.total_tokens > 0
            self._in_flight.append(plan)
        if planned and len(self._in_flight) < self._limit:
            return StepResult()
        return self._settle() if self._in_flight else StepResult()

    def publish_events(self) -> None:
        """Hand over the events since the last batch, if there are any."""
        events = self.scheduler.take_events()
        if events:
            self._publish(events)

    def _settle(self) -> StepResult:
        plan = self._in_flight.popleft()
        live = self.scheduler.requests
        before = [live[i] for i in plan.num_scheduled_tokens if i in live]
        sampled = self.runner.execute(plan, {**live, **plan.requests})
        tokens = self.scheduler.update_from_output(plan, sampled)
        self.publish_events()
        return StepResult(tokens=tokens, finished=tuple(r for r in before if r.status.is_finished))
