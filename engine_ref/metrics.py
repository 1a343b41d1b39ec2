"""The engine's metrics under vLLM's names, for `/metrics` and the log; hit rates count tokens.

The front keeps them, from the reports of its engines, whatever process these run in.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .report import EngineStats, FinishedRequest

__all__ = ["EngineMetrics", "HitRate"]

_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
    *(160, 640, 2560),
)
_BETWEEN_TOKENS = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
_TIERS = ("device", "host", "disk", "p2p", "external_unspecified")


class HitRate:
    """The share of tokens hit over the last `window` requests."""

    def __init__(self, window: int = 1000) -> None:
        self._window = window
        self._parts: deque[tuple[int, int, int]] = deque()
        self._requests = self._queries = self._hits = 0

    def observe(self, requests: int, queries: int, hits: int) -> None:
        """Add what one step's admissions looked up."""
        if not requests:
            return
        self._parts.append((requests, queries, hits))
        self._requests, self._queries, self._hits = (
            self._requests + requests,
            self._queries + queries,
            self._hits + hits,
        )
        while len(self._parts) > 1 and self._requests > self._window:
            requests, queries, hits = self._parts.popleft()
            self._requests -= requests
            self._queries -= queries
            self._hits -= hits

    def reset(self) -> None:
        """Forget: the cache was reset."""
        self._parts.clear()
        self._requests = self._queries = self._hits = 0

    @property
    def empty(self) -> bool:
        """Whether nothing was looked up yet."""
        return not self._requests

    @property
    def value(self) -> float:
        """0.0 to 1.0; 0.0 before the first request."""
        return self._hits / self._queries if self._queries else 0.0


class EngineMetrics:
    """The metrics of all ranks behind one front, in a registry of their own.

    Queries and hits are tokens of admitted requests; those of preempted requests that start again are not counted.
    ``cache_config``: what ``vllm:cache_config_info`` says. ``max_loras``: None without adapters.
    """

    def __init__(
        self,
        model_name: str,
        *,
        ranks: int = 1,
        max_model_len: int = 4096,
        cache_config: Mapping[str, object] | None = None,
        max_loras: int | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._max_loras = max_loras
        self.ranks = [_RankMetrics() for _ in range(ranks)]
        names = ("model_name", "engine")

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"vllm:{name}", text, (*names, *more), registry=self.registry)

        def gauge(name: str, text: str, *more: str) -> Gauge:
            return Gauge(f"vllm:{name}", text, (*names, *more), registry=self.registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"vllm:{name}", text, names, registry=self.registry, buckets=buckets)

        self._running = gauge("num_requests_running", "Requests in the running batch.")
        self._waiting = gauge("num_requests_waiting", "Requests waiting to be admitted.")
        self._usage = gauge("kv_cache_usage_perc", "Share of KV cache blocks in use, 0 to 1.")
        self._queries = counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._hits = counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self._external_queries = counter(
            "external_prefix_cache_queries", "Tokens looked up in KV connectors, after the local hit."
        )
        self._external_hits = counter("external_prefix_cache_hits", "Tokens found in KV connectors.")
        self._preemptions = counter("num_preemptions", "Preemptions.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that gave a first token.")
        self._prompt_by_source = counter("prompt_tokens_by_source", "Prompt tokens by source.", "source")
        self._prompt_cached = counter("prompt_tokens_cached", "Prompt tokens cached, local and external.")
        self._by_tier = counter(
            "prompt_tokens_cached_by_source",
            "Tokens found in caches, by the tier that had them; the sum of local and external hits.",
            "source",
        )
        self._generation_tokens = counter("generation_tokens", "Tokens generated.")
        self._success = counter("request_success", "Finished requests.", "finished_reason")
        lengths = list(_one_two_five(max_model_len))
        self._request_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", lengths)
        self._request_generation = histogram(
            "request_generation_tokens", "Tokens generated for a request.", lengths
        )
        self._request_max_tokens = histogram(
            "request_params_max_tokens", "The max_tokens of a request.", lengths
        )
        self._request_preemptions = histogram(
            "request_num_preemptions", "Preemptions of a request.", (1, 2, 3, 4, 5, 10, 20)
        )
        self._first_token = histogram("time_to_first_token_seconds", "Time to first token.", _FIRST_TOKEN)
        self._between = histogram(
            "inter_token_latency_seconds", "Time between two outputs of a request.", _BETWEEN_TOKENS
        )
        self._latency = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _LATENCY)
        self._connector = Counter(
            "kvhash:connector_events",
            "What KV connectors counted, by part (the connector, or a tier) and counter.",
            (*names, "part", "event"),
            registry=self.registry,
        )
        self._lora: Gauge | None = None
        if max_loras is not None:
            self._lora = Gauge(
                "vllm:lora_requests_info",
                "Adapters of running and waiting requests.",
                ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
                registry=self.registry,
            )
        if cache_config is not None:
            info = {name: str(value) for name, value in cache_config.items()}
            known = Gauge(
                "vllm:cache_config_info", "The cache's settings.", (*info, "engine"), registry=self.registry
            )
            for rank in range(ranks):
                known.labels(**info, engine=str(rank)).set(1)
        for rank in range(ranks):
            self._start(rank)

    def _start(self, rank: int) -> None:
        """Make every series of a rank, so that it reads 0 before the first request."""
        labels = self._labels(rank)
        for metric in (
            *(self._running, self._waiting, self._usage, self._queries, self._hits, self._external_queries),
            *(self._external_hits, self._preemptions, self._prompt_tokens, self._prompt_cached),
            *(self._generation_tokens, self._request_prompt, self._request_generation),
            *(self._request_max_tokens, self._request_preemptions, self._first_token, self._between),
            self._latency,
        ):
            metric.labels(*labels)
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
            self._prompt_by_source.labels(*labels, source)
        for tier in _TIERS:
            self._by_tier.labels(*labels, tier)
        for reason in _FINISH_REASONS:
            self._success.labels(*labels, reason)

    def _labels(self, rank: int) -> tuple[str, str]:
        return self._model_name, str(rank)

    def observe(self, rank: int, stats: EngineStats) -> None:
        """Take in a report of a rank's engine."""
        labels = self._labels(rank)
        of_rank = self.ranks[rank]
        of_rank.observe(stats)
        self._running.labels(*labels).set(stats.running)
        self._waiting.labels(*labels).set(stats.waiting)
        self._usage.labels(*labels).set(stats.kv_cache_usage)
        for metric, count in (
            (self._queries, stats.queries),
            (self._hits, stats.hits),
            (self._external_queries, stats.external_queries),
            (self._external_hits, stats.external_hits),
            (self._preemptions, stats.preemptions),
            (self._prompt_tokens, stats.prompt_tokens),
            (self._prompt_cached, stats.local_prompt_tokens + stats.external_prompt_tokens),
            (self._generation_tokens, stats.generation_tokens),
        ):
            if count:
                metric.labels(*labels).inc(count)
        if stats.hits:
            self._by_tier.labels(*labels, "device").inc(stats.hits)
        for tier, count in stats.external_hits_by_source.items():
            self._by_tier.labels(*labels, tier).inc(count)
        for part, counters in stats.connector.items():
            for name, count in counters.items():
                self._connector.labels(*labels, part, name).inc(max(count, 0))
        if stats.prompt_tokens:
            cached = stats.local_prompt_tokens + stats.external_prompt_tokens
            for source, count in (
                ("local_compute", stats.prompt_tokens - cached),
                ("local_cache_hit", stats.local_prompt_tokens),
                ("external_kv_transfer", stats.external_prompt_tokens),
            ):
                self._prompt_by_source.labels(*labels, source).inc(max(count, 0))
        for request in stats.finished:
            self._observe_finished(labels, request)
        if self._lora is not None and (stats.running_lora or stats.waiting_lora or of_rank.had_lora):
            of_rank.had_lora = bool(stats.running_lora or stats.waiting_lora)
            self._lora.clear()
            self._lora.labels(
                str(self._max_loras), ",".join(stats.waiting_lora), ",".join(stats.running_lora)
            ).set(time.time())

    def _observe_finished(self, labels: tuple[str, str], request: FinishedRequest) -> None:
        self._success.labels(*labels, request.reason).inc()
        self._request_prompt.labels(*labels).observe(request.prompt_tokens)
        self._request_generation.labels(*labels).observe(request.generation_tokens)
        self._request_max_tokens.labels(*labels).observe(request.max_tokens)
        self._request_preemptions.labels(*labels).observe(request.preemptions)

    def observe_times(
        self,
        rank: int,
        *,
        first_token: float | None = None,
        between: float | None = None,
        whole: float | None = None,
    ) -> None:
        """Take in durations of a request, in seconds, as the front saw them."""
        labels = self._labels(rank)
        for metric, seconds in (
            (self._first_token, first_token),
            (self._between, between),
            (self._latency, whole),
        ):
            if seconds is not None:
                metric.labels(*labels).observe(seconds)

    def render(self) -> bytes:
        """Return the text that Prometheus reads."""
        return generate_latest(self.registry)


class _RankMetrics:
    """What the log line of one rank says."""

    def __init__(self) -> None:
        self.hit_rate = HitRate()
        self.external_hit_rate = HitRate()
        self.had_lora = False
        self._last = EngineStats()
        self._since = time.monotonic()
        self._prompt = self._generated = self._preempted = 0
        self._idle = True

    def observe(self, stats: EngineStats) -> None:
        if stats.cache_reset:
            self.hit_rate.reset()
        self._last = stats
        self.hit_rate.observe(stats.requests, stats.queries, stats.hits)
        self.external_hit_rate.observe(stats.external_requests, stats.external_queries, stats.external_hits)
        cached = stats.local_prompt_tokens + stats.external_prompt_tokens
        self._prompt += stats.prompt_tokens - cached
        self._generated += stats.generation_tokens
        self._preempted += stats.preemptions

    def line(self) -> str | None:
        """Return what happened since the last call, in vLLM's words; None after two intervals without work."""
        now = time.monotonic()
        seconds = max(now - self._since, 1e-9)
        quiet = not (self._prompt or self._generated or self._last.running or self._last.waiting)
        was_idle, self._idle = self._idle, quiet
        parts = [
            f"Avg prompt throughput: {self._prompt / seconds:.1f} tokens/s",
            f"Avg generation throughput: {self._generated / seconds:.1f} tokens/s",
            f"Running: {self._last.running} reqs",
            f"Waiting: {self._last.waiting} reqs",
        ]
        if self._preempted:
            parts.append(f"Preemptions: {self._preempted}")
        parts.append(f"GPU KV cache usage: {self._last.kv_cache_usage:.1%}")
        if not self.hit_rate.empty:
            parts.append(f"Prefix cache hit rate: {self.hit_rate.value:.1%}")
        if not self.external_hit_rate.empty:
            parts.append(f"External prefix cache hit rate: {self.external_hit_rate.value:.1%}")
        self._since = now
        self._prompt = self._generated = self._preempted = 0
        return None if quiet and was_idle else ", ".join(parts)


def _one_two_five(largest: int) -> Iterator[int]:
    """Yield 1, 2, 5, 10, 20, 50 and so on up to `largest`."""
    unit = 1
    while True:
        for digit in (1, 2, 5):
            if digit * unit > largest:
                return
            yield digit * unit
        unit *= 10
