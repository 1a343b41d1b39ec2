"""The index in a store that routers share: each batch once, whoever brings it; and a store that stops and starts."""

from __future__ import annotations

import itertools
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from kvhash_router.config import HashSettings, HealthConfig
from kvhash_router.residency import OutOfStepError
from kvhash_router.shared_index import SharedIndex

from kvhash.events.records import Batch, Gap, Lost, Record, Recovered, Restart
from kvhash.events.schema import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from kvhash.index import EngineSettings

from ..interop.toolchain import need
from ..ports import free_base
from .running import EngineProcess, RunningRouter, engines, router, wait_for

HASHER = HashSettings(algorithm="sha256_cbor", hash_seed="0").hasher()
TOKENS = list(range(64))
HASHES = HASHER.hash_tokens(TOKENS)
KEYS = tuple(HASHER.chain(TOKENS).external())


class Store:
    """A redis-server of the test's own, which keeps nothing when it stops."""

    def __init__(self, folder: Path) -> None:
        self._program = need("redis-server", "valkey-server")
        self._folder = folder
        self._port = free_base()
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self.start()

    def start(self) -> None:
        """Start it, empty."""
        options = ["--port", str(self._port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [self._program, *options, "--dir", str(self._folder)], stdout=subprocess.DEVNULL
        )
        self.client = redis.Redis.from_url(self.url)
        wait_for(self._answers, "the store to start")

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False

    def stop(self) -> None:
        """Stop it."""
        self.client.close()
        self._process.terminate()
        self._process.wait(10)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Run a store."""
    running = Store(tmp_path)
    yield running
    running.stop()


def stored(keys: Any = KEYS, **fields: Any) -> BlockStored:
    """Return the event of blocks that entered a GPU's cache."""
    return BlockStored(
        block_hashes=tuple(keys), parent_block_hash=None, token_ids=(), block_size=16, medium="GPU", **fields
    )


def batch(seq: int, *events: Event, at: float | None = None, rank: int | None = 0) -> Batch:
    """Return a batch of a publisher; its time follows its number unless it is given."""
    value = EventBatch(ts=100.0 + seq if at is None else at, events=events, data_parallel_rank=rank)
    return Batch("tcp://e", rank, seq, b"", 0, value, b"")


def fresh(store: Store) -> SharedIndex:
    """Return another replica's view of the store."""
    index = SharedIndex(store.url)
    index.configure("a", EngineSettings(tokens_per_hash=16))
    return index


def feed(index: SharedIndex, *records: Record) -> None:
    """Bring records of engine a."""
    for record in records:
        index.apply_record("a", record)


def blocks(index: SharedIndex, hashes: Any = HASHES) -> int:
    """Return how many blocks engine a holds."""
    return index.longest_prefix(hashes, ["a"])["a"].blocks


def state(index: SharedIndex) -> tuple[str, tuple[str, ...]]:
    """Return what is known of engine a, and why not more."""
    known = index.knowledge("a")
    return known.state.value, known.reasons


def test_every_batch_counts_once_whoever_brings_it(store: Store) -> None:
    """Two replicas that bring the same batches, one behind the other, leave what one would have left."""
    one, two = fresh(store), fresh(store)
    assert state(one) == ("unknown", ("never-heard",))
    batches = [batch(0, stored()), batch(1, stored(KEYS[:1])), batch(2, BlockRemoved(KEYS[:1], "GPU"))]
    feed(one, *batches[:2])
    feed(two, *batches)
    feed(one, batches[2])
    assert blocks(one) == blocks(two) == 4  # of two copies one was removed
    assert state(two) == ("exact", ())
    feed(one, batch(3, BlockRemoved(KEYS[:1], "GPU")))
    assert blocks(two) == 0
    usable = fresh(store).longest_prefix(HASHES, ["a", "nobody"], num_tokens=64)
    assert [usable[name].usable_tokens for name in ("a", "nobody")] == [0, 0]


def test_what_is_missing_is_asked_for_and_what_is_lost_is_said(store: Store) -> None:
    """A batch after missing ones is refused, so that its replica reads again; a loss leaves the knowledge degraded."""
    index = fresh(store)
    feed(index, batch(0, stored(KEYS[:2])))
    with pytest.raises(OutOfStepError):
        feed(index, batch(3, stored(KEYS[2:])))
    assert blocks(index) == 2
    feed(index, Gap("tcp://e", 0, 1, 2))
    assert state(index) == ("degraded", ("gap",))
    feed(index, Lost("tcp://e", 0, 1, 2, "not-in-buffer"), batch(3, stored(KEYS[2:])))
    assert (blocks(index), state(index)) == (4, ("degraded", ("lost",)))
    feed(fresh(store), Lost("tcp://e", 0, 1, 2, "no-answer"))  # another replica's, later: nothing new
    feed(index, batch(4, AllBlocksCleared(), stored(KEYS[:1])))
    assert (blocks(index), state(index)) == (1, ("exact", ()))
    feed(index, Gap("tcp://e", 0, 5, 5), batch(5), Recovered("tcp://e", 0, 5, 5))
    assert state(index) == ("exact", ())


def test_new_life_empties_the_old_one_once(store: Store) -> None:
    """A restart is told by a lower number with a later time; replicas that see it late do not undo the new life."""
    one, two = fresh(store), fresh(store)
    feed(one, batch(0, stored()), batch(1, stored(KEYS[:1])))
    feed(two, batch(0, stored()))
    feed(one, Restart("tcp://e", 0, 1), batch(0, stored(KEYS[:2]), at=200.0))
    assert blocks(one) == 2
    feed(two, batch(1, stored(KEYS[:1])))  # of the former life
    feed(two, Restart("tcp://e", 0, 1), batch(0, stored(KEYS[:2]), at=200.0))
    feed(one, batch(1, BlockRemoved(KEYS[1:2], "GPU"), at=201.0))
    assert (blocks(one), blocks(two), state(two)) == (1, 1, ("exact", ()))


def test_groups_ranks_and_media_are_kept_apart(store: Store) -> None:
    """A hit needs every group of one rank; other media score nothing; what cannot be judged is unknown."""
    index = fresh(store)
    feed(index, batch(0, stored(group_idx=0), stored(KEYS[:3], group_idx=1)))
    assert blocks(index) == 3
    feed(index, batch(1, BlockRemoved(KEYS[2:], "GPU", 1)), batch(0, stored(), rank=1))
    assert blocks(index) == 4  # rank 1 has all
    feed(index, batch(1, AllBlocksCleared(), rank=1))
    assert blocks(index) == 2  # and rank 0 keeps what it has
    feed(index, batch(2, BlockRemoved(KEYS[:1], "CPU", 1)))
    assert blocks(index) == 2
    assert blocks(index, HASHER.hash_tokens(TOKENS, cache_salt="x")) == 0
    feed(index, batch(3, stored(group_idx=2, kv_cache_spec_kind="sliding_window")))
    assert state(index) == ("unknown", ("group-kind",))


def test_keys_of_an_engine_are_together_and_expire(store: Store) -> None:
    """All keys carry the engine's hash tag and a time to live, and `remove` leaves none."""
    index = fresh(store)
    feed(index, batch(0, stored()))
    index.touch("a")
    names = [name.decode() for name in store.client.keys("*")]
    assert len(names) >= 3
    assert all("{a}" in name for name in names)
    assert all(0 < store.client.ttl(name) <= 300 for name in names)
    index.remove("a")
    assert store.client.keys("*") == []


def matched(running: RunningRouter, prompt: list[int]) -> dict[str, int]:
    """Return what each engine is known to hold."""
    return dict(running.where(prompt)["matched_tokens"])


def test_store_stopped_and_started_during_traffic(store: Store) -> None:
    """Two routers share a store that stops and comes back empty: every request is answered, and hits come back."""
    from kvhash_router.config import RouterConfig
    from kvhash_router.index_choice import make_residency

    shared = RouterConfig(models={}, index=store.url)
    answered: list[int] = []
    stop = threading.Event()

    def ask(running: RunningRouter, first: int) -> None:
        numbers = itertools.count(first)
        while not stop.is_set():
            answered.append(running.complete([next(numbers) % 32_000, *range(40)]).status_code)

    prompt = [5, *range(200)]
    with (
        engines(2) as started,
        router(started, residency=make_residency(shared)) as one,
        router(started, residency=make_residency(shared)) as two,
    ):
        engine = one.complete(prompt).headers["x-kvhash-engine"]
        for running in (one, two):
            wait_for(lambda running=running: matched(running, prompt)[engine] == 192, "both to know")
        clients = [
            threading.Thread(target=ask, args=(running, 1000 * i))
            for i, running in enumerate((one, two, one))
        ]
        for client in clients:
            client.start()
        store.stop()
        wait_for(lambda: one.where(prompt)["basis"] == two.where(prompt)["basis"] == "load", "the fall back")
        assert one.state(engine)["reason"] == "store-unavailable"
        before = len(answered)
        wait_for(lambda: len(answered) > before + 30, "requests while the store is down")
        store.start()
        for running in (one, two):
            wait_for(lambda running=running: matched(running, prompt)[engine] == 192, "the hits to come back")
        before = len(answered)
        wait_for(lambda: len(answered) > before + 30, "requests after the store is back")
        stop.set()
        for client in clients:
            client.join()
        assert set(answered) == {200}
        wait_for(lambda: one.state(engine)["knowledge"] == "exact", "exact knowledge")
        assert one.where(prompt)["basis"] == "prefix"


def test_engine_that_comes_back_is_forgotten_by_all(store: Store) -> None:
    """An engine's restart empties it in the store, for the router that saw the process go and for the other."""
    from kvhash_router.config import RouterConfig
    from kvhash_router.index_choice import make_residency

    def restart(engine: EngineProcess, running: RunningRouter) -> None:
        engine.kill()
        wait_for(lambda: not running.state("e0")["up"], "the engine to be taken out")
        engine.restart()
        wait_for(lambda: running.state("e0")["up"], "the engine to be back")

    shared = RouterConfig(models={}, index=store.url)
    prompt = [6, *range(200)]
    health = {"health": HealthConfig(interval_s=0.1)}
    with (
        engines(1) as started,
        router(started, residency=make_residency(shared), **health) as one,
        router(started, residency=make_residency(shared), **health) as two,
    ):
        one.complete(prompt)
        wait_for(lambda: matched(two, prompt) == {"e0": 192}, "the blocks")
        restart(started[0], one)
        wait_for(lambda: matched(one, prompt) == matched(two, prompt) == {"e0": 0}, "both to forget")
        began = time.monotonic()
        two.complete(prompt)
        for running in (one, two):
            wait_for(lambda running=running: matched(running, prompt) == {"e0": 192}, "both to learn")
        assert time.monotonic() - began < 20
