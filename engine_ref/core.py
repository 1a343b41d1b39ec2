"""The engine core: plan a step, run it, take in its tokens, and hand over its events as one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .connectors.base import KVConnector
from .events import KVEvent
from .ngram import NgramDrafter
from .request import Request, RequestStatus
from .runner import ModelRunner, PagedRunner
from .scheduler import SchedulerConfig, StepPlan, make_scheduler
from .scheduler.in_flight import InFlight

__all__ = ["EngineCore", "StepResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What came out of one step: new tokens by request, and the requests that ended."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    finished: tuple[Request, ...] = ()


#: Seconds to wait for a load where there is nothing else to do; requests and aborts wait no longer than this.
_IDLE_WAIT = 0.005


class EngineCore:
    """One engine, to be driven by one thread.

    `publish` gets the events of each step that had any. With async scheduling a step is planned before the one
    before it has its results, so two are in flight. `drafter` proposes tokens for the next step to verify; with async
    scheduling the runner does, since only it knows the tokens in time. `connector` needs a runner whose pages it can
    read and write; `close` closes it.

    Raises TypeError for a connector with a runner that has no pages.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        runner: ModelRunner,
        *,
        publish: Callable[[Sequence[KVEvent]], None] = lambda events: None,
        drafter: NgramDrafter | None = None,
        connector: KVConnector | None = None,
    ) -> None:
        self.scheduler = make_scheduler(config, connector)
        self.runner = runner
        self.connector = connector
        if connector is not None:
            if not isinstance(runner, PagedRunner):
                raise TypeError(f"{type(runner).__name__} has no pages for a connector to load and save")
            connector.bind(runner, self.scheduler.cache)
        self._publish = publish
        self._limit = 2 if config.async_scheduling else 1
        self._drafter = None if config.async_scheduling else drafter
        self._in_flight = InFlight(self.scheduler.cache, tables=connector is not None)

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

    def reset_prefix_cache(
        self, *, reset_running_requests: bool = False, reset_external: bool = False
    ) -> bool:
        """Forget the cache, with `reset_external` the connector's too; the event goes out with the next step."""
        return self.scheduler.reset_prefix_cache(
            reset_running_requests=reset_running_requests, reset_external=reset_external
        )

    def connector_stats(self) -> dict[str, dict[str, int]]:
        """Return the connector's counters since the start, by its parts; empty without a connector."""
        return self.connector.get_stats() if self.connector is not None else {}

    def close(self) -> None:
        """Let the connector finish what it is saving, and publish what is left."""
        if self.connector is not None:
            self.connector.close()
        self.publish_events()

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
        scheduler = self.scheduler
        if self.connector is not None:
            self._load(self.connector, plan)
        live = scheduler.requests
        before = [live[i] for i in plan.num_scheduled_tokens if i in live]
        dropped = plan.num_scheduled_tokens.keys() - plan.requests.keys()
        known = {i: r for i, r in {**live, **plan.requests}.items() if i not in dropped}
        sampled = self.runner.execute(plan, known)
        broken = self._end_broken(known)
        tokens = scheduler.update_from_output(plan, sampled)
        if self._drafter is not None:
            self._offer_drafts(tokens)
        scheduler.save_kv(plan)
        self.publish_events()
        failed = scheduler.take_failed()
        tokens |= {request_id: [] for request_id in (*broken, *(request.request_id for request in failed))}
        return StepResult(
            tokens=tokens,
            finished=(*failed, *(r for r in before if r.status.is_finished and r not in failed)),
        )

    def _load(self, connector: KVConnector, plan: StepPlan) -> None:
        """Bring what a plan needs into the pages; requests for which that failed are not run."""
        if plan.connector_meta is not None:
            connector.start_load_kv(plan.connector_meta)
        if not plan.total_tokens and not any(later.total_tokens for later in self._in_flight):
            connector.wait(_IDLE_WAIT)
        self.scheduler.update_from_connector(connector.get_finished(), plan, self._in_flight)

    def _end_broken(self, ran: dict[str, Request]) -> list[str]:
        """End the requests that the runner could not compute; nobody may hit what it wrote for them."""
        failed = [i for i, request in ran.items() if request.error and not request.status.is_finished]
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
