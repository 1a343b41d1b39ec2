"""The decision by itself: a pure function of what is known about each engine."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvhash_router.decision import Basis, Candidate, Decision, Knowledge, Policy, decide
from kvhash_router.speeds import SpeedBook

POLICY = Policy(overhead_tokens=0.0, tie_tokens=0.0, tie_share=0.0)


def never(count: int) -> int:
    """Fail: nothing may be drawn where there are no equals."""
    raise AssertionError(f"drew one of {count}")


def chosen(
    prompt_tokens: int, *candidates: Candidate, policy: Policy = POLICY, draw: Any = never
) -> Decision:
    """Return the decision, which there must be."""
    decision = decide(prompt_tokens, candidates, policy=policy, draw=draw)
    assert decision is not None
    return decision


def test_longest_prefix_wins_where_load_is_equal() -> None:
    """Of idle engines the one with the longest prefix gets the request, and the decision says so."""
    decision = chosen(
        1000,
        Candidate(engine="a", matched_tokens=160),
        Candidate(engine="b", matched_tokens=640),
        Candidate(engine="c"),
    )
    assert (decision.engine, decision.basis) == ("b", Basis.PREFIX)
    assert [one.candidate.engine for one in decision.scored] == ["b", "a", "c"]
    assert decision.chosen.cost == pytest.approx(360)


def test_load_wins_over_a_prefix_when_computing_it_anew_is_sooner() -> None:
    """A prefix is worth its tokens, not more: behind a longer queue the request goes elsewhere."""
    holder = Candidate(engine="holder", matched_tokens=900, queued_tokens=1000)
    decision = chosen(1000, holder, Candidate(engine="idle"))
    assert (decision.engine, decision.basis) == ("idle", Basis.LOAD_OVER_PREFIX)
    assert chosen(1000, holder, Candidate(engine="busy", queued_tokens=200)).engine == "holder"


def test_degraded_knowledge_counts_for_less_and_unknown_for_nothing() -> None:
    """After a loss only a share of a match counts; where hashes do not verify, load alone decides."""
    degraded = Candidate(engine="degraded", matched_tokens=800, knowledge=Knowledge.DEGRADED)
    decision = chosen(1000, degraded, Candidate(engine="exact", matched_tokens=480))
    assert decision.engine == "exact"
    assert decision.scored[1].uncached_tokens == pytest.approx(600)
    assert chosen(1000, degraded, Candidate(engine="exact", matched_tokens=320)).engine == "degraded"
    unknown = Candidate(engine="unknown", matched_tokens=1000, knowledge=Knowledge.UNKNOWN, queued_tokens=1)
    decision = chosen(1000, unknown, Candidate(engine="idle"))
    assert (decision.engine, decision.basis) == ("idle", Basis.LOAD)


def test_slower_engine_needs_less_work_for_the_same_cost() -> None:
    """An engine three times slower is chosen only when it has three times less to do."""
    fast = Candidate(engine="fast", speed=3000.0, queued_tokens=1900)
    assert chosen(1000, fast, Candidate(engine="slow", speed=1000.0)).engine == "fast"
    fast = Candidate(engine="fast", speed=3000.0, queued_tokens=2100)
    assert chosen(1000, fast, Candidate(engine="slow", speed=1000.0)).engine == "slow"


def test_equals_are_drawn_and_the_less_loaded_of_two_wins() -> None:
    """Power of two choices: of the two drawn, the one with less queued work; the rest are not looked at."""
    policy = Policy(overhead_tokens=0.0, tie_share=0.5, tie_tokens=0.0)
    engines = [
        Candidate(engine=name, queued_tokens=queued)
        for name, queued in zip("abcd", (0, 300, 200, 100), strict=True)
    ]
    draws = iter([1, 1])  # b, then c: the second draw passes over the first
    assert chosen(1000, *engines, policy=policy, draw=lambda count: next(draws)).engine == "c"
    counts: Counter[str] = Counter()
    generator = random.Random(7)
    for _ in range(2000):
        counts[chosen(1000, *engines, policy=policy, draw=generator.randrange).engine] += 1
    assert counts["a"] > counts["d"] > counts["c"]
    assert counts["b"] == 0  # the most loaded wins against nobody
    assert counts["a"] < 2000 * 0.6  # and the least loaded does not get everything


def test_idle_equals_take_turns() -> None:
    """Where neither of the two drawn has anything queued, the one that was sent less lately gets the request."""
    policy = Policy(tie_share=0.5)
    engines = [
        Candidate(engine="a", recent_tokens=9, speed=3.0),
        Candidate(engine="b", recent_tokens=2, speed=3.0),
    ]
    for first in (0, 1):
        draws = iter((first, 0))
        assert chosen(10, *engines, policy=policy, draw=lambda _, d=draws: next(d)).engine == "b"


def test_nothing_to_choose_from() -> None:
    """No candidate, no decision; one candidate is it, whatever it costs."""
    assert decide(10, [], policy=POLICY, draw=never) is None
    only = Candidate(engine="only", queued_tokens=1e9)
    assert chosen(10, only).engine == "only"


def test_a_match_is_never_more_than_the_prompt() -> None:
    """An index that says more than there is does not make a cost negative."""
    decision = chosen(100, Candidate(engine="a", matched_tokens=1000))
    assert decision.chosen.uncached_tokens == 0


def test_a_prefix_of_many_requests_is_spread() -> None:
    """What an engine was sent lately, beyond the least busy one, counts against its match, and against no more."""
    policy = Policy(overhead_tokens=0.0, tie_share=0.0, tie_tokens=0.0, recent_weight=0.2)

    def costs(*recent: float, matched: int = 400, **fields: Any) -> list[float]:
        holder = Candidate(engine="holder", matched_tokens=matched, recent_tokens=recent[0], **fields)
        decision = chosen(
            500, holder, Candidate(engine="idle", recent_tokens=recent[1]), policy=policy, draw=lambda _: 0
        )
        return [one.cost for one in sorted(decision.scored, key=lambda one: one.candidate.engine)]

    assert costs(1000, 1000) == [100, 500]  # as busy as each other
    assert costs(1250, 1000) == [100, 500]  # chance
    assert costs(2000, 1000) == [250, 500]
    assert costs(10**6, 0) == [500, 500]  # never worse than holding nothing
    assert costs(10**6, 0, matched=0) == [500, 500]
    assert costs(10**6, 0, knowledge=Knowledge.UNKNOWN) == [500, 500]
    assert costs(10**6, 0, knowledge=Knowledge.DEGRADED) == [500, 500]
    assert costs(2500, 1000, speed=2.0) == [50, 500]  # twice as fast: as busy as the other
    assert costs(0, 1000) == [100, 500]


def test_other_strategies() -> None:
    """To compare with: load alone leaves prefixes out, round-robin takes engines in turn."""
    engines = [Candidate(engine="a", matched_tokens=900, queued_tokens=1), Candidate(engine="b")]
    load = Policy(strategy="load", overhead_tokens=0.0, tie_share=0.0, tie_tokens=0.0)
    assert chosen(1000, *engines, policy=load).engine == "b"
    turns = Policy(strategy="round-robin")
    order = [decide(1, engines, policy=turns, draw=never, turn=turn) for turn in range(4)]
    assert [one.engine for one in order if one] == ["a", "b", "a", "b"]


@given(
    prompt=st.integers(1, 10_000),
    engines=st.lists(
        st.builds(
            Candidate,
            engine=st.uuids().map(str),
            matched_tokens=st.integers(0, 10_000),
            knowledge=st.sampled_from(Knowledge),
            queued_tokens=st.floats(0, 1e6),
            recent_tokens=st.floats(0, 1e9),
            speed=st.floats(1, 1e6),
        ),
        min_size=1,
        max_size=6,
        unique_by=lambda one: one.engine,
    ),
    seed=st.integers(0, 99),
)
def test_choice_is_within_the_tolerance_of_the_least_cost(
    prompt: int, engines: list[Candidate], seed: int
) -> None:
    """Whatever the numbers: one of the candidates, within the tolerance of the least cost, every one scored once."""
    policy = Policy()
    decision = decide(prompt, engines, policy=policy, draw=random.Random(seed).randrange)
    assert decision is not None
    assert sorted(one.candidate.engine for one in decision.scored) == sorted(e.engine for e in engines)
    least = min(decision.scored, key=lambda one: one.cost)
    margin = max(least.cost * policy.tie_share, policy.tie_tokens / least.candidate.speed)
    assert decision.chosen.cost <= least.cost + margin
    assert decision.engine == decision.chosen.candidate.engine


def test_measured_speeds_keep_their_ratio_and_fade() -> None:
    """An engine three times slower is measured so within a few requests; without requests it is a median one again."""
    book = SpeedBook(half_life_s=10.0, prior_requests=0.5)
    for i in range(20):
        for name, speed in (("a", 9000.0), ("b", 9000.0), ("slow", 3000.0)):
            book.observe(name, "first", work=1000, seconds=1000 / speed, now=float(i))
    speeds = book.speeds(["a", "b", "slow", "new"], now=20.0)
    assert speeds["a"] / speeds["slow"] == pytest.approx(3, rel=0.05)
    assert speeds["new"] == pytest.approx(9000, rel=0.05)
    book.forget("b")
    speeds = book.speeds(["a", "b", "slow", "new"], now=20.0)
    assert speeds["b"] == speeds["new"]
    speeds = book.speeds(["a", "slow"], now=400.0)
    assert speeds["slow"] == pytest.approx(speeds["a"], rel=0.05)


def test_busier_engine_does_not_look_faster() -> None:
    """Equal engines measure as equal however unequal their work: what takes time without work is not speed."""
    book = SpeedBook()
    generator = random.Random(3)
    for i in range(200):
        for name, most in (("idle", 200), ("busy", 4000)):
            work = generator.randrange(50, most)
            book.observe(name, "first", work=work, seconds=0.05 + work / 20_000, now=i / 10)
    speeds = book.speeds(["idle", "busy"], now=20.0)
    assert speeds["busy"] / speeds["idle"] == pytest.approx(1, rel=0.05)


def test_slower_engine_that_has_less_to_do_is_still_found_out() -> None:
    """An engine three times slower, which therefore gets a fraction of the work, measures as clearly slower."""
    book = SpeedBook()
    generator = random.Random(4)
    for i in range(200):
        for name, most, factor in (("a", 2000, 1), ("b", 2000, 1), ("slow", 300, 3)):
            work = generator.randrange(50, most)
            book.observe(name, "first", work=work, seconds=factor * (0.01 + work / 20_000), now=i / 10)
    speeds = book.speeds(["a", "b", "slow"], now=20.0)
    assert min(speeds["a"], speeds["b"]) / speeds["slow"] > 1.8


def test_streams_and_whole_answers_are_not_compared() -> None:
    """The time to a first token and that of a whole answer are different things; the commoner counts for all."""
    book = SpeedBook()
    for i in range(5):
        book.observe("a", "first", work=1000, seconds=0.1, now=float(i))
        book.observe("b", "first", work=1000, seconds=0.1, now=float(i))
    book.observe("b", "whole", work=1000, seconds=10.0, now=5.0)
    speeds = book.speeds(["a", "b"], now=5.0)
    assert speeds["a"] == pytest.approx(speeds["b"], rel=0.01)
