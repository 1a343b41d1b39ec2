"""Recorded scheduler workloads, played through ours: what was planned, published and freed in each step.

The recording gives the tokens that a model would sample and the drafts that were offered, so none is needed. With
async scheduling step n + 1 is planned before the results of step n come in; what a step shows of them (finished,
events, free blocks) is how things are when its own have come in.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from kvhash import BlockHasher
from kvhash._checks import normalize_tokens
from kvhash._errors import InvalidRequestError

from .coordinator import CacheConfig
from .events import event_to_json
from .recorded import field, located, objects
from .request import Request
from .scheduler import StepPlan, make_scheduler
from .scheduler.plan import SchedulerConfig
from .spec import FullAttentionSpec
from .trace import free_queue_ids, parse_group

__all__ = ["play_run"]


def play_run(run: dict[str, Any], *, at: str = "$") -> dict[str, Any]:
    """Play one recorded workload; raises InvalidRequestError for one that cannot be played."""
    steps = objects(run, "steps", at=at)
    with located(at, root=at):
        player = _Player(run, at=at)
    answer: dict[str, Any] = {key: run[key] for key in ("seed", "name", "config") if key in run}
    answer["steps"] = []
    for place, step in steps:
        with located(place, root=at):
            answer["steps"].append(player.play(step, at=place))
    answer["final_free_queue"] = free_queue_ids(player.scheduler.cache.pool)
    return answer


class _Player:
    def __init__(self, run: dict[str, Any], *, at: str) -> None:
        config, inside = field(run, "config", dict, at=at), f"{at}.config"

        def size_of(name: str, default: int | None = None) -> int:
            if default is not None and name not in config:
                return default
            return field(config, name, int, at=inside)

        size = size_of("block_size")
        given = objects(config, "groups", at=inside) if "groups" in config else []
        groups = tuple(parse_group(group, at=place) for place, group in given) or (
            FullAttentionSpec(block_size=size),
        )
        in_flight = 2 if field(config, "async_scheduling", bool, at=inside) else 1
        self.scheduler = make_scheduler(
            SchedulerConfig(
                cache=CacheConfig(
                    groups=groups,
                    num_blocks=size_of("num_blocks"),
                    hash_block_size=size_of("hash_block_size", size),
                    scheduler_block_size=size_of("scheduler_block_size", size),
                    max_model_len=size_of("max_model_len"),
                    max_in_flight_tokens=in_flight * size_of("max_num_batched_tokens"),
                ),
                max_num_seqs=size_of("max_num_seqs"),
                max_num_batched_tokens=size_of("max_num_batched_tokens"),
                policy=_policy(config, inside),
                async_scheduling=in_flight == 2,
                num_speculative_tokens=size_of("num_speculative_tokens"),
            )
        )
        self._in_flight_limit = in_flight
        self._in_flight: deque[tuple[StepPlan, dict[str, Any]]] = deque()
        self._inputs = {
            field(request, "id", str, at=place): (request, place)
            for place, request in objects(run, "requests", at=at)
        }
        self._hasher = BlockHasher(
            vllm=run.get("vllm", "latest"),
            algorithm=field(config, "algo", str, at=inside),
            hash_seed=config.get("hash_seed", "0"),
            block_size=size_of("hash_block_size", size),
        )

    def play(self, step: dict[str, Any], *, at: str) -> dict[str, Any]:
        scheduler = self.scheduler
        for i, request_id in enumerate(field(step, "added", list, at=at)):
            if not isinstance(request_id, str) or request_id not in self._inputs:
                raise InvalidRequestError(f"no request {request_id!r} is recorded", at=f"{at}.added[{i}]")
            scheduler.add_request(self._request(*self._inputs[request_id]))
        drafts = field(step, "drafts", dict, at=at)
        if drafts:
            for name, tokens in drafts.items():
                normalize_tokens(tokens, at=f"{at}.drafts.{name}")
            scheduler.update_draft_token_ids(drafts)
        plan = scheduler.schedule()
        seen: dict[str, Any] = {
            "step": field(step, "step", int, at=at),
            "added": step["added"],
            "drafts": step["drafts"],
            "num_scheduled_tokens": plan.num_scheduled_tokens,
            "new": [
                {"id": r.request_id, "num_computed_tokens": r.num_computed_tokens, "block_ids": r.block_ids}
                for r in plan.new_requests
            ],
            "cached": [
                {
                    "id": r.request_id,
                    "num_computed_tokens": r.num_computed_tokens,
                    "new_block_ids": r.new_block_ids,
                }
                for r in plan.cached_requests
            ],
            "resumed": sorted(r.request_id for r in plan.cached_requests if r.resumed),
            "preempted": plan.preempted,
            "samples": plan.samples,
        }
        self._in_flight.append((plan, seen))
        while self._in_flight and (len(self._in_flight) >= self._in_flight_limit or not plan.total_tokens):
            self._settle()
        return seen

    def _settle(self) -> None:
        plan, seen = self._in_flight.popleft()
        scheduler = self.scheduler
        before = set(scheduler.requests)
        seen["sampled"] = scheduler.update_from_output(plan, self._sample(plan))
        seen["finished"] = sorted(before - set(scheduler.requests))
        seen["events"] = [event_to_json(event) for event in scheduler.take_events()]
        seen["batches"] = int(bool(seen["events"]))
        seen["free_blocks"] = scheduler.cache.pool.num_free_blocks

    def _sample(self, plan: StepPlan) -> dict[str, list[int]]:
        """Return what the model would give: the accepted drafts and one token more."""
        sampled: dict[str, list[int]] = {}
        for request_id, samples in plan.samples.items():
            request = self.scheduler.requests.get(request_id)
            if request is None or not samples:
                continue
            record, place = self._inputs[request_id]
            outputs = field(record, "outputs", list, at=place)
            position = request.num_output_tokens
            accepted = 0
            for draft in plan.spec_token_ids.get(request_id, ()):
                if draft != outputs[position + accepted]:
                    break
                accepted += 1
            sampled[request_id] = outputs[position : position + accepted + 1]
        return sampled

    def _request(self, record: dict[str, Any], at: str) -> Request:
        priority = record.get("priority", 0)
        if type(priority) is not int:
            raise InvalidRequestError(
                f"expected an integer, got {type(priority).__name__}", at=f"{at}.priority"
            )
        normalize_tokens(field(record, "outputs", list, at=at), at=f"{at}.outputs")
        return Request(
            record["id"],
            normalize_tokens(field(record, "prompt", list, at=at), at=f"{at}.prompt"),
            hasher=self._hasher,
            max_tokens=field(record, "max_tokens", int, at=at),
            cache_salt=None if record.get("salt") is None else field(record, "salt", str, at=at),
            priority=priority,
            arrival_time=_arrival_time(record),
        )


def _policy(config: dict[str, Any], at: str) -> str:
    policy = field(config, "policy", str, at=at)
    if policy not in ("fcfs", "priority"):
        raise InvalidRequestError(f"expected fcfs or priority, got {policy!r}", at=f"{at}.policy")
    return policy


def _arrival_time(record: dict[str, Any]) -> float:
    """Return the step in which a request arrived; within a step the recorder numbered requests by their ids."""
    digits = "".join(c for c in record["id"] if c.isdigit())
    return float(record.get("arrival", 0)) + int(digits or 0) / 1e6
