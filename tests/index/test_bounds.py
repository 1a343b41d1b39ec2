"""What is bounded, how, and what of it shows: memory, ranks, sizes, counts; and snapshots taken meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvhash._backend import native_module
from kvhash.events import encode_batch
from kvhash.events.records import Restart
from kvhash.events.schema import BlockStored
from kvhash.index import EngineSettings, GroupSettings, ResidencyIndex, State
from kvhash.index.checks import MAX_RANKS
from kvhash.index.types import MAX_BLOCK_TOKENS

from ..interop.toolchain import need
from .build import CLEARED, SIZE, batch, record, removed, stored

H = list(range(101, 161))


@pytest.fixture(params=["python", "native"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a test with each form of the index."""
    if request.param == "native" and native_module() is None:
        need("a build of kvhash._native")
    monkeypatch.setenv("KVHASH_BACKEND", request.param)
    return request.param


# --- eviction -----------------------------------------------------------------------------------------------


def held(index: ResidencyIndex) -> set[int]:
    """Return the keys of all blocks."""
    return {key for blocks in index.holdings("a").values() for key in blocks}


def test_what_others_hang_on_is_dropped_last(form: str) -> None:
    """A system prompt that ten sessions share outlives nine of them; the oldest session goes first, from its end."""
    del form
    index = ResidencyIndex(max_blocks=100)
    system = H[:20]
    index.apply("a", batch(stored(system)))
    sessions = [[1000 * (n + 1) + i for i in range(10)] for n in range(10)]
    for n, session in enumerate(sessions):
        index.apply("a", batch(stored(session, system[-1])))
        assert index.longest_prefix([*system, *session])["a"].blocks == 30
        assert set(system) <= held(index)
        first_left = next(i for i, one in enumerate(sessions) if one[0] in held(index))
        assert first_left == max(0, n - 7), "not the oldest session went"
        assert all(set(one) <= held(index) for one in sessions[first_left + 1 : n + 1])
    assert index.stats()["reachable"] == len(index)
    assert index.stats()["evicted"] == 120 - len(index)


def test_circles_of_parents_are_dropped_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are each other's parents, with tails, a chain beside: both forms keep the same blocks."""
    events = batch(stored([1, 2, 3], 3), stored([4, 5], 2), stored([6], 6), stored([7, 8]))
    left: dict[str, list[set[int]]] = {}
    if native_module() is None:
        need("a build of kvhash._native")
    for name in ("python", "native"):
        monkeypatch.setenv("KVHASH_BACKEND", name)
        left[name] = []
        for bound in range(1, 9):
            index = ResidencyIndex(max_blocks=bound)
            index.apply("a", events)
            left[name].append(held(index))
    assert [len(blocks) for blocks in left["python"]] == list(range(1, 9))
    assert left["python"] == left["native"]
    assert left["python"][2] == {6, 7, 8}, "the circle is the oldest"


def test_a_bound_holds_over_engines_ranks_and_tiers(form: str) -> None:
    """The fullest place gives first, and says so; those with little keep it."""
    del form
    index = ResidencyIndex(max_blocks=40)
    index.apply("small", batch(stored(H[:5], medium="CPU"), rank=3))
    for n in range(20):
        index.apply("big", batch(stored([1000 * (n + 1) + i for i in range(10)])))
        assert len(index) <= 40
    assert index.blocks_by_tier("small") == {"CPU": 5}
    assert index.knowledge("small").exact
    assert index.knowledge("big").reasons == ("evicted",)
    index.apply("big", batch(CLEARED))
    assert index.knowledge("big").exact


def test_a_bound_is_no_endless_search_for_what_is_gone(form: str) -> None:
    """Blocks that another thread took away, and that are not reckoned yet, are not waited for."""
    del form
    index = ResidencyIndex(max_blocks=10)
    index.apply("a", batch(stored(H[:3])))
    index._size += 100  # as between another thread's batch and its reckoning
    index.apply("a", batch(stored(H[3:4], H[2])))
    assert held(index) == set()


# --- hostile publishers -------------------------------------------------------------------------------------


def test_an_engine_has_no_more_ranks_than_engines_have(form: str) -> None:
    """Of ever new ranks 1,024 are taken; the others score nothing, are counted, and the engine is DEGRADED."""
    del form
    index = ResidencyIndex()
    payloads = [encode_batch(batch(stored([rank + 1]), rank=rank)) for rank in range(MAX_RANKS + 76)]
    index.apply_payloads("a", payloads[:MAX_RANKS])
    assert index.knowledge("a").exact
    index.apply_payloads("a", payloads[MAX_RANKS:])
    index.apply("a", batch(stored([5]), rank=1 << 40))
    index.apply_record("a", record(0, stored([5]), rank=-1))
    assert (len(index.ranks("a")), len(index), index.stats()["refused"]) == (MAX_RANKS, MAX_RANKS, 78)
    assert (index.knowledge("a").state, index.knowledge("a").reasons) == (State.DEGRADED, ("refused",))
    assert index.knowledge("a", 5).exact
    assert index.knowledge("a", MAX_RANKS).reasons == ("never-heard",)
    again = ResidencyIndex()
    again.load(index.snapshot())
    assert again.knowledge("a").reasons == ("refused", "restored")
    assert again.stats()["refused"] == 78
    assert index.remove("a")
    index.apply("a", batch(stored([5]), rank=MAX_RANKS))
    assert index.knowledge("a").exact


@pytest.mark.parametrize("size", [MAX_BLOCK_TOKENS + 1, 1 << 62, (1 << 64) - 1])
def test_blocks_are_no_larger_than_blocks_can_be(form: str, size: int) -> None:
    """A size with which a run could reach 2^64 tokens is not taken in; the largest one that is, is reckoned with."""
    del form
    index = ResidencyIndex()
    for tokens in ((), (1, 2, 3)):
        index.apply("a", batch(BlockStored(tuple(H[:3]), None, tokens, size)))
    assert (len(index), index.stats()["refused"]) == (0, 2)
    assert index.knowledge("a").reasons == ("refused",)
    assert index.longest_prefix(H)["a"].blocks == 0
    index.apply("a", batch(CLEARED, BlockStored(tuple(H), None, (), MAX_BLOCK_TOKENS)))
    match = index.longest_prefix(H, num_tokens=1 << 90)["a"]
    assert (match.blocks, match.tokens) == (60, 60 * MAX_BLOCK_TOKENS)
    assert index.knowledge("a").exact
    largest = GroupSettings(
        block_size=MAX_BLOCK_TOKENS, kind="sliding_window", sliding_window=MAX_BLOCK_TOKENS
    )
    index.configure(
        "b", EngineSettings(tokens_per_hash=MAX_BLOCK_TOKENS, groups={0: largest}, use_eagle=True)
    )
    index.apply("b", batch(BlockStored(tuple(H), None, (), MAX_BLOCK_TOKENS)))
    assert index.longest_prefix(H)["b"].usable_tokens == 59 * MAX_BLOCK_TOKENS


def test_names_of_media_are_counted_in_bounded_number(form: str) -> None:
    """64 names and "(other)", also when engines that named others are gone, and in a snapshot that names more."""
    del form
    index = ResidencyIndex()
    for engine in ("a", "b", "c"):
        for n in range(40):
            index.apply(engine, batch(stored(H[:1], medium=f"{engine}{n}")))
    index.remove("a")
    index.remove("b")
    media = index.stats()["unknown_media"]
    assert len(media) <= 65
    assert sum(media.values()) == 120


# --- counts -------------------------------------------------------------------------------------------------


def test_counts_never_go_back(form: str) -> None:
    """What was counted of an engine stays when it is removed, as by a follower that begins anew; what it held goes."""
    del form
    index = ResidencyIndex()
    index.apply_record("a", record(0, stored(H[:3]), stored(H[:1], medium="TAPE"), removed(H[7:8])))
    index.apply_record("a", Restart("e", 0, 0))
    index.apply_record("a", record(0, stored(H[:2]), ts=9.0))
    before = index.stats()
    assert (before["restarts"], before["batches"], before["unknown_media"]) == (1, 2, {"TAPE": 1})
    index.remove("a")
    after = index.stats()
    assert (after["engines"], after["blocks"], after["reachable"]) == (0, 0, 0)
    now = ("engines", "blocks", "reachable")
    assert {name: count for name, count in after.items() if name not in now} == {
        name: count for name, count in before.items() if name not in now
    }
    index.apply_record("a", record(0, stored(H[:2])))
    assert (index.stats()["restarts"], index.stats()["batches"]) == (1, 3)
    again = ResidencyIndex()
    again.load(index.snapshot())
    assert again.stats() == index.stats()


# --- snapshots ----------------------------------------------------------------------------------------------


def test_a_snapshot_takes_the_place_of_all_that_was_known(form: str) -> None:
    """Engines that are not in it are gone, counts are its own, settings stay; the other form's is as good."""
    index = ResidencyIndex()
    index.apply_record("a", record(0, stored(H[:3])))
    snapshot = index.snapshot()
    other = ResidencyIndex(settings={"a": EngineSettings(use_eagle=True)})
    other.apply_record("a", record(5, stored(H)))
    other.apply_record("b", record(0, stored(H[:9])))
    other.longest_prefix(H)
    other.load(snapshot)
    assert (other.engines(), len(other), other.position("a", 0)) == (["a"], 3, 0)
    assert other.stats() == index.stats()
    assert list(other.longest_prefix(H)) == ["a"]
    assert other.longest_prefix(H)["a"].usable_tokens == 2 * SIZE
    del form


def test_snapshots_while_threads_apply(form: str) -> None:
    """Each can be loaded, and is what some moment was of every place; nothing raises."""
    del form
    index = ResidencyIndex()
    index.apply("a", batch(stored(H[:1])))
    faults: list[BaseException] = []
    done = threading.Event()

    def feed() -> None:
        try:
            for n in range(1, 30):
                events = [stored([1000 * n + i for i in range(40)], group_idx=n % 50, medium=medium)
                          for medium in ("GPU", "CPU")]  # fmt: skip
                index.apply_payloads("a", [encode_batch(batch(*events, rank=n % 7))] * 3)
                if n % 10 == 0:
                    index.apply_payloads("a", [encode_batch(batch(CLEARED, rank=1))])
        except BaseException as error:
            faults.append(error)
        done.set()

    feeder = threading.Thread(target=feed)
    feeder.start()
    snapshots: list[Any] = []
    while not done.is_set():
        snapshots.append(index.snapshot())
        index.stats()
        index.hottest_prefixes()
    feeder.join()
    assert faults == []
    for snapshot in [*snapshots[:: max(1, len(snapshots) // 10)], index.snapshot()]:
        again = ResidencyIndex()
        again.load(snapshot)
        assert len(again) == sum(len(blocks) for blocks in again.holdings("a").values())
    assert again.holdings("a") == index.holdings("a")
