"""The engine's metrics under vLLM's names, for `/metrics`; hit rates count tokens."""

from __future__ import annotations

from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from .request import Request
from .scheduler import Scheduler

__all__ = ["EngineMetrics", "HitRate"]


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
    def value(self) -> float:
        """0.0 to 1.0; 0.0 before the first request."""
        return self._hits / self._queries if self._queries else 0.0


class EngineMetrics:
    """The metrics of one engine, in a registry of its own.

    Queries and hits are tokens of admitted requests; those of preempted requests that start again are not counted.
    """

    def __init__(self, model_name: str, *, engine: int = 0) -> None:
        self.registry = CollectorRegistry()
        self.hit_rate = HitRate()
        self._seen = (0, 0, 0)
        names, values = ("model_name", "engine"), (model_name, str(engine))

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, names, registry=self.registry).labels(*values)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, names, registry=self.registry).labels(*values)

        self._queries = counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._hits = counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.")
        self._external_queries = counter(
            "vllm:external_prefix_cache_queries", "Tokens looked up in KV connectors, after the local hit."
        )
        self._external_hits = counter("vllm:external_prefix_cache_hits", "Tokens found in KV connectors.")
        self._usage = gauge("vllm:kv_cache_usage_perc", "Share of KV cache blocks in use, 0 to 1.")
        self._running = gauge("vllm:num_requests_running", "Requests in the running batch.")
        self._waiting = gauge("vllm:num_requests_waiting", "Requests waiting to be admitted.")
        self._preemptions = counter("vllm:num_preemptions", "Preemptions.")
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of finished requests.")
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self._by_source = Counter(
            "vllm:prompt_tokens_cached_by_source",
            "Tokens found in caches, by the tier that had them; the sum of local and external hits.",
            (*names, "source"),
            registry=self.registry,
        )
        self._label_values = values
        self._success = Counter(
            "vllm:request_success", "Finished requests.", (*names, "finished_reason"), registry=self.registry
        )

    def observe_step(self, scheduler: Scheduler, generated: int) -> None:
        """Take in the state after a step and how many tokens it gave."""
        stats = scheduler.cache.stats
        now = (stats.requests, stats.queries, stats.hits)
        requests, queries, hits = (a - b for a, b in zip(now, self._seen, strict=True))
        self._seen = now
        self._queries.inc(queries)
        self._hits.inc(hits)
        self._by_source.labels(*self._label_values, "device").inc(hits)
        self.hit_rate.observe(requests, queries, hits)
        self._usage.set(scheduler.cache.pool.usage)
        self._running.set(len(scheduler.running))
        self._waiting.set(len(scheduler.waiting))
        self._generation_tokens.inc(generated)

    def observe_finished(self, request: Request) -> None:
        """Count a request that ended."""
        self._prompt_tokens.inc(request.num_prompt_tokens)
        self._preemptions.inc(request.num_preemptions)
        self._success.labels(*self._label_values, request.status.value).inc()

    def render(self) -> bytes:
        """Return the text that Prometheus reads."""
        return generate_latest(self.registry)
