"""The scheduler's side of a connector: loads under way, what they brought, and blocks that are still needed.

Without a connector it says "nothing" to every question.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..cache_manager import CacheManager, CacheStats
from ..connectors.base import ConnectorOutput, KVConnector
from ..coordinator import Hit
from ..request import Request, RequestStatus
from ..spec import FullAttentionSpec
from .in_flight import InFlight
from .plan import StepPlan
from .queue import make_queue

__all__ = ["External", "LoadStats", "RemoteKV"]


@dataclass(frozen=True, slots=True)
class External:
    """What a connector has for a request beyond its local hit, which may have been cut for it."""

    hit: Hit
    num_tokens: int
    load_async: bool


@dataclass(slots=True)
class LoadStats:
    """Loads that left something out: how many requests met one, and the tokens that were computed for it."""

    failed_requests: int = 0
    failed_tokens: int = 0


@dataclass(slots=True)
class _Lookup:
    """What was found for a request whose load is not over: counted then, without what did not come."""

    start: int
    queries: int
    hits: int
    preempted: bool
    sources: dict[str, int]


class RemoteKV:
    """All requests that hold blocks and do not run: those loading, those loaded, and those that have ended."""

    def __init__(self, connector: KVConnector | None, cache: CacheManager, *, policy: str) -> None:
        self.connector = connector
        #: Loading and loaded requests; they are admitted before the waiting ones, since they hold blocks already.
        self.queue = make_queue(policy)
        #: Tokens that connectors were asked for and had, of admitted requests.
        self.stats = CacheStats()
        self.hits_by_source: dict[str, int] = {}
        self.load_stats = LoadStats()
        self._cache = cache
        self._before_load: dict[str, RequestStatus] = {}
        self._over: set[str] = set()
        self._failed: dict[str, int] = {}
        self._ended: dict[str, Request] = {}
        self._lookups: dict[str, _Lookup] = {}

    # ---- admission

    def match(self, request: Request, hit: Hit) -> External | None:
        """Ask the connector what it has after the local hit; None: it does not know yet.

        A request that skips the cache gets nothing, and neither does one whose load has failed before. The connector
        starts at a block's end; a hit that ends inside a block is cut for it only if it has more than that.
        """
        if self.connector is None or request.skip_reading_prefix_cache or request.num_load_failures:
            return External(hit, 0, False)
        unit = self._cache.config.scheduler_block_size
        aligned = hit.num_tokens // unit * unit
        tokens, load_async = self.connector.get_num_new_matched_tokens(request, aligned)
        if tokens is None:
            return None
        if tokens <= hit.num_tokens - aligned:
            return External(hit, 0, False)
        if aligned < hit.num_tokens:
            hit = self._cache.coordinator.truncate_hit(hit, aligned)
        return External(hit, tokens, load_async)

    def allocated(self, request: Request, found: External) -> None:
        """Tell the connector that the request has its blocks; what it had is counted when it is there."""
        if self.connector is None:
            return
        blocks = self._cache.coordinator.blocks_of(request.request_id)
        self.connector.update_state_after_alloc(request, blocks, found.num_tokens)
        if request.skip_reading_prefix_cache or request.num_computed_tokens or request.num_load_failures:
            return
        preempted = request.num_preemptions > 0
        start, tokens = found.hit.num_tokens, found.num_tokens
        sources = {} if preempted else self.connector.get_external_cache_hit_sources(request, tokens)
        self._count_lookup(request.request_id)  # of before a preemption
        self._lookups[request.request_id] = _Lookup(
            start, request.num_tokens - start, tokens, preempted, dict(sources)
        )
        if not tokens:
            self._count_lookup(request.request_id)

    def _count_lookup(self, request_id: str, end: int | None = None) -> None:
        """Count a lookup whose load is over, once; `end`: the token from which on nothing came."""
        lookup = self._lookups.pop(request_id, None)
        if lookup is None:
            return
        hits = lookup.hits if end is None else max(0, min(lookup.hits, end - lookup.start))
        self.stats.record(lookup.queries, hits, preempted=lookup.preempted)
        left = hits
        for source, tokens in lookup.sources.items():
            counted = min(tokens, left)
            left -= counted
            if counted:
                self.hits_by_source[source] = self.hits_by_source.get(source, 0) + counted

    def starts_loading(self, request: Request, num_computed_tokens: int) -> None:
        """Set a request aside until its load is over; its blocks count as computed from then on."""
        self._before_load[request.request_id] = request.status
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.num_computed_tokens = num_computed_tokens

    def reserved_blocks(self, others: Iterable[Request]) -> int:
        """Return the blocks still needed by requests that hold some and cannot be preempted, and by `others`.

        A load that took them could leave everybody waiting for everybody.
        """
        return sum(map(self._cache.remaining_blocks, [*self.queue, *others]))

    # ---- the end of a load

    def is_over(self, request: Request) -> bool:
        """Whether what a request waited for has come, or will not come."""
        return request.request_id in self._over

    def finish_load(self, request: Request) -> bool:
        """Cache what was loaded and let the request be scheduled; False: it is to be ended for its failed load."""
        request_id = request.request_id
        self._over.discard(request_id)
        request.status = self._before_load.pop(request_id)
        first = self._failed.pop(request_id, None)
        if first is None:
            self._cache.cache_blocks(request, request.num_computed_tokens)
            self._count_lookup(request_id)
            return True
        self._count_failure(request, first, request.num_computed_tokens)
        # A block that was loaded for a window or a state further on is of no use before it: then nothing is kept.
        unit = self._cache.config.scheduler_block_size
        only_full = all(isinstance(spec, FullAttentionSpec) for spec in self._cache.config.groups)
        valid = first // unit * unit if only_full else 0
        request.num_computed_tokens = valid
        self._count_lookup(request_id, valid)
        if valid:
            self._cache.cache_blocks(request, valid)
        else:
            self._cache.free(request)
        return self.recomputes

    def cancel(self, request: Request) -> bool:
        """Give up a request's load if one is under way; False: its blocks must be kept until the load is over."""
        done = self._give_up(request)
        self._count_lookup(request.request_id, 0)
        self._forget(request.request_id)
        return done

    def restart_loading(self) -> list[Request]:
        """Give up all loads that can be and return their requests, without blocks, to be admitted anew."""
        restarted = [request for request in self.queue if self._give_up(request)]
        self.queue.remove(restarted)
        for request in restarted:
            request.status = self._before_load.get(request.request_id, request.status)
            self._lookups.pop(request.request_id, None)  # it will look again
            self._forget(request.request_id)
            self._cache.free(request)
            request.num_computed_tokens = 0
        return restarted

    def _give_up(self, request: Request) -> bool:
        request_id = request.request_id
        loading = request_id in self._before_load and request_id not in self._over
        return not loading or self.connector is None or self.connector.cancel_load(request_id)

    def _forget(self, request_id: str) -> None:
        self._before_load.pop(request_id, None)
        self._over.discard(request_id)
        self._failed.pop(request_id, None)

    # ---- requests that have ended

    def request_finished(self, request: Request, *, keep: bool) -> bool:
        """Tell the connector that a request ended; whether its blocks can be freed now.

        `keep`: a load still writes to them.
        """
        if self.connector is not None:
            blocks = self._cache.coordinator.blocks_of(request.request_id)
            settled = request.num_computed_tokens - request.num_in_flight_tokens
            if (
                request.status is RequestStatus.FINISHED_ABORTED
                or request.status is RequestStatus.FINISHED_ERROR
            ):
                settled = 0  # what it hit may be computed by a step that has not run yet
            keep |= self.connector.request_finished(request, blocks, max(0, settled))
        if keep:
            self._ended[request.request_id] = request
        return not keep

    @property
    def keeps(self) -> frozenset[str]:
        """The ids of ended requests whose blocks are still held."""
        return frozenset(self._ended)

    # ---- what the connector reports

    def take(self, output: ConnectorOutput, plan: StepPlan, in_flight: InFlight) -> list[Request]:
        """Take in what is over; returns requests that were to go on from what did not come, with the hashes evicted.

        `plan`: the one whose synchronous loads have just been done; `in_flight`: those after it. They do not run the
        requests returned, nor those that have ended and would read the same.
        """
        bad: set[int] = set()
        for request_id, first in output.failed_loads.items():
            if request_id in self._before_load:
                self._fails_from(request_id, first)
            elif (
                request_id in plan.requests
            ):  # else it was stopped before, and nobody can have gone on from it
                bad |= self._cache.block_ids_from(in_flight.block_ids(request_id), first)
        stopped = self._stop_readers(bad, plan, in_flight) if bad else []
        for request_id in plan.requests if self._lookups else ():  # their loads, if any, have just been done
            if request_id not in self._before_load:
                self._count_lookup(request_id)
        for request_id in output.finished_recving:
            if request_id in self._before_load:
                self._over.add(request_id)
            else:
                self._free_ended(request_id)
        for request_id in output.finished_sending:
            self._free_ended(request_id)
        return stopped

    def _stop_readers(self, bad: set[int], plan: StepPlan, in_flight: InFlight) -> list[Request]:
        """Find all that goes on from blocks whose content did not come, and make those blocks unfindable.

        What a request computes after a bad block is bad too, and others may have hit that.
        """
        stopped = in_flight.stop_readers(plan, bad)
        self._cache.pool.evict_blocks(bad)
        for request in list(
            self.queue
        ):  # what they hit may be bad; nobody can go on from what they will compute
            first = self._cache.first_token_in(self._cache.block_ids(request.request_id), bad)
            if first is None:
                continue
            if request.request_id in self._before_load:
                self._fails_from(request.request_id, first)
            else:  # loaded and not yet admitted: it looks again
                self._count_failure(request, first, request.num_computed_tokens)
                self._cache.free(request)
                request.num_computed_tokens = 0
        for request in (r for r in stopped if not r.status.is_finished):
            first = self._cache.first_token_in(self._cache.block_ids(request.request_id), bad)
            self._count_failure(request, first or 0, request.num_computed_tokens)
            self._count_lookup(request.request_id, first or 0)
        return stopped

    def _fails_from(self, request_id: str, first: int) -> None:
        self._failed[request_id] = min(first, self._failed.get(request_id, first))

    def _count_failure(self, request: Request, first: int, computed: int) -> None:
        request.lose_cached_tokens(first)
        self.load_stats.failed_requests += 1
        self.load_stats.failed_tokens += max(0, computed - first)

    def _free_ended(self, request_id: str) -> None:
        request = self._ended.pop(request_id, None)
        if request is not None:
            self._cache.free(request)

    @property
    def recomputes(self) -> bool:
        """Whether a request whose load failed is computed instead; else it ends with an error."""
        return self.connector is None or self.connector.kv_load_failure_policy == "recompute"
