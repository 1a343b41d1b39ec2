"""The router's choices on a clock of the test's own: the reference engine's core, no socket and no waiting.

The same chats as `benchmarks/bench_router.py` has, which measures the whole router on a real clock. Here two runs are
the same, whatever else the machine does.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import kvhash_router.fleet
import kvhash_router.router
from kvhash_router.config import EngineConfig, HashSettings, ModelConfig, RouterConfig
from kvhash_router.decision import Knowledge, Policy
from kvhash_router.prompts import PromptHasher
from kvhash_router.residency import Known, Residency
from kvhash_router.router import Router, Survey

from engine_ref.coordinator import CacheConfig
from engine_ref.core import EngineCore
from engine_ref.request import Request
from engine_ref.runner import NullRunner
from engine_ref.scheduler import SchedulerConfig
from engine_ref.spec import FullAttentionSpec
from kvhash.events.schema import EventBatch
from kvhash.index import ResidencyIndex

__all__ = ["Outcome", "simulate"]

SPEED = 8_000.0
_BLOCK, _POOL, _STEP_S = 16, 640, 0.005
_SESSIONS, _TURNS, _SYSTEM, _USER, _ANSWER = 64, 5, 384, 48, 16
#: From a request's arrival to its engine, and from a step's end to the index.
_DECIDING_S, _EVENTS_S = 0.003, 0.002
_MODEL = ModelConfig(hash=HashSettings(algorithm="sha256_cbor", hash_seed="0", block_size=_BLOCK))


@dataclass
class Outcome:
    """What all chats got: seconds to the first token and to the last, tokens computed, requests by engine."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    computed: int = 0
    requests: Counter[str] = field(default_factory=Counter)

    @property
    def first_p95(self) -> float:
        """Seconds to the first token that 95 of 100 requests did not exceed."""
        return sorted(self.first)[int(0.95 * len(self.first))]

    @property
    def whole_p95(self) -> float:
        """Seconds to the last token that 95 of 100 requests did not exceed."""
        return sorted(self.whole)[int(0.95 * len(self.whole))]


class _Clock:
    """Stands in for the module `time`, and calls what is due."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def monotonic(self) -> float:
        return self.now

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._number), call))

    def run(self) -> None:
        while self._due:
            self.now, _, call = heapq.heappop(self._due)
            call()


class _Runner(NullRunner):
    tokens = 0

    def execute(self, plan: Any, requests: Any) -> dict[str, list[int]]:
        self.tokens = plan.total_tokens
        return super().execute(plan, requests)


#: Called with the new tokens, and whether they are the last.
_Heard = Callable[[Sequence[int], bool], None]


class _Engine:
    def __init__(self, clock: _Clock, speed: float, publish: Callable[[EventBatch], None]) -> None:
        self._clock, self._speed, self._publish = clock, speed, publish
        self._runner = _Runner()
        self._events: list[Any] = []
        self._heard: dict[str, _Heard] = {}
        self._busy = False
        cache = CacheConfig(
            groups=(FullAttentionSpec(block_size=_BLOCK),),
            num_blocks=_POOL,
            hash_block_size=_BLOCK,
            scheduler_block_size=_BLOCK,
            max_model_len=32_768,
        )
        limits = SchedulerConfig(cache=cache, max_num_seqs=256, max_num_batched_tokens=2048)
        self._core = EngineCore(limits, self._runner, publish=self._events.extend)

    def submit(self, request: Request, heard: _Heard) -> None:
        self._heard[request.request_id] = heard
        self._core.add_request(request)
        if not self._busy:
            self._step()

    def _step(self) -> None:
        self._busy = self._core.has_work
        if not self._busy:
            return
        self._runner.tokens = 0
        result = self._core.step()
        batch = EventBatch(ts=self._clock.now, events=tuple(self._events), data_parallel_rank=0)
        self._events.clear()
        ended = {request.request_id for request in result.finished}

        def done() -> None:
            if batch.events:
                self._clock.after(_EVENTS_S, lambda: self._publish(batch))
            for name in sorted({*result.tokens, *ended}):
                self._heard[name](result.tokens.get(name, ()), name in ended)
            self._step()

        self._clock.after(_STEP_S * SPEED / self._speed + self._runner.tokens / self._speed, done)


def simulate(
    monkeypatch: Any, strategy: Any, speeds: Sequence[float], *, seed: int, think_s: float = 1.5
) -> Outcome:
    """Hold all chats at engines of these speeds, in tokens a second; returns what they got."""
    clock, outcome = _Clock(), Outcome()
    names = [f"e{i}" for i in range(len(speeds))]
    config = RouterConfig(
        models={"demo": _MODEL},
        engines=tuple(EngineConfig(url="http://127.0.0.1:1", name=name, model="demo") for name in names),
        policy=Policy(strategy=strategy),
    )
    index = ResidencyIndex()
    engines = {
        name: _Engine(clock, speed, lambda batch, name=name: index.apply(name, batch))  # type: ignore[misc]
        for name, speed in zip(names, speeds, strict=True)
    }
    known = dict.fromkeys(names, Known(Knowledge.EXACT))
    hasher = PromptHasher("demo", _MODEL)
    numbers = itertools.count()

    def ask(prompt: list[int], then: Callable[[list[int]], None]) -> None:
        began = clock.now
        plan = hasher.plan({"prompt": prompt, "max_tokens": _ANSWER}, None)
        held = index.longest_prefix(plan.prompts[0].hashes, names, num_tokens=len(prompt))
        matched = {name: match.usable_tokens for name, match in held.items()}
        survey = Survey(plan, matched, {}, known if strategy == "prefix" else {}, 0.0)
        decision = router.choose(survey)
        assert decision is not None
        outcome.requests[decision.engine] += 1
        ticket = router.begin(survey, decision)
        request = Request(
            f"r{next(numbers):04}", prompt, hasher=hasher.hasher, max_tokens=_ANSWER, cache_salt=None
        )
        made: list[int] = []

        def heard(tokens: Sequence[int], last: bool) -> None:
            if tokens:
                if not made:
                    outcome.first.append(clock.now - began)
                ticket.first()
                ticket.progress(1)
                made.extend(tokens)
            if last:
                outcome.whole.append(clock.now - began)
                computed = len(prompt) - request.num_cached_tokens
                outcome.computed += computed
                ticket.finished(uncached_tokens=float(computed), output_tokens=len(made), streamed=True)
                then(made)

        engines[decision.engine].submit(request, heard)

    def chat(number: int) -> None:
        generator = random.Random(1000 * seed + number)
        system = random.Random("system")
        history = [system.randrange(32_000) for _ in range(_SYSTEM)]
        turns = itertools.count()

        def turn() -> None:
            if next(turns) < _TURNS:
                history.extend(generator.randrange(32_000) for _ in range(_USER))
                clock.after(_DECIDING_S, lambda: ask(list(history), answered))

        def answered(tokens: list[int]) -> None:
            history.extend(tokens)
            clock.after(generator.expovariate(1 / think_s), turn)

        clock.after(generator.uniform(0, 2 * think_s), turn)

    with monkeypatch.context() as patched:
        for module in (kvhash_router.fleet, kvhash_router.router):
            patched.setattr(module, "time", clock)
        router = Router(config, Residency(index), draw=random.Random(seed).randrange)
        try:
            for number in range(_SESSIONS):
                chat(number)
            clock.run()
        finally:
            router.close()
    return outcome
