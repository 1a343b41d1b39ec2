"""What the decision makes of many chats with one system prompt, on a clock of the test's own."""

from __future__ import annotations

import pytest

from .simulation import SPEED, simulate


@pytest.mark.parametrize(
    ("seed", "think_s"),
    [(0, 1.5), pytest.param(1, 8.0, marks=pytest.mark.long), pytest.param(2, 0.4, marks=pytest.mark.long)],
)
def test_equal_engines_share_chats_of_one_system_prompt(
    monkeypatch: pytest.MonkeyPatch, seed: int, think_s: float
) -> None:
    """The first engine to hold the system prompt does not keep all chats: less is computed, and nobody waits longer."""
    turns = simulate(monkeypatch, "round-robin", [SPEED] * 4, seed=seed, think_s=think_s)
    prefix = simulate(monkeypatch, "prefix", [SPEED] * 4, seed=seed, think_s=think_s)
    assert max(prefix.requests.values()) <= 1.5 * min(prefix.requests.values())
    assert prefix.computed <= 0.60 * turns.computed
    assert prefix.first_p95 <= turns.first_p95
    assert prefix.whole_p95 <= turns.whole_p95


def test_slow_engine_gets_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one engine three times slower no one waits longer than in turn, and that engine has the least to do."""
    speeds = [SPEED, SPEED, SPEED, SPEED / 3]
    turns = simulate(monkeypatch, "round-robin", speeds, seed=0)
    prefix = simulate(monkeypatch, "prefix", speeds, seed=0)
    assert prefix.requests["e3"] == min(prefix.requests.values())
    assert prefix.computed <= 0.60 * turns.computed
    assert prefix.first_p95 <= turns.first_p95
    assert prefix.whole_p95 <= turns.whole_p95
