"""The router's metrics, in a registry of its own; engines and reasons are labels, prompts never are."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .decision import Knowledge
from .residency import Residency
from .router import EngineView

__all__ = ["RouterMetrics"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class RouterMetrics:
    """Counters that the proxy raises, and gauges that are read off the router when they are asked for."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "kvhash_router_requests", "Requests, by how they ended.", ("engine", "outcome"), registry=registry
        )
        self.decisions = Counter(
            "kvhash_router_decisions", "Choices of an engine, by what decided.", ("basis",), registry=registry
        )
        self.retries = Counter(
            "kvhash_router_retries",
            "Attempts that failed before the first byte.",
            ("engine",),
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "kvhash_router_prompt_tokens", "Prompt tokens sent.", ("engine",), registry=registry
        )
        self.predicted_tokens = Counter(
            "kvhash_router_predicted_cached_tokens",
            "Prompt tokens that the index said the chosen engine holds.",
            ("engine",),
            registry=registry,
        )
        self.cached_tokens = Counter(
            "kvhash_router_reported_cached_tokens",
            "Prompt tokens that engines reported as cached.",
            ("engine",),
            registry=registry,
        )
        self.other_prompts = Counter(
            "kvhash_router_other_prompts",
            "Answers to prompts of which the engine counted other tokens than were hashed here.",
            ("engine",),
            registry=registry,
        )
        self.unhashed = Counter(
            "kvhash_router_unhashed_requests",
            "Requests that cannot be looked up.",
            ("reason",),
            registry=registry,
        )
        self.log_dropped = Counter(
            "kvhash_router_log_dropped", "Decisions that the log could not take in time.", registry=registry
        )
        self.config_errors = Counter(
            "kvhash_router_config_errors", "New configurations that could not be used.", registry=registry
        )
        self.first_byte = Histogram(
            "kvhash_router_first_byte_seconds",
            "From a request's arrival to its answer's first byte.",
            ("engine",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.deciding = Histogram(
            "kvhash_router_decision_seconds",
            "Tokenizing, hashing, looking up and choosing.",
            buckets=_SECONDS,
            registry=registry,
        )
        by_engine = ("engine",)
        self._up = Gauge("kvhash_router_engine_up", "1: takes requests.", by_engine, registry=registry)
        self._in_flight = Gauge(
            "kvhash_router_in_flight_requests", "Requests at the engine.", by_engine, registry=registry
        )
        self._queued = Gauge(
            "kvhash_router_queued_tokens", "Work at the engine, in tokens.", by_engine, registry=registry
        )
        self._speed = Gauge(
            "kvhash_router_engine_tokens_per_second", "Measured speed.", by_engine, registry=registry
        )
        self._knowledge = Gauge(
            "kvhash_router_knowledge",
            "1 for what is known of the engine's cache.",
            ("engine", "state"),
            registry=registry,
        )
        self._records = Gauge(
            "kvhash_router_event_records",
            "What came from the engine's event stream, by kind.",
            ("engine", "kind"),
            registry=registry,
        )
        self._store_up = Gauge("kvhash_router_store_up", "1: the index answers.", registry=registry)
        self._store_failures = Gauge(
            "kvhash_router_store_failures", "How often the index's store did not answer.", registry=registry
        )

    def render(self, views: Mapping[str, EngineView], residency: Residency) -> bytes:
        """Return the text that Prometheus reads."""
        gauges = (self._up, self._in_flight, self._queued, self._speed, self._knowledge, self._records)
        for gauge in gauges:
            gauge.clear()  # engines that are gone
        for name, view in views.items():
            self._up.labels(name).set(view.up)
            self._in_flight.labels(name).set(view.in_flight)
            self._queued.labels(name).set(view.queued_tokens)
            self._speed.labels(name).set(view.speed)
            for state in Knowledge:
                self._knowledge.labels(name, state.value).set(view.known.knowledge is state)
            for kind, count in view.records.items():
                self._records.labels(name, kind).set(count)
        self._store_up.set(residency.store_down_since is None)
        self._store_failures.set(residency.store_failures)
        return generate_latest(self.registry)
