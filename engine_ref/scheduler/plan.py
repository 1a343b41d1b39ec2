"""What the scheduler is told once, and what it plans for one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..coordinator import CacheConfig
from ..request import Request

__all__ = ["CachedRequest", "NewRequest", "SchedulerConfig", "StepPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """vLLM's settings under vLLM's names.

    ``max_num_batched_tokens``: tokens of a step. ``policy``: ``"fcfs"`` or ``"priority"``.
    ``long_prefill_token_threshold``: tokens of one prompt in a step while others wait or run; 0: no limit.
    ``scheduler_reserve_full_isl``: admit a request only when all its tokens fit.
    """

    cache: CacheConfig
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    policy: str = "fcfs"
    async_scheduling: bool = False
    num_speculative_tokens: int = 0
    num_lookahead_tokens: int = 0
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduler_reserve_full_isl: bool = True

    @property
    def max_model_len(self) -> int:
        """The longest sequence, prompt and output together."""
        return self.cache.max_model_len


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that runs for the first time: its hit length and its whole block table."""

    request_id: str
    num_computed_tokens: int
    block_ids: list[list[int]]


class CachedRequest(NamedTuple):
    """A request that ran before: the blocks it gets now, None for none; a resumed one gets its whole table."""

    request_id: str
    num_computed_tokens: int
    new_block_ids: list[list[int]] | None
    resumed: bool


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """One step. ``num_scheduled_tokens``: tokens of each request, in the order in which they were planned.

    ``requests``: those that the step will run. One that ends before the step has run stays: others may have hit the
    blocks that it fills.
    """

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    new_requests: list[NewRequest] = field(default_factory=list)
    cached_requests: list[CachedRequest] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    spec_token_ids: dict[str, list[int]] = field(default_factory=dict)
    #: Requests whose last token of this step gives an output token.
    samples: dict[str, bool] = field(default_factory=dict)
    #: (source, copy) block ids to be copied before the step runs.
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    #: What the connector must load before the step runs.
    connector_meta: Any = None

    @property
    def total_tokens(self) -> int:
        """Tokens of all requests."""
        return sum(self.num_scheduled_tokens.values())
