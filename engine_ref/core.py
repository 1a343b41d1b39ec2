"""The engine core: plan a step, run it, take in its tokens, and hand over its events as one batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .events import KVEvent
from .ngram import NgramDrafter
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
    before it has its results, so two are in flight. `drafter` proposes tokens for the next step to verify; with async
    scheduling the runner does, since only it knows the tokens in time.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        runner: ModelRunner,
        *,
        publish: Callable[[Sequence[KVEvent]], None] = lambda events: None,
        drafter: NgramDrafter | None = None,
    ) -> None:
        self.scheduler = make_scheduler(config)
        self.runner = runner
        self._publish = publish
        self._limit = 2 if config.async_scheduling else 1
        self._drafter = None if config.async_scheduling else drafter
        self._in_flight: deque[tuple[StepPlan, dict[str, Request]]] = deque()

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
            self._in_flight.append((plan, {i: self.scheduler.requests[i] for i in plan.num_scheduled_tokens}))
        if planned and len(self._in_flight) < self._limit:
            return StepResult()
        return self._settle() if self._in_flight else StepResult()

    def publish_events(self) -> None:
        """Hand over the events since the last batch, if there are any."""
        events = self.scheduler.take_events()
        if events:
            self._publish(events)

    def _settle(self) -> StepResult:
        plan, planned = self._in_flight.popleft()
        sampled = self.runner.execute(plan, planned)
        known = dict(self.scheduler.requests)
        failed = self._end_failed(planned)
        tokens = self.scheduler.update_from_output(plan, sampled)
        if self._drafter is not None:
            self._offer_drafts(tokens)
        self.publish_events()
        ended = (known[i] for i in plan.num_scheduled_tokens if i in known)
        return StepResult(
            tokens={**{request_id: [] for request_id in failed}, **tokens},
            finished=tuple(r for r in ended if r.status.is_finished),
        )

    def _end_failed(self, planned: dict[str, Request]) -> list[str]:
        """End the requests that the runner could not compute; nobody may hit what it wrote for them."""
        failed = [i for i, request in planned.items() if request.error and not request.status.is_finished]
        for request_id in failed:
            blocks = [block for row in self.scheduler.cache.block_ids(request_id) for block in row if block]
            self.scheduler.cache.pool.evict_blocks(blocks)
        self.scheduler.finish_requests(failed, RequestStatus.FINISHED_ERROR)
        return failed

    def _offer_drafts(self, tokens: dict[str, list[int]]) -> None:
        assert self._drafter is not None
        running = ((i, self.scheduler.requests.get(i)) for i, new in tokens.items() if new)
        self.scheduler.update_draft_token_ids(
            {i: self._drafter.propose(request.all_token_ids) for i, request in running if request is not None}
        )
