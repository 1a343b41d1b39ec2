"""The engines as the router sees them: who can take requests, and what work each has. Used by one event loop only.

An engine's queued tokens are counted here, not asked for: the uncached prompt tokens of its requests that have no
first token yet, and the output tokens that are still expected, from the mean of what was generated before. Its recent
tokens are the same of all requests that it was sent, and fade. Prefixes
of its unfinished requests count as held: their blocks are, or will be before a later request is looked up there.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvhash.block_hash import ChainValue

from .config import EngineConfig
from .decision import Policy
from .prompts import HashedPrompt, Plan
from .speeds import SpeedBook

__all__ = ["EngineState", "Fleet", "Ticket"]

#: Output tokens that a request is taken to make before any were counted.
_FIRST_GUESS = 64.0
#: How much the newest request moves the mean of output tokens.
_SHARE = 0.05
#: Seconds in which half of the recent tokens is gone.
_RECENT_HALF_LIFE_S = 10.0


@dataclass(slots=True)
class EngineState:
    """One engine. ``removed``: it is no longer configured, and ends when its last request has."""

    config: EngineConfig
    up: bool = True
    failures: int = 0
    last_failure: str | None = None
    removed: bool = False
    in_flight: int = 0
    queued_tokens: float = 0.0
    requests: int = 0
    held: Counter[ChainValue] = field(default_factory=Counter)
    _recent: float = 0.0
    _recent_at: float = 0.0
    #: Called when it goes down.
    leaving: set[Callable[[], None]] = field(default_factory=set, compare=False)

    @property
    def name(self) -> str:
        """The engine's name."""
        return self.config.name

    def recent_tokens(self, now: float) -> float:
        """Return the work that it was sent lately, in tokens; `now` by time.monotonic()."""
        if now > self._recent_at:
            self._recent *= 0.5 ** ((now - self._recent_at) / _RECENT_HALF_LIFE_S)
            self._recent_at = now
        return self._recent

    def sent(self, tokens: float, now: float) -> None:
        """Take in that it was sent a request of so much work."""
        self._recent = self.recent_tokens(now) + tokens

    def held_tokens(self, plan: Plan) -> int:
        """Return how many of the plan's prompt tokens its unfinished requests hold."""
        return sum(self._held_of(one) for one in plan.prompts)

    def _held_of(self, prompt: HashedPrompt) -> int:
        # The last token is always computed, for its logits.
        most = max(0, prompt.num_tokens - 1) // prompt.span
        return min(_held(self.held, prompt.hashes), most) * prompt.span


def _held(held: Counter[ChainValue], hashes: Sequence[ChainValue]) -> int:
    """Return the length of the longest held prefix; what is held is closed under prefixes, so halving finds it."""
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[middle - 1] in held:
            low = middle
        else:
            high = middle - 1
    return low


class Ticket:
    """One request's work at one engine, from when it is sent until `close`."""

    def __init__(self, fleet: Fleet, engine: EngineState, plan: Plan, uncached_tokens: float) -> None:
        self._fleet = fleet
        self.engine = engine
        self._plan = plan
        self._prefill = uncached_tokens
        #: What was expected to be computed of the prompts.
        self.uncached_tokens = uncached_tokens
        self._output = fleet.expected_output(plan) * fleet.policy.output_weight
        self._closed = False
        #: The work before this request when it was sent.
        self.queued_before = engine.queued_tokens
        self.sent_at = time.monotonic()
        self.first_at: float | None = None
        self.generated = 0
        engine.in_flight += 1
        engine.requests += 1
        engine.queued_tokens += self._prefill + self._output
        engine.sent(self._prefill + self._output + fleet.policy.overhead_tokens, self.sent_at)
        for prompt in plan.prompts:
            engine.held.update(prompt.hashes)

    def first(self) -> None:
        """Say that the first token came: the prompt is computed."""
        if self.first_at is None:
            self.first_at = time.monotonic()
            self.engine.queued_tokens -= self._prefill
            self._prefill = 0.0

    def progress(self, tokens: int) -> None:
        """Say that output tokens came."""
        self.generated += tokens
        done = min(self._output, tokens * self._fleet.policy.output_weight)
        self._output -= done
        self.engine.queued_tokens -= done

    def close(self) -> None:
        """End the request's work here, however it ended; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        engine = self.engine
        engine.in_flight -= 1
        engine.queued_tokens -= self._prefill + self._output
        if engine.in_flight == 0:
            engine.queued_tokens = 0.0  # no rounding is left behind
            engine.held.clear()
        else:
            for prompt in self._plan.prompts:
                for value in prompt.hashes:
                    if engine.held[value] <= 1:
                        del engine.held[value]
                    else:
                        engine.held[value] -= 1

    def finished(self, *, uncached_tokens: float, output_tokens: int, streamed: bool) -> None:
        """Take a whole answer as a measurement of the engine's speed, and close."""
        now = time.monotonic()
        work = self.queued_before + uncached_tokens + self._fleet.policy.overhead_tokens
        if streamed and self.first_at is not None:
            self._fleet.speeds.observe(
                self.engine.name, "first", work=work, seconds=self.first_at - self.sent_at, now=now
            )
        elif not streamed:
            work += output_tokens * self._fleet.policy.output_weight
            self._fleet.speeds.observe(
                self.engine.name, "whole", work=work, seconds=now - self.sent_at, now=now
            )
        self._fleet.saw_output(self._plan.model, output_tokens)
        self.close()


class Fleet:
    """All engines, by name."""

    def __init__(self, *, policy: Policy, speeds: SpeedBook | None = None) -> None:
        self.policy = policy
        self.speeds = speeds if speeds is not None else SpeedBook()
        self.engines: dict[str, EngineState] = {}
        self._outputs: dict[str, float] = {}
        self._turn = itertools.count()

    def set_engines(self, configs: Iterable[EngineConfig]) -> tuple[list[EngineState], list[EngineState]]:
        """Make the engines those of `configs`; returns what was added and what removed. A changed one is both."""
        wanted = {config.name: config for config in configs}
        removed = [state for name, state in self.engines.items() if wanted.get(name) != state.config]
        for state in removed:
            state.removed = True
            del self.engines[state.name]
            self.speeds.forget(state.name)
        added = [EngineState(config) for name, config in wanted.items() if name not in self.engines]
        for state in added:
            self.engines[state.name] = state
        return added, removed

    def available(self, model: str, *, excluded: Iterable[str] = ()) -> list[EngineState]:
        """Return the engines of `model` that are up; all of them when none is, since a check may be wrong."""
        tried = set(excluded)
        engines = [e for e in self.engines.values() if e.config.model == model and e.name not in tried]
        return [e for e in engines if e.up] or engines

    def next_turn(self) -> int:
        """Return 0, 1, 2, ...: for choosing engines in turn."""
        return next(self._turn)

    def expected_output(self, plan: Plan) -> float:
        """Return the output tokens that a request is taken to make."""
        mean = self._outputs.get(plan.model, _FIRST_GUESS)
        return mean if plan.max_tokens is None else min(float(plan.max_tokens), mean)

    def saw_output(self, model: str, tokens: int) -> None:
        """Take in how many tokens a request of `model` made."""
        if tokens > 0:
            mean = self._outputs.get(model)
            self._outputs[model] = tokens if mean is None else mean + _SHARE * (tokens - mean)
