"""The index in a store that routers share: one writes, all read; and a store that stops and starts under traffic."""

from __future__ import annotations

import itertools
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import redis
from kvhash_router.config import HealthConfig, RouterConfig
from kvhash_router.index_choice import make_residency
from kvhash_router.residency import StoreUnavailableError
from kvhash_router.shared_store import SharedStore

from kvhash.events.records import Batch
from kvhash.events.schema import EventBatch
from kvhash.index import EngineSettings

from ..index.redis_server import RedisCluster
from ..interop.toolchain import need
from ..ports import free_base
from .running import EngineProcess, RunningRouter, engines, router, wait_for


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


def test_one_router_writes_and_another_takes_over(store: Store) -> None:
    """The right to write for an engine is held by one, kept by asking, given up, and free when its holder is gone."""
    one, two = SharedStore(store.url, lease_s=0.3), SharedStore(store.url, lease_s=0.3)
    assert one.hold("a")
    assert not two.hold("a")
    assert two.hold("b")  # another engine's is another right
    two.release("a")  # not two's to give
    assert one.hold("a")
    one.release("a")
    assert two.hold("a")
    wait_for(lambda: one.hold("a"), "two's right to run out")


def test_every_method_says_when_the_store_is_away(store: Store) -> None:
    """No answer is no empty answer: whatever is asked of a store that is away is an error of one kind."""
    shared = SharedStore(store.url)
    shared.configure("a", EngineSettings(tokens_per_hash=16))
    shared.begin("a", forget=False)
    store.stop()
    batch = Batch("tcp://e", 0, 0, b"", 0, EventBatch(ts=1.0, events=(), data_parallel_rank=0), b"")
    for ask in (
        lambda: shared.hold("a"),
        lambda: shared.begin("a", forget=True),
        lambda: shared.apply_record("a", batch),
        lambda: shared.longest_prefix([b"x" * 32], ["a"]),
        lambda: shared.knowledge("a"),
        lambda: shared.remove("a"),
        lambda: shared.release("a"),
    ):
        with pytest.raises(StoreUnavailableError):
            ask()
    store.start()
    wait_for(lambda: shared.hold("a"), "the store to be asked again")


def test_server_named_as_a_cluster_is_said(store: Store) -> None:
    """A server that is no cluster's node does not pass for an empty store."""
    with pytest.raises(StoreUnavailableError, match=r"[Cc]luster mode is not enabled"):
        SharedStore([store.url]).hold("a")


def shared(store: Store) -> RouterConfig:
    """Return a configuration that names the store."""
    return RouterConfig(models={}, index=store.url)


def named(*urls: str) -> RouterConfig:
    """Return a configuration that names a cluster, read as a file is."""
    return msgspec.json.decode(json.dumps({"models": {}, "index": urls}), type=RouterConfig)


def matched(running: RunningRouter, prompt: list[int]) -> dict[str, int]:
    """Return what each engine is known to hold."""
    return dict(running.where(prompt)["matched_tokens"])


def test_store_stopped_and_started_during_traffic(store: Store) -> None:
    """Two routers share a store that stops and comes back empty: every request is answered, and hits come back."""
    answered: list[int] = []
    stop = threading.Event()

    def ask(running: RunningRouter, first: int) -> None:
        numbers = itertools.count(first)
        while not stop.is_set():
            answered.append(running.complete([next(numbers) % 32_000, *range(40)]).status_code)

    prompt = [5, *range(200)]
    with (
        engines(2) as started,
        router(started, residency=make_residency(shared(store))) as one,
        router(started, residency=make_residency(shared(store))) as two,
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

    def restart(engine: EngineProcess, running: RunningRouter) -> None:
        engine.kill()
        wait_for(lambda: not running.state("e0")["up"], "the engine to be taken out")
        engine.restart()
        wait_for(lambda: running.state("e0")["up"], "the engine to be back")

    prompt = [6, *range(200)]
    health = {"health": HealthConfig(interval_s=0.1)}
    with (
        engines(1) as started,
        router(started, residency=make_residency(shared(store)), **health) as one,
        router(started, residency=make_residency(shared(store)), **health) as two,
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


def test_router_that_ends_is_followed_by_the_other(store: Store) -> None:
    """The index outlives the router that wrote it, and the other one goes on writing."""
    first, second = [7, *range(200)], [8, *range(200)]
    with engines(1) as started, router(started, residency=make_residency(shared(store))) as two:
        with router(started, residency=make_residency(shared(store))) as one:
            one.complete(first)
            wait_for(lambda: matched(two, first) == matched(one, first) == {"e0": 192}, "both to know")
        assert matched(two, first) == {"e0": 192}
        two.complete(second)
        wait_for(lambda: matched(two, second) == {"e0": 192}, "the blocks, by whoever is left")
        assert two.state("e0")["knowledge"] == "exact"


@pytest.mark.parametrize("how", ["restarted", "flushed", "expired"])
def test_store_that_loses_its_content_is_filled_while_nothing_happens(store: Store, how: str) -> None:
    """A store that is empty again, without a question that it did not answer, is filled without any new event."""
    prompt = [9, *range(200)]
    with engines(1) as started, router(started, residency=make_residency(shared(store))) as running:
        running.complete(prompt)
        wait_for(lambda: matched(running, prompt) == {"e0": 192}, "the blocks")
        if how == "restarted":
            store.stop()
            store.start()
        elif how == "flushed":
            store.client.flushall()
        else:  # all but who writes
            keys = [key for key in store.client.scan_iter() if not key.startswith(b"kvhash-router:")]
            store.client.delete(*keys)
        wait_for(lambda: matched(running, prompt) == {"e0": 192}, "the blocks again", seconds=10)
        wait_for(lambda: running.state("e0")["knowledge"] == "exact", "exact knowledge")


def test_router_starts_before_its_cluster_is_there() -> None:
    """Where no node of a cluster answers, the router starts and load decides."""
    missing = named(f"redis://127.0.0.1:{free_base()}")
    with engines(1) as started, router(started, residency=make_residency(missing)) as running:
        assert running.complete([1, 2, 3]).status_code == 200
        wait_for(lambda: running.state("e0")["reason"] == "store-unavailable", "the store to be asked")
        assert running.where([1, 2, 3])["basis"] == "load"


@pytest.mark.timeout(120)
def test_cluster_is_named_by_its_nodes() -> None:
    """Two routers share a cluster, found through a node that is there; emptied it is filled, stopped load decides."""
    first = [10, *range(200)]
    cluster = RedisCluster()
    try:
        urls = [f"redis://127.0.0.1:{port}" for port in cluster.ports]
        wrong = SharedStore(urls[0])
        with pytest.raises(StoreUnavailableError, match="it is a node of a cluster"):
            _ = [wrong.hold(name) for name in "abcdefgh"]
        absent = f"redis://127.0.0.1:{free_base()}"
        with (
            engines(2) as started,
            router(started, residency=make_residency(named(absent, urls[0]))) as one,
            router(started, residency=make_residency(named(*urls))) as two,
        ):
            engine = one.complete(first).headers["x-kvhash-engine"]
            for running in (one, two):
                wait_for(lambda running=running: matched(running, first)[engine] == 192, "both to know")
            wait_for(lambda: one.state(engine)["knowledge"] == "exact", "exact knowledge")
            assert sum(node.dbsize() > 0 for node in cluster.nodes()) > 1, "all on one node"
            for node in cluster.nodes():
                node.flushall()
            for running in (one, two):
                wait_for(lambda running=running: matched(running, first)[engine] == 192, "it to be filled")
            cluster.stop()
            assert two.complete(first).status_code == 200
            assert two.where(first)["basis"] == "load"
    finally:
        cluster.close()
