"""An index that several threads feed, each with engines of its own, and others ask meanwhile."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from kvhash.events import encode_batch
from kvhash.index import ResidencyIndex

from .build import batch, removed, stored

PROMPT = [(1 << 62) + number for number in range(200)]
ENGINES = [f"engine-{number}" for number in range(6)]


def payloads(engine: int) -> list[bytes]:
    """Return what an engine published: the shared prompt, up to a place of its own, and much that comes and goes."""
    rng = random.Random(engine)
    events: list[Any] = [stored(PROMPT[: 30 * (engine + 1)], size=1)]
    for _ in range(150):
        chain = [rng.getrandbits(63) for _ in range(20)]
        events.append(stored(chain, size=1))
        if rng.random() < 0.7:
            events.append(removed(chain[::-1]))
    return [encode_batch(batch(event)) for event in events]


@pytest.mark.parametrize("bound", [None, 400])
def test_threads_that_feed_engines_of_their_own_do_not_disturb_each_other(bound: int | None) -> None:
    """What each engine holds is what it published, lookups meanwhile raise nothing, and the size is the sum."""
    published = {name: payloads(number) for number, name in enumerate(ENGINES)}
    index, alone = ResidencyIndex(max_blocks=bound), ResidencyIndex()
    for name in ENGINES:
        alone.apply_payloads(name, published[name])
    faults: list[BaseException] = []
    done = threading.Event()

    def feed(names: list[str]) -> None:
        try:
            for at in range(0, 400, 7):
                for name in names:
                    index.apply_payloads(name, published[name][at : at + 7])
        except BaseException as error:
            faults.append(error)

    def ask() -> None:
        try:
            while not done.is_set():
                for match in index.longest_prefix(PROMPT).values():
                    assert match.blocks <= len(PROMPT)
                index.stats()
                for name in ENGINES:
                    index.knowledge(name)
        except BaseException as error:
            faults.append(error)

    feeders = [threading.Thread(target=feed, args=(ENGINES[first::2],)) for first in range(2)]
    asking = threading.Thread(target=ask)
    for thread in (*feeders, asking):
        thread.start()
    for thread in feeders:
        thread.join()
    done.set()
    asking.join()
    assert faults == []
    held = {name: index.holdings(name) for name in ENGINES}
    assert len(index) == sum(len(blocks) for places in held.values() for blocks in places.values())
    if bound is not None:
        assert len(index) <= bound
        return
    assert held == {name: alone.holdings(name) for name in ENGINES}
    together = index.longest_prefix(PROMPT)
    assert [together[name].blocks for name in ENGINES] == [30 * (number + 1) for number in range(6)]
    for name in ENGINES:
        assert index.longest_prefix(PROMPT, [name]) == {name: together[name]}
