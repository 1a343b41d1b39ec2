"""What goes in and out of an engine: requests as plain data, and after each step its outputs and what it counted.

All of it is msgspec structs, so an engine can run in this process or in another.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .sampling import TokenLogprobs

__all__ = ["EngineRequest", "EngineStats", "FinishedRequest", "Output", "StepReport"]


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request, checked by the front and not hashed yet; fields as those of `engine_ref.request.Request`."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int = 16
    min_tokens: int = 0
    eos_token_id: int | None = None
    stop_token_ids: list[int] = []
    cache_salt: str | None = None
    lora: dict[str, Any] | None = None
    multimodal: list[dict[str, Any]] | None = None
    prompt_embeds: dict[str, Any] | None = None
    priority: int = 0
    arrival_time: float = 0.0
    skip_reading_prefix_cache: bool = False
    #: Fields of `engine_ref.sampling.SamplingParams`; None: greedy.
    sampling: dict[str, Any] | None = None


class Output(msgspec.Struct, frozen=True):
    """New tokens of a request. ``finish_reason``: set with its last ones (stop, length, abort, error).

    ``error``: what went wrong; ``refused``: it is the request that is wrong, not the engine; ``stopped``:
    there is no engine any more.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    refused: bool = False
    stopped: bool = False
    #: Of each new token, where the request asks for them and the runner knows them.
    logprobs: list[TokenLogprobs | None] | None = None
    #: Of each prompt token, with the first output.
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class FinishedRequest(msgspec.Struct, frozen=True):
    """A request that ended, as metrics count it."""

    prompt_tokens: int
    generation_tokens: int
    max_tokens: int
    preemptions: int
    reason: str
    request_id: str = ""


class EngineStats(msgspec.Struct, kw_only=True):
    """Gauges of now, and counts since the last report. Queries and hits are tokens of admitted requests."""

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    requests: int = 0
    queries: int = 0
    hits: int = 0
    external_requests: int = 0
    external_queries: int = 0
    external_hits: int = 0
    external_hits_by_source: dict[str, int] = msgspec.field(default_factory=dict)
    preemptions: int = 0
    prompt_tokens: int = 0
    local_prompt_tokens: int = 0
    external_prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: list[FinishedRequest] = msgspec.field(default_factory=list)
    running_lora: list[str] = msgspec.field(default_factory=list)
    waiting_lora: list[str] = msgspec.field(default_factory=list)
    cache_reset: bool = False
    #: What the connector's parts counted since the last report: by part and counter.
    connector: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)


class StepReport(msgspec.Struct, frozen=True):
    """What one step, or one operation between steps, gave."""

    rank: int
    outputs: list[Output]
    stats: EngineStats
