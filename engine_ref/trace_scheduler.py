"""Recorded scheduler workloads, played through ours: what was planned, published and freed in each step.

The recording gives the tokens that a model would sample and the drafts that were offered, so none is needed. With
async scheduling step n + 1 is planned before the results of step n come in; what a step shows of them (finished,
events, free blocks) is how things are when its own have come in.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from kvhash import BlockHasher

from .coordinator import CacheConfig
from .events import event_to_json
from .request import Request
from .scheduler import StepPlan, make_scheduler
from .scheduler.plan import SchedulerConfig
from .spec import FullAttentionSpec
from .trace import free_queue_ids, parse_group

__all__ = ["play_run"]


def play_run(run: dict[str, Any], *, at: str = "$") -> dict[str, Any]:
    """Play one recorded workload."""
    player = _Player(run, at=at)
    answer: dict[str, Any] = {key: run[key] for key in ("seed", "name", "config") if key in run}
    answer["steps"] = [player.play(step) for step in run["steps"]]
    answer["final_free_queue"] = free_queue_ids(player.scheduler.cache.pool)
    return answer


class _Player:
    def __init__(self, run: dict[str, Any], *, at: str) -> None:
        config = run["config"]
        size = config["block_size"]
        groups = tuple(
            parse_group(group, at=f"{at}.config.groups[{i}]")
            for i, group in enumerate(config.get("groups", ()))
        ) or (FullAttentionSpec(block_size=size),)
        in_flight = 2 if config["async_scheduling"] else 1
        self.scheduler = make_scheduler(
            SchedulerConfig(
                cache=CacheConfig(
                    groups=groups,
                    num_blocks=config["num_blocks"],
                    hash_block_size=config.get("hash_block_size", size),
                    scheduler_block_size=config.get("scheduler_block_size", size),
                    max_model_len=config["max_model_len"],
                    max_in_flight_tokens=in_flight * config["max_num_batched_tokens"],
                ),
                max_num_seqs=config["max_num_seqs"],
                max_num_batched_tokens=config["max_num_batched_tokens"],
                policy=config["policy"],
                async_scheduling=config["async_scheduling"],
                num_speculative_tokens=config["num_speculative_tokens"],
            )
        )
        self._in_flight_limit = in_flight
        self._in_flight: deque[tuple[StepPlan, dict[str, Any]]] = deque()
        self._inputs = {request["id"]: request for request in run["requests"]}
        self._hasher = BlockHasher(
            vllm=run.get("vllm", "latest"),
            algorithm=config["algo"],
            hash_seed=config.get("hash_seed", "0"),
            block_size=config.get("hash_block_size", size),
        )

    def play(self, step: dict[str, Any]) -> dict[str, Any]:
        scheduler = self.scheduler
        for request_id in step["added"]:
            scheduler.add_request(self._request(self._inputs[request_id]))
        if step["drafts"]:
            scheduler.update_draft_token_ids(step["drafts"])
        plan = scheduler.schedule()
        seen: dict[str, Any] = {
            "step": step["step"],
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
            outputs = self._inputs[request_id]["outputs"]
            position = request.num_output_tokens
            accepted = 0
            for draft in plan.spec_token_ids.get(request_id, ()):
                if draft != outputs[position + accepted]:
                    break
                accepted += 1
            sampled[request_id] = outputs[position : position + accepted + 1]
        return sampled

    def _request(self, record: dict[str, Any]) -> Request:
        return Request(
            record["id"],
            record["prompt"],
            hasher=self._hasher,
            max_tokens=record["max_tokens"],
            cache_salt=record.get("salt"),
            priority=record.get("priority", 0),
            arrival_time=_arrival_time(record),
        )


def _arrival_time(record: dict[str, Any]) -> float:
    """Return the step in which a request arrived; within a step the recorder numbered requests by their ids."""
    digits = "".join(c for c in record["id"] if c.isdigit())
    return float(record.get("arrival", 0)) + int(digits or 0) / 1e6
