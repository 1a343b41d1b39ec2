"""Hostile stories told to every form of the index side by side; `pytest -m long` tells many more of them."""

from __future__ import annotations

import pytest

from kvhash._backend import native_module
from kvhash.index.shared import SharedResidencyIndex

from ..interop.toolchain import need
from .redis_server import RedisServer
from .sideways import ENGINES, Teller, tell_both, tell_shared, tell_snapshots


def shared_story(server: RedisServer, seed: int) -> None:
    """Tell one story to the embedded and the shared form, under settings of its own."""
    teller = Teller(seed + 10**6)
    settings = {name: teller.settings() for name in ENGINES if teller.rng.random() < 0.6}
    server.client().flushall()
    index = SharedResidencyIndex(server.client(), settings=settings, retry_s=0.0, clock=lambda: 5.0)
    tell_shared(seed, 25, index, settings)


@pytest.mark.parametrize("seed", range(10))
def test_the_native_form_is_the_pure_one(seed: int) -> None:
    """Ranks, groups, tiers, orphans, circles, lies, clears, restarts, losses, bounds, snapshots: no difference."""
    if native_module() is None:
        need("a build of kvhash._native")
    tell_both(seed, 60)


@pytest.mark.parametrize("seed", range(3))
def test_a_changed_snapshot_is_the_same_to_both_forms(seed: int) -> None:
    """Any value of it changed: refused by both with the same words, or loaded by both, and then alike."""
    if native_module() is None:
        need("a build of kvhash._native")
    tell_snapshots(seed, 40)


@pytest.mark.parametrize("seed", range(5))
def test_the_shared_form_is_the_embedded_one(server: RedisServer, seed: int) -> None:
    """The same stories, as far as the store keeps them."""
    shared_story(server, seed)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_many_stories(server: RedisServer) -> None:
    """A thousand for the native form, two hundred for the shared one, as many changed snapshots."""
    if native_module() is None:
        need("a build of kvhash._native")
    for seed in range(1000):
        tell_both(seed, 60)
    for seed in range(200):
        shared_story(server, seed)
        tell_snapshots(seed, 40)
