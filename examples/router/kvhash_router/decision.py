"""Which engine gets a request: a pure function of what is known about each.

The cost of an engine is the estimated time until the request's first token, in tokens of work over tokens a second::

    uncached(e) = prompt tokens - trust(e) * matched tokens(e)
    ahead(e)    = recent tokens(e) - 1.25 * those of the least busy engine for its speed
    spread(e)   = the smaller of recent_weight * ahead(e) and trust(e) * matched tokens(e)
    cost(e)     = (uncached(e) + queued tokens(e) + spread(e) + overhead) / speed(e)

``trust`` is 1 where the engine's cache is known exactly, `Policy.degraded_trust` after a loss that is not healed, and
0 where its hashes do not verify, so that load alone decides there. ``queued tokens`` are what the engine still has to
compute for requests that it has; ``speed`` is measured, so an engine that is three times slower must have three times
less to do for the same cost. ``recent tokens`` are the work that it was sent lately. Without ``spread`` an engine that
was the first to compute a prefix of many requests keeps getting them all while its queue is short, and the others stay
idle; with it such a prefix is computed where less was to do, once, and counts there too. It takes no more than the
match away: an engine is never worse off for what it holds.

Engines whose costs lie within the policy's tolerance of the least are equals: two of them are drawn and the one with
fewer queued tokens for its speed gets the request, or with fewer recent ones where those are the same (power of two
choices), so that several routers with the same picture do not all choose the same engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Literal

import msgspec

__all__ = ["Basis", "Candidate", "Decision", "Knowledge", "Policy", "Scored", "decide"]

#: Up to so many times as busy as the least busy engine is as busy: no session is moved for chance.
_EVEN = 1.25


class Knowledge(str, Enum):
    """What is known of an engine's cache."""

    EXACT = "exact"
    DEGRADED = "degraded"
    UNKNOWN = "unknown"


class Basis(str, Enum):
    """What decided: the longest prefix, load against a longer prefix, load where no prefix counted, or the turn."""

    PREFIX = "prefix"
    LOAD_OVER_PREFIX = "load-over-prefix"
    LOAD = "load"
    TURN = "turn"


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The weights of the cost model.

    ``strategy``: ``"prefix"`` is all of it, ``"load"`` leaves prefixes out, ``"round-robin"`` takes engines in turn
    (to compare with). ``degraded_trust``: the share of a match that counts after a loss. ``overhead_tokens``: the work
    of a request with nothing to compute. ``output_weight``: the work of one token to generate, in prompt tokens.
    ``recent_weight``: how much of the work that an engine was sent lately, beyond 1.25 times the least busy one's,
    counts against its match.
    Costs are equal within ``tie_share`` of the least, or ``tie_tokens`` of work.
    """

    strategy: Literal["prefix", "load", "round-robin"] = "prefix"
    degraded_trust: float = 0.5
    overhead_tokens: float = 32.0
    output_weight: float = 0.25
    recent_weight: float = 0.2
    tie_share: float = 0.02
    tie_tokens: float = 8.0

    def trust(self, knowledge: Knowledge) -> float:
        """Return the share of a match that counts."""
        if self.strategy != "prefix" or knowledge is Knowledge.UNKNOWN:
            return 0.0
        return 1.0 if knowledge is Knowledge.EXACT else self.degraded_trust


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One engine that could take the request.

    ``matched_tokens``: the prompt's tokens that its cache holds, as far as known. ``queued_tokens``: work that it has
    and has not done. ``recent_tokens``: work that it was sent lately, done or not. ``speed``: tokens a second.
    """

    engine: str
    matched_tokens: int = 0
    knowledge: Knowledge = Knowledge.EXACT
    queued_tokens: float = 0.0
    recent_tokens: float = 0.0
    speed: float = 1.0


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate's cost, in seconds, and the uncached tokens that it is made of."""

    candidate: Candidate
    uncached_tokens: float
    cost: float


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The engine, on what basis, and every candidate's cost, the chosen one's first."""

    engine: str
    basis: Basis
    scored: tuple[Scored, ...]

    @property
    def chosen(self) -> Scored:
        """The chosen candidate."""
        return self.scored[0]


def decide(
    prompt_tokens: int,
    candidates: Sequence[Candidate],
    *,
    policy: Policy,
    draw: Callable[[int], int],
    turn: int = 0,
) -> Decision | None:
    """Choose an engine; None when there is no candidate.

    ``draw(n)`` gives an integer from 0 to n - 1; it is called only where there are equals. ``turn`` counts requests;
    only ``"round-robin"`` uses it.
    """
    if not candidates:
        return None
    idlest = min(candidate.recent_tokens / candidate.speed for candidate in candidates)
    scored = [_score(prompt_tokens, candidate, policy, idlest) for candidate in candidates]
    if policy.strategy == "round-robin":
        place = turn % len(scored)
        order = (*scored[place:], *scored[:place])
        return Decision(engine=order[0].candidate.engine, basis=Basis.TURN, scored=order)
    least = min(scored, key=lambda one: one.cost)
    margin = max(least.cost * policy.tie_share, policy.tie_tokens / least.candidate.speed)
    equals = [one for one in scored if one.cost <= least.cost + margin]
    chosen = equals[0] if len(equals) == 1 else _of_two(equals, draw)
    others = sorted((one for one in scored if one is not chosen), key=lambda one: one.cost)
    counted = {
        one.candidate.engine: policy.trust(one.candidate.knowledge) * one.candidate.matched_tokens
        for one in scored
    }
    longest = max(counted.values())
    if longest <= 0:
        basis = Basis.LOAD
    elif counted[chosen.candidate.engine] >= longest:
        basis = Basis.PREFIX
    else:
        basis = Basis.LOAD_OVER_PREFIX
    return Decision(engine=chosen.candidate.engine, basis=basis, scored=(chosen, *others))


def _score(prompt_tokens: int, candidate: Candidate, policy: Policy, idlest: float) -> Scored:
    counted = policy.trust(candidate.knowledge) * min(candidate.matched_tokens, prompt_tokens)
    uncached = prompt_tokens - counted
    ahead = max(0.0, candidate.recent_tokens - _EVEN * idlest * candidate.speed)
    spread = min(policy.recent_weight * ahead, counted)
    work = uncached + candidate.queued_tokens + spread + policy.overhead_tokens
    return Scored(candidate=candidate, uncached_tokens=uncached, cost=work / candidate.speed)


def _of_two(equals: Sequence[Scored], draw: Callable[[int], int]) -> Scored:
    first = draw(len(equals))
    second = draw(len(equals) - 1)
    second += second >= first
    pair = (equals[first], equals[second])
    return min(pair, key=_load)


def _load(one: Scored) -> tuple[float, float]:
    candidate = one.candidate
    return candidate.queued_tokens / candidate.speed, candidate.recent_tokens / candidate.speed
