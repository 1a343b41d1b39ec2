"""The router without its HTTP side: plans a request, surveys what is known, chooses an engine, follows the fleet."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq

from kvhash import KvHashError

from .config import RouterConfig
from .decision import Candidate, Decision, Knowledge, decide
from .fleet import EngineState, Fleet, Ticket
from .following import EngineFollower
from .prompts import Plan, PromptHasher
from .residency import Known, Residency
from .verifying import Verification

__all__ = ["EngineView", "Router", "Survey"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
#: Bodies of more text than this are planned apart; it takes a tokenizer some tenths of a second.
_LONG_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Survey:
    """A request's plan, and of every engine of its model what it holds of the prompts and how well that is known.

    ``ranks``: by engine, the data parallel rank that holds what matched.
    """

    plan: Plan
    matched_tokens: Mapping[str, int]
    ranks: Mapping[str, int]
    known: Mapping[str, Known]
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine as `/debug/residency` and `/metrics` show it."""

    url: str
    model: str
    up: bool
    last_failure: str | None
    in_flight: int
    requests: int
    queued_tokens: float
    speed: float
    known: Known
    verification: Verification
    records: Mapping[str, int]
    last_record_at: float | None


def _is_text(body: Mapping[str, Any]) -> bool:
    """Whether there is something to tokenize: hashing token ids takes milliseconds, however many there are."""
    prompt = body.get("prompt")
    first = prompt[0] if isinstance(prompt, list) and prompt else prompt
    return "messages" in body or isinstance(first, str)


class Router:
    """Owns the fleet, the index's feeders and the hashers. All methods belong to one event loop unless they say so."""

    def __init__(
        self,
        config: RouterConfig,
        residency: Residency,
        *,
        draw: Callable[[int], int] | None = None,
        threads: int = 4,
    ) -> None:
        self._hashers: dict[str, PromptHasher] = {}
        hashers = self._make_hashers(config)
        self.residency = residency
        self.fleet = Fleet(policy=config.policy)
        self._draw = draw if draw is not None else random.Random().randrange
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="plan")
        # A text of a megabyte takes seconds to tokenize: such requests wait for each other, and no others for them.
        self._long_pool = ThreadPoolExecutor(max(1, threads // 2), thread_name_prefix="plan-long")
        self._context = zmq.Context()
        self._followers: dict[str, EngineFollower] = {}
        self._stopping: list[EngineFollower] = []
        self.config = config
        self._switch(config, hashers)

    # --- configuration --------------------------------------------------------------------------------------------

    async def reload(self, config: RouterConfig) -> None:
        """Route by `config` from now on; what is under way ends where it is. Raises ConfigError and changes nothing."""
        self._switch(config, await self.in_thread(self._make_hashers, config))

    def _make_hashers(self, config: RouterConfig) -> dict[str, PromptHasher]:
        """Make the hashers of changed models, which may load tokenizers; keep the others."""
        return {
            name: kept
            if (kept := self._hashers.get(name)) is not None and kept.config == model
            else PromptHasher(name, model)
            for name, model in config.models.items()
        }

    def _switch(self, config: RouterConfig, hashers: dict[str, PromptHasher]) -> None:
        changed = {name for name in hashers if hashers[name] is not self._hashers.get(name)}
        self.config, self._hashers = config, hashers
        self.fleet.policy = config.policy
        added, removed = self.fleet.set_engines(config.engines)
        again = [e for e in self.fleet.engines.values() if e.config.model in changed and e not in added]
        self._stopping = [follower for follower in self._stopping if follower.running]
        for engine in (*removed, *again):
            follower = self._followers.pop(engine.name)
            follower.stop()
            self._stopping.append(follower)
        last = {follower.engine.name: follower for follower in self._stopping}
        for engine in (*added, *again):
            self._followers[engine.name] = EngineFollower(
                engine.config,
                config.models[engine.config.model],
                self.residency,
                context=self._context,
                after=last.get(engine.name),
            )

    def close(self) -> None:
        """Stop following; blocks for up to a second."""
        followers = [*self._followers.values(), *self._stopping]
        for follower in followers:
            follower.stop()
        for follower in followers:
            follower.join()
        for pool in (self._pool, self._long_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        self._context.destroy(linger=0)

    def came_back(self, engine: EngineState) -> None:
        """Learn an engine's cache anew: its process was gone."""
        self.fleet.speeds.forget(engine.name)
        follower = self._followers.get(engine.name)
        if follower is not None:
            follower.begin_again()

    # --- one request ----------------------------------------------------------------------------------------------

    async def in_thread(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Run `function` on one of the router's threads."""
        return await self._run_in(self._pool, function, *arguments)

    @staticmethod
    async def _run_in(pool: ThreadPoolExecutor, function: Callable[..., _T], *arguments: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(pool, functools.partial(function, *arguments))

    async def survey(
        self, model: str, adapter: str | None, body: Mapping[str, Any], size: int, *, path: str | None = None
    ) -> Survey:
        """Tokenize, hash and look up `body`, of `size` bytes, sent to `path`, on a thread."""
        engines = [e.name for e in self.fleet.engines.values() if e.config.model == model]
        pool = self._long_pool if size > _LONG_BYTES and _is_text(body) else self._pool
        return await self._run_in(
            pool, self._survey, self._hashers[model], adapter, body, size, path, engines
        )

    def _survey(
        self,
        hasher: PromptHasher,
        adapter: str | None,
        body: Mapping[str, Any],
        size: int,
        path: str | None,
        engines: list[str],
    ) -> Survey:
        began = time.perf_counter()
        plan = hasher.plan(body, adapter, path=path, body_bytes=size)
        matched = dict.fromkeys(engines, 0)
        ranks: dict[str, int] = {}
        known: dict[str, Known] = {}
        if plan.prompts and self.config.policy.strategy == "prefix":
            known = {name: self._known(name, adapter) for name in engines}
            asked = [name for name in engines if known[name].knowledge is not Knowledge.UNKNOWN]
            for prompt in plan.prompts:
                held = self.residency.matches(prompt.hashes, prompt.num_tokens, asked)
                for name, match in held.items():
                    matched[name] += match.usable_tokens
                    if match.usable_tokens and match.rank is not None:
                        ranks.setdefault(name, match.rank)
        return Survey(plan, matched, ranks, known, time.perf_counter() - began)

    def _known(self, engine: str, adapter: str | None) -> Known:
        follower = self._followers.get(engine)
        if follower is None:
            return Known(Knowledge.UNKNOWN, "not-followed")
        try:
            return follower.known(adapter)
        except KvHashError as error:
            return Known(Knowledge.UNKNOWN, f"{error.code}: {error}")

    def choose(self, survey: Survey, *, excluded: Iterable[str] = ()) -> Decision | None:
        """Return the engine that should get the request, by what is known now; None when none is left."""
        plan = survey.plan
        engines = self.fleet.available(plan.model, excluded=excluded)
        now = time.monotonic()
        speeds = self.fleet.speeds.speeds((e.name for e in engines), now=now)
        unknown = Known(Knowledge.UNKNOWN)
        candidates = [
            Candidate(
                engine=engine.name,
                matched_tokens=max(survey.matched_tokens.get(engine.name, 0), engine.held_tokens(plan)),
                knowledge=survey.known.get(engine.name, unknown).knowledge,
                queued_tokens=max(0.0, engine.queued_tokens),
                recent_tokens=engine.recent_tokens(now),
                speed=speeds[engine.name],
            )
            for engine in engines
        ]
        turn = self.fleet.next_turn() if self.config.policy.strategy == "round-robin" else 0
        return decide(plan.prompt_tokens, candidates, policy=self.config.policy, draw=self._draw, turn=turn)

    def begin(self, survey: Survey, decision: Decision) -> Ticket:
        """Count the request's work at the chosen engine until the ticket is closed."""
        engine = self.fleet.engines[decision.engine]
        return Ticket(self.fleet, engine, survey.plan, decision.chosen.uncached_tokens)

    # --- views ----------------------------------------------------------------------------------------------------

    async def view(self) -> dict[str, EngineView]:
        """Return every engine as seen now."""
        engines = [engine for engine in self.fleet.engines.values() if engine.name in self._followers]
        names = [engine.name for engine in engines]
        known = await self.in_thread(lambda: [self._known(name, None) for name in names])
        speeds = self.fleet.speeds.speeds(names, now=time.monotonic())
        views: dict[str, EngineView] = {}
        for engine, one in zip(engines, known, strict=True):
            follower = self._followers.get(engine.name)
            if follower is None:
                continue
            views[engine.name] = EngineView(
                engine.config.url,
                engine.config.model,
                engine.up,
                engine.last_failure,
                engine.in_flight,
                engine.requests,
                round(engine.queued_tokens, 1),
                round(speeds[engine.name], 1),
                one,
                follower.verification(),
                dict(follower.records),
                follower.last_record_at,
            )
        return views
