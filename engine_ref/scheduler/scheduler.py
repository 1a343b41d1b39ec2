"""Continuous batching: every step mixes decodes with chunks of prompts within one token budget.

There is no prefill and no decode phase: each request has computed some of its tokens, and a step computes more, until
it has caught up with what it has and a token is sampled. Running requests come first, in the order in which they were
admitted; then waiting ones are admitted while budget and blocks last. A running request that finds no block preempts
another, which starts again later (its blocks may still be hit then).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..block import Block
from ..cache_manager import CacheManager
from ..connectors.base import ConnectorOutput, KVConnector
from ..events import KVEvent
from ..managers.mamba import checkpoint_position
from ..request import Request, RequestStatus
from ..spec import MambaSpec
from .in_flight import InFlight
from .plan import CachedRequest, NewRequest, SchedulerConfig, StepPlan
from .queue import make_queue
from .remote_kv import External, RemoteKV

__all__ = ["Scheduler"]


class Scheduler:
    """Plans steps and takes in their results."""

    def __init__(self, config: SchedulerConfig, connector: KVConnector | None = None) -> None:
        self.config = config
        self.cache = CacheManager(config.cache)
        self.connector = connector
        self.remote = RemoteKV(connector, self.cache, policy=config.policy)
        self.requests: dict[str, Request] = {}
        self.waiting = make_queue(config.policy)
        self.running: list[Request] = []
        self._failed: list[Request] = []
        self._state_block_size = next(
            (spec.block_size for spec in config.cache.groups if isinstance(spec, MambaSpec)), 0
        )

    # ---- requests come and go

    def add_request(self, request: Request) -> None:
        """Queue a request."""
        if request.request_id in self.requests or request.request_id in self.remote.keeps:
            raise ValueError(f"there is a request {request.request_id!r} already")
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        """End requests from outside (a client hung up); unknown and finished ones are passed over."""
        ended = [self.requests[i] for i in dict.fromkeys(request_ids) if i in self.requests]
        self.running = [request for request in self.running if request not in ended]
        self.waiting.remove(ended)
        self.remote.queue.remove(ended)
        for request in ended:
            keep = not self.remote.cancel(request)
            request.status = status
            self._free(request, keep=keep)
        return ended

    @property
    def has_requests(self) -> bool:
        """Whether any request is waiting, loading or running, or a connector still needs the blocks of one that was."""
        return bool(self.requests) or bool(self.remote.keeps)

    @property
    def num_waiting(self) -> int:
        """Requests that wait to be admitted, those that wait for a connector included."""
        return len(self.waiting) + len(self.remote.queue)

    def update_draft_token_ids(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Offer draft tokens for the next step; a request whose prompt is not computed yet takes none."""
        for request_id, token_ids in drafts.items():
            request = self.requests.get(request_id)
            if request is not None:
                request.spec_token_ids = [] if request.is_prefill_chunk else list(token_ids)

    def reset_prefix_cache(
        self, *, reset_running_requests: bool = False, reset_external: bool = False
    ) -> bool:
        """Forget every hash; refused while blocks are held, unless the running requests are preempted for it.

        Loads under way are given up for it too; False if one cannot be. `reset_external`: forget what the connector
        keeps as well, even where the pool cannot be reset; True only if both were done.
        """
        if reset_running_requests:
            while self.running:
                self._preempt(self.running.pop(), drop_stale_output=True)
            self.waiting.put_back(reversed(self.remote.restart_loading()))
        done = self.cache.reset_prefix_cache()
        if reset_external and self.connector is not None:
            done = self.connector.reset_cache() and done
        return done

    # ---- planning

    def schedule(self) -> StepPlan:
        """Plan the next step; what it computes counts as computed from now on."""
        self.cache.new_step_starts()
        step = _Step(self.config.max_num_batched_tokens)
        step.long_prefill = (
            self.config.long_prefill_token_threshold if len(self.running) + self.num_waiting > 1 else 0
        )
        self._schedule_running(step)
        if not step.preempted:
            self._schedule_waiting(step)
        plan = self._make_plan(step)
        self._after_schedule(plan)
        return plan

    def _schedule_running(self, step: _Step) -> None:
        index, lookahead = 0, self.config.num_lookahead_tokens
        nothing: list[list[int]] = [[] for _ in self.config.cache.groups]
        while index < len(self.running) and step.budget > 0:
            request = self.running[index]
            new_tokens = self._num_running_tokens(request, step)
            if new_tokens <= 0:
                index += 1
                continue
            if self.cache.has_room(request, request.num_computed_tokens + new_tokens + lookahead):
                step.take(request, new_tokens, nothing)
            else:
                blocks, index = self._allocate_or_preempt(request, new_tokens, index, step)
                if blocks is None:
                    if self.config.policy == "priority" and request.status is RequestStatus.PREEMPTED:
                        continue  # it gave way to another; the ones behind it may go on
                    break
                step.take(request, new_tokens, [[block.block_id for block in row] for row in blocks])
            step.running.append(request)
            step.prefill = step.prefill or request.is_prefill_chunk
            index += 1
            if request.spec_token_ids:
                count = (
                    new_tokens
                    + request.num_computed_tokens
                    - request.num_tokens
                    - request.num_output_placeholders
                )
                if count > 0:
                    step.spec_token_ids[request.request_id] = request.spec_token_ids[:count]
                request.spec_token_ids = []

    def _num_running_tokens(self, request: Request, step: _Step) -> int:
        placeholders = request.num_output_placeholders
        if (
            placeholders > 0
            and request.num_computed_tokens + 2 - placeholders
            >= request.num_prompt_tokens + request.max_tokens
        ):
            return 0  # the tokens in flight end it
        computed = request.num_computed_tokens
        count = len(request.all_token_ids) + len(request.spec_token_ids) + placeholders - computed
        if 0 < step.long_prefill < count:
            count = step.long_prefill
        count = min(count, step.budget, self.config.cache.max_model_len - computed - 1)
        return self._align_to_states(request, count) if self._state_block_size else count

    def _allocate_or_preempt(
        self, request: Request, new_tokens: int, index: int, step: _Step
    ) -> tuple[tuple[list[Block], ...] | None, int]:
        """Allocate, preempting others until it fits or the request itself is preempted."""
        while True:
            blocks = self.cache.allocate_slots(
                request, new_tokens, num_lookahead_tokens=self.config.num_lookahead_tokens
            )
            if blocks is not None:
                return blocks, index
            if self.config.policy == "priority":
                victim = max(self.running, key=lambda other: (other.priority, other.arrival_time))
                position = self.running.index(victim)
                del self.running[position]
                index -= position < index
                step.give_back(victim)
            else:
                victim = self.running.pop()
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is request:
                return None, index

    def _schedule_waiting(self, step: _Step) -> None:
        passed_over: list[Request] = []
        holding: list[Request] = []  # passed over too, with blocks
        while step.budget > 0 and self.num_waiting and len(self.running) < self.config.max_num_seqs:
            queue = self.remote.queue if len(self.remote.queue) else self.waiting
            request = queue.peek()
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                if not self.remote.is_over(request):
                    holding.append(queue.pop())
                    continue
                if not self.remote.finish_load(request):
                    queue.pop()
                    self._end_with_error(request)
                    continue
            if queue is self.remote.queue and not request.num_computed_tokens:
                # Its load failed and it holds nothing; those behind it do, and must not wait for it.
                self.waiting.put_back([queue.pop()])
                continue
            if request.num_stale_output_tokens and not request.drop_stale_output:
                # Results of before its preemption are still to come.
                (holding if request.num_computed_tokens else passed_over).append(queue.pop())
                continue
            looks = request.num_computed_tokens == 0
            found = self._lookup(request)
            if found is None:
                passed_over.append(queue.pop())
                continue
            new_tokens, padded = (
                (0, False) if found.load_async else self._num_admitted_tokens(request, found, step)
            )
            if new_tokens <= 0 and not found.load_async:
                break
            if not self._admit(request, found, new_tokens, holding):
                break
            queue.pop()
            num_computed_tokens = request.num_computed_tokens + found.hit.num_tokens + found.num_tokens
            if looks and not request.num_load_failures:
                self.cache.record_lookup(request, found.hit.num_tokens)
                if request.status is RequestStatus.WAITING:
                    request.num_cached_tokens = num_computed_tokens
                    request.num_external_tokens = found.num_tokens
            if found.load_async:
                self.remote.starts_loading(request, num_computed_tokens)
                holding.append(request)
                continue
            (step.resumed if request.status is RequestStatus.PREEMPTED else step.new).append(request)
            self.running.append(request)
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = num_computed_tokens
            step.take(request, new_tokens, self.cache.block_ids(request.request_id))
            if padded:
                step.spec_token_ids[request.request_id] = [-1] * self.config.num_speculative_tokens
        # The first passed over is put back last, so it is the first again.
        self.waiting.put_back(reversed(passed_over))
        self.remote.queue.put_back(reversed(holding))

    def _lookup(self, request: Request) -> External | None:
        """Return the local hit and what a connector has beyond it; None: the connector does not know yet."""
        if request.num_computed_tokens:  # loaded
            return External(self.cache.no_hit(), 0, False)
        hit = self.cache.get_computed_blocks(request)
        request.shared_prefix_boundary = hit.longest_tokens if hit.longest_tokens > hit.num_tokens else 0
        return self.remote.match(request, hit)

    def _admit(self, request: Request, found: External, new_tokens: int, holding: list[Request]) -> bool:
        """Take the blocks for a request's first step, or for its load; False: they do not fit."""
        reserved = 0
        if found.load_async:
            # A load cannot be preempted; what others need to go on must be left to them.
            prefilling = (other for other in self.running if other.num_computed_tokens < other.num_tokens)
            reserved = self.remote.reserved_blocks([*holding, *prefilling])
        blocks = self.cache.allocate_slots(
            request,
            new_tokens,
            hit=found.hit,
            num_lookahead_tokens=0 if found.load_async else self.config.num_lookahead_tokens,
            num_external_tokens=found.num_tokens,
            delay_cache_blocks=found.load_async,
            full_sequence_must_fit=self.config.scheduler_reserve_full_isl,
            reserved_blocks=reserved,
            has_scheduled_requests=bool(self.running),
        )
        if blocks is None:
            return False
        self.remote.allocated(request, found)
        return True

    def _num_admitted_tokens(self, request: Request, found: External, step: _Step) -> tuple[int, bool]:
        """Return the tokens of a request's first step, 0 if it must wait, and whether they are padded for drafts.

        With drafts a request that has one token left to compute gets as many as a decode does, so that the whole
        batch has one shape; the padding is -1 and never accepted.
        """
        found_tokens = found.hit.num_tokens + found.num_tokens
        start = request.num_computed_tokens + found_tokens
        count, padded = request.num_tokens - start, False
        decode = 1 + self.config.num_speculative_tokens
        joins_decodes = decode > 1 and count == 1 and not step.prefill and (step.running or start > 0)
        if joins_decodes and start + decode + 1 <= self.config.max_model_len:
            if decode > step.budget:
                return 0, False
            count, padded = decode, True
        if 0 < step.long_prefill < count:
            count = step.long_prefill
        if not self.config.enable_chunked_prefill and count > step.budget:
            return 0, False
        aligned = self._align_to_states(request, min(count, step.budget), found_tokens)
        if padded and aligned not in (0, decode):
            return 1, False
        return aligned, padded

    def _align_to_states(self, request: Request, new_tokens: int, num_hit_tokens: int = 0) -> int:
        """Shorten a chunk of a prompt so that it ends where a state can be cached (Mamba groups only)."""
        size = self._state_block_size
        if not size:
            return new_tokens
        start = request.num_computed_tokens + num_hit_tokens
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        if start >= prefill_end:
            return new_tokens
        coordinator = self.cache.coordinator
        drop, lookahead = self.config.cache.use_eagle, request.chain.hasher.lookahead
        last_state = checkpoint_position(request.num_tokens, size, drop_eagle=drop, lookahead=lookahead)
        end = start + new_tokens
        if end < prefill_end:
            aligned = end // size * size
            if aligned > start or size <= self.config.max_num_batched_tokens:
                end = aligned
        tail = 0
        if coordinator.fine_grained:
            tail = checkpoint_position(
                request.num_prompt_tokens,
                self.config.cache.hash_block_size,
                drop_eagle=drop,
                lookahead=lookahead,
            )
        junction = request.shared_prefix_boundary
        stops = (
            (start // size + 1) * size if start % size else 0,
            last_state,
            tail if last_state < tail < request.num_prompt_tokens else 0,
            start + (junction - start) // size * size if start < junction < end else 0,
        )
        end = min((stop for stop in stops if start < stop < end), default=end)
        return max(end - start, 0)

    def _preempt(self, request: Request, *, drop_stale_output: bool = False) -> None:
        self.cache.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        request.drop_stale_output = drop_stale_output or (
            request.drop_stale_output and request.num_stale_output_tokens > 0
        )
        # Steps in flight still bring tokens; these count, their KV does not.
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.num_output_placeholders = 0
        request.num_preemptions += 1
        self.waiting.put_back([request])

    def _make_plan(self, step: _Step) -> StepPlan:
        copies, held = self.cache.take_copies()
        self.cache.pool.free_blocks(held)
        return StepPlan(
            num_scheduled_tokens=step.num_tokens,
            requests={request_id: self.requests[request_id] for request_id in step.num_tokens},
            new_requests=[
                NewRequest(
                    request.request_id, request.num_computed_tokens, step.block_ids[request.request_id]
                )
                for request in step.new
            ],
            cached_requests=[
                CachedRequest(
                    request.request_id,
                    request.num_computed_tokens,
                    rows if any(rows := step.block_ids[request.request_id]) else None,
                    resumed,
                )
                for requests, resumed in ((step.running, False), (step.resumed, True))
                for request in requests
            ],
            preempted=[request.request_id for request in step.preempted],
            spec_token_ids=step.spec_token_ids,
            block_copies=copies,
            connector_meta=self.connector.build_connector_meta() if self.connector else None,
        )

    def _after_schedule(self, plan: StepPlan) -> None:
        for request_id, count in plan.num_scheduled_tokens.items():
            request = plan.requests[request_id]
            request.num_computed_tokens += count
            request.num_in_flight_tokens += count
            request.is_prefill_chunk = (
                request.num_computed_tokens < len(request.all_token_ids) + request.num_output_placeholders
            )
            plan.samples[request_id] = not request.is_prefill_chunk

    # ---- results

    def update_from_output(
        self, plan: StepPlan, sampled: Mapping[str, Sequence[int]]
    ) -> dict[str, list[int]]:
        """Take in the tokens of a step, accepted drafts included; returns what each request really got.

        A finished request's blocks are freed here.
        """
        got: dict[str, list[int]] = {}
        stopped: list[Request] = []
        for request_id, count in plan.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None or plan.requests.get(request_id, request) is not request:
                continue  # it ended while the step ran, and perhaps another has its id now
            request.num_in_flight_tokens -= count
            stale = request.num_stale_output_tokens > 0
            if stale:
                request.num_stale_output_tokens -= count
                if request.drop_stale_output:
                    continue
            tokens = list(sampled.get(request_id, ()))
            drafts = plan.spec_token_ids.get(request_id)
            if drafts and tokens and not stale:
                rejected = len(drafts) - max(len(tokens) - 1, 0)
                if request.num_computed_tokens > 0:
                    request.num_computed_tokens -= rejected
                if request.num_output_placeholders > 0:
                    request.num_output_placeholders -= rejected
            if tokens and self._take_tokens(request, tokens, stale=stale):
                stopped.append(request)
            got[request_id] = tokens
        if stopped:
            self.running = [request for request in self.running if request not in stopped]
            self.waiting.remove(stopped)
        return got

    def _take_tokens(self, request: Request, tokens: list[int], *, stale: bool) -> bool:
        """Append tokens until one ends the request, cut `tokens` there; returns whether it ended."""
        was_running = request.status is RequestStatus.RUNNING
        had_placeholders = request.num_output_placeholders > 0
        ended = False
        for count, token in enumerate(tokens, 1):
            request.append_output([token])
            if request.check_stop(self.config.max_model_len):
                if not stale:
                    request.num_computed_tokens -= len(tokens) - count
                del tokens[count:]
                ended = True
                break
        if not stale and had_placeholders:
            request.num_output_placeholders -= len(tokens)
        if not stale and was_running and (had_placeholders or self.config.num_speculative_tokens > 0):
            # Blocks that placeholders or drafts filled have their hashes only now.
            self.cache.cache_blocks(request, request.num_computed_tokens - request.num_in_flight_tokens)
        if ended:
            self._free(request)
        return ended

    def update_from_connector(self, output: ConnectorOutput, plan: StepPlan, in_flight: InFlight) -> None:
        """Take in what a connector has done before the step of `plan` runs.

        Requests that were to go on from KV that did not come are taken out of the plans. They start again, or end
        with an error, as the connector's policy says.
        """
        stopped = self.remote.take(output, plan, in_flight)
        if not stopped:
            return
        again = [request for request in self.running if request in stopped]
        self.running = [request for request in self.running if request not in again]
        for request in reversed(again):
            self._preempt(request, drop_stale_output=True)
            if not self.remote.recomputes:
                self.waiting.remove([request])
                self._end_with_error(request)

    def save_kv(self, plan: StepPlan) -> None:
        """Let the connector save what the step of `plan`, which has just run, computed of requests that go on."""
        if self.connector is None:
            return
        for request_id, request in plan.requests.items():
            if request.status is RequestStatus.RUNNING and not request.num_stale_output_tokens:
                settled = request.num_computed_tokens - request.num_in_flight_tokens
                self.connector.save_kv(request, self.cache.coordinator.blocks_of(request_id), settled)

    def _end_with_error(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED_ERROR
        self._failed.append(request)
        self._free(request)

    def take_failed(self) -> list[Request]:
        """Return the requests that ended with an error since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def _free(self, request: Request, *, keep: bool = False) -> None:
        if self.remote.request_finished(request, keep=keep):
            self.cache.free(request)
        del self.requests[request.request_id]

    def take_events(self) -> list[KVEvent]:
        """Return the KV events since the last call; the engine publishes them as one batch."""
        events = self.cache.take_events()
        return events + self.connector.take_events() if self.connector else events


class _Step:
    """A step while it is being planned."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.long_prefill = 0
        self.prefill = False
        self.new: list[Request] = []
        self.running: list[Request] = []
        self.resumed: list[Request] = []
        self.preempted: list[Request] = []
        self.num_tokens: dict[str, int] = {}
        self.block_ids: dict[str, list[list[int]]] = {}
        self.spec_token_ids: dict[str, list[int]] = {}

    def take(self, request: Request, count: int, block_ids: list[list[int]]) -> None:
        """Plan `count` tokens of a request."""
        self.num_tokens[request.request_id] = count
        self.block_ids[request.request_id] = block_ids
        self.budget -= count

    def give_back(self, request: Request) -> None:
        """Undo what was planned for a request, if anything was."""
        if request in self.running:
            self.running.remove(request)
            self.budget += self.num_tokens.pop(request.request_id)
            del self.block_ids[request.request_id]
            self.spec_token_ids.pop(request.request_id, None)
