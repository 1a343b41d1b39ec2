"""The index on a real server: the embedded one's answers, for several replicas, and when the server is away."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import redis

from kvhash import KvHashError
from kvhash.events.records import BadMessage, Batch, Confirmed, Gap, Lost, Record, Recovered, Restart, Stale
from kvhash.events.schema import BlockStored, UndecodableEvent
from kvhash.index import EngineSettings, ResidencyIndex, State
from kvhash.index.shared import SharedResidencyIndex

from ..waiting import wait_for
from .build import CLEARED, HASHER, SIZE, record, removed, stored
from .fleet import held
from .redis_server import RedisCluster, RedisServer, shared

H = list(range(101, 161))


def random_stream(rng: random.Random, count: int) -> list[Record]:
    """Return a rank's records: chains with branches, duplicates, offloads, removals, clears, losses and restarts."""
    chains = [[rng.getrandbits(64) for _ in range(12)] for _ in range(4)]
    for chain in chains[1:]:
        chain[:4] = chains[0][:4]
    records: list[Record] = []
    seq = 0
    clock = 0.0
    for _ in range(count):
        clock += 1.0
        roll = rng.random()
        if roll < 0.03:
            records.append(Restart("sim", 0, seq - 1 if seq else None))
            seq = 0
            continue
        if rng.random() < 0.05:
            records += [Stale("sim", 0, seq + 5), *([Confirmed("sim", 0, seq - 1)] if seq else [])]
        if roll < 0.08:
            last = seq + rng.randrange(3)
            records += [Gap("sim", 0, seq, last), Lost("sim", 0, seq, last, "no-replay")]
            seq = last + 1
            continue
        events: list[Any] = []
        for _ in range(rng.randrange(1, 4)):
            chain = rng.choice(chains)
            first, end = sorted(rng.sample(range(13), 2))
            medium = rng.choice(["GPU", "GPU", "CPU", "FOO"])
            group = rng.randrange(2)
            kind = {"group_idx": group, "medium": medium}
            if group:
                kind |= {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 9}
            if rng.random() < 0.6:
                events.append(stored(chain[first:end], chain[first - 1] if first else None, **kind))
            else:
                events.append(removed(chain[first:end], group_idx=group, medium=medium))
        if rng.random() < 0.05:
            events.append(CLEARED)
        if rng.random() < 0.05:
            events.append(UndecodableEvent("$", "bad", b""))
        records.append(record(seq, *events, ts=clock))
        seq += 1
    random_stream.chains = chains  # type: ignore[attr-defined]
    return records


def same(one: Any, other: Any, chains: list[list[int]]) -> None:
    """Hold two indexes against each other."""
    assert sorted(one.engines()) == sorted(other.engines())
    for engine in one.engines():
        assert one.holdings(engine) == other.holdings(engine)
        assert one.blocks_by_tier(engine) == other.blocks_by_tier(engine)
        assert one.knowledge(engine) == other.knowledge(engine)
        assert one.position(engine, 0) == other.position(engine, 0)
    for chain in chains:
        assert one.longest_prefix(chain) == other.longest_prefix(chain)
        assert one.longest_prefix(chain, num_tokens=20) == other.longest_prefix(chain, num_tokens=20)


@pytest.mark.parametrize("seed", range(6))
def test_it_answers_what_the_embedded_index_answers(server: RedisServer, seed: int) -> None:
    """Record by record, over clears, losses, restarts, two groups and two tiers."""
    rng = random.Random(seed)
    embedded, index = ResidencyIndex(clock=lambda: 5.0), shared(server, clock=lambda: 5.0)
    for number, item in enumerate(random_stream(rng, 60)):
        for each in (embedded, index):
            each.apply_record("a", item)
        if number % 7 == 0:
            same(embedded, index, random_stream.chains)  # type: ignore[attr-defined]
    same(embedded, index, random_stream.chains)  # type: ignore[attr-defined]


def test_equal_ranks_and_cleared_tiers_are_judged_alike(server: RedisServer) -> None:
    """The lowest of equal ranks answers, though heard of last; a clear after offloads is `cleared-below` in both."""
    embedded, index = ResidencyIndex(clock=lambda: 5.0), shared(server, clock=lambda: 5.0)
    hashes = [7, 8, 9]
    for each in (embedded, index):
        for rank, fields in ((2, {}), (0, {"medium": "CPU"}), (1, {})):
            each.apply_record("a", record(0, stored(hashes, **fields), rank=rank))
        found = each.longest_prefix(hashes)["a"]
        assert (found.rank, found.by_tier) == (0, {"CPU": 3})
        for rank in (0, 1):
            each.apply_record("a", record(1, CLEARED, rank=rank))
        assert each.knowledge("a", 0).reasons == ("cleared-below",)
        assert each.knowledge("a", 1).exact
        each.apply_record("a", Restart("e", 0, 1))
        assert each.knowledge("a").exact
    assert embedded.longest_prefix(hashes) == index.longest_prefix(hashes)


@pytest.mark.parametrize("seed", range(4))
def test_several_replicas_apply_each_batch_once(server: RedisServer, seed: int) -> None:
    """Three replicas follow the same engine, each as far behind as it likes; a restart is one restart."""
    rng = random.Random(seed)
    records = [item for item in random_stream(rng, 60) if isinstance(item, (Batch, Restart))]
    # Without losses the numbers of a life follow each other.
    renumbered: list[Record] = []
    seq = 0
    for item in records:
        if isinstance(item, Restart):
            seq = 0
            renumbered.append(item)
        else:
            renumbered.append(record(seq, *item.batch.events, ts=item.batch.ts))  # type: ignore[union-attr]
            seq += 1
    embedded = ResidencyIndex(clock=lambda: 5.0)
    replicas = [shared(server, clock=lambda: 5.0) for _ in range(3)]
    for item in renumbered:
        embedded.apply_record("a", item)
    at = [0, 0, 0]
    while min(at) < len(renumbered):
        i = rng.randrange(3)
        n = rng.randrange(1, 6)
        replicas[i].apply_records("a", renumbered[at[i] : at[i] + n])
        at[i] += n
    same(embedded, replicas[0], random_stream.chains)  # type: ignore[attr-defined]


def test_a_loss_of_one_replica_is_none_where_another_got_the_batch(server: RedisServer) -> None:
    """What the store has already cannot be missing."""
    first, second = shared(server), shared(server)
    for seq in range(4):
        first.apply_record("a", record(seq, stored(H[seq : seq + 1], H[seq - 1] if seq else None)))
    second.apply_record("a", record(0, stored(H[:1])))
    for item in (Gap("e", 0, 1, 2), Lost("e", 0, 1, 2, "no-replay"), BadMessage("e", 0, 2, 0, "?", ())):
        second.apply_record("a", item)
    assert second.knowledge("a").exact
    assert second.longest_prefix(H)["a"].blocks == 4
    second.apply_record("a", Gap("e", 0, 3, 5))
    assert first.knowledge("a").reasons == ("gap",)
    second.apply_record("a", Recovered("e", 0, 3, 5))
    assert first.knowledge("a").exact


def test_a_replica_that_missed_a_restart_is_not_shut_out(server: RedisServer) -> None:
    """One replica saw the engine begin anew, the other only newer batches: those count, older ones do not."""
    first, second = shared(server), shared(server)
    for each in (first, second):
        each.apply_record("a", record(0, stored(H[:1]), ts=1.0))
    first.apply_record("a", record(1, stored(H[1:2], H[0]), ts=2.0))
    first.apply_record("a", Restart("e", 0, 1))
    second.apply_record("a", record(1, stored(H[1:2], H[0]), ts=2.0))
    assert second.holdings("a") == {}
    first.apply_record("a", record(0, stored(H[4:5]), ts=5.0))
    second.apply_record("a", record(1, stored(H[5:6], H[4]), ts=6.0))
    assert second.longest_prefix(H[4:])["a"].blocks == 2
    assert second.knowledge("a").reasons == ("other-life",)  # until that replica has seen it begin, too
    second.apply_record("a", Restart("e", 0, 1))
    for seq, ts in ((0, 5.0), (1, 6.0)):
        second.apply_record("a", record(seq, stored(H[4 + seq : 5 + seq], H[4] if seq else None), ts=ts))
    assert second.knowledge("a").exact
    first.apply_record("a", record(2, stored(H[6:7], H[5]), ts=7.0))
    assert first.longest_prefix(H[4:])["a"].blocks == 3
    assert first.knowledge("a").exact


def test_replicas_that_saw_different_lives_hold_one_of_them(server: RedisServer) -> None:
    """One saw a life that the other missed, and the clock was set back: never blocks of two lives; the last at last."""
    first, second = shared(server), shared(server)
    for each in (first, second):
        each.apply_record("a", record(0, stored(H[:1]), ts=100.0))
    first.apply_record("a", Restart("e", 0, 0))
    first.apply_record("a", record(0, stored(H[10:11]), ts=101.0))
    first.apply_record("a", record(1, stored(H[11:12], H[10]), ts=102.0))
    second.apply_record("a", Restart("e", 0, 0))
    second.apply_record("a", record(0, stored(H[20:21]), ts=50.0))
    assert held(second, "a") == {(0, H[20]): 1}
    second.apply_record("a", record(1, stored(H[21:22], H[20]), ts=51.0))
    assert held(second, "a") == {(0, H[20]): 1, (0, H[21]): 1}
    first.apply_record("a", Restart("e", 0, 1))
    for seq in (0, 1):
        first.apply_record(
            "a", record(seq, stored(H[20 + seq : 21 + seq], H[20] if seq else None), ts=50.0 + seq)
        )
    first.apply_record("a", record(2, stored(H[22:23], H[21]), ts=52.0))
    second.apply_record("a", record(2, stored(H[22:23], H[21]), ts=52.0))
    assert first.knowledge("a").exact
    assert held(first, "a") == {(0, H[20 + n]): 1 for n in range(3)}


def test_a_replica_that_comes_late_with_a_former_life_is_put_right_by_the_restart(
    server: RedisServer,
) -> None:
    """Its first batches are of the life before the one that is stored; with the restart that life is held anew."""
    first, second = shared(server), shared(server)
    first.apply_record("a", record(0, stored(H[:1]), ts=1.0))
    first.apply_record("a", Restart("e", 0, 0))
    first.apply_record("a", record(0, stored(H[10:11]), ts=5.0))
    second.apply_record("a", record(0, stored(H[:1]), ts=1.0))
    second.apply_record("a", Restart("e", 0, 0))
    second.apply_record("a", record(0, stored(H[10:11]), ts=5.0))
    first.apply_record("a", record(1, stored(H[11:12], H[10]), ts=6.0))
    assert first.knowledge("a").reasons == ("other-life",)  # it was not seen to begin that life anew
    second.apply_record("a", record(1, stored(H[11:12], H[10]), ts=6.0))
    for each in (second, first):
        each.apply_record("a", record(2, stored(H[12:13], H[11]), ts=7.0))
    for each in (first, second):
        each.apply_record("a", record(3, stored(H[13:14], H[12]), ts=8.0))
    assert first.knowledge("a").exact
    assert held(second, "a") == {(0, H[n]): 1 for n in range(10, 14)}


@pytest.mark.parametrize("step", [1.0, -1.0, -60.0])
def test_a_router_and_an_engine_that_both_began_anew(server: RedisServer, step: float) -> None:
    """A new replica finds the life before in the store; whatever its clock says, the engine's life is held."""
    first = shared(server)
    for seq in range(5):
        first.apply_record(
            "a", record(seq, stored(H[seq : seq + 1], H[seq - 1] if seq else None), ts=1000.0 + seq)
        )
    second = shared(server)
    for seq in range(3):
        parent = H[9 + seq] if seq else None
        second.apply_record("a", record(seq, stored(H[10 + seq : 11 + seq], parent), ts=1004.0 + step + seq))
        assert second.knowledge("a").exact
    assert held(second, "a") == {(0, H[10 + seq]): 1 for seq in range(3)}


def test_a_clock_set_back_in_mid_life_is_no_new_life_to_a_replica_that_is_behind(server: RedisServer) -> None:
    """The one that is behind brings lower numbers with later times; the life is the one that both follow."""
    first, second = shared(server), shared(server)
    times = (10.0, 11.0, 5.0, 6.0)
    records = [record(n, stored(H[n : n + 1], H[n - 1] if n else None), ts=ts) for n, ts in enumerate(times)]
    for item in records[:3]:
        first.apply_record("a", item)
    assert first.knowledge("a").reasons == ("other-life",)
    for item in records[:3]:
        second.apply_record("a", item)
    assert first.knowledge("a").exact
    for each in (first, second):
        each.apply_record("a", records[3])
    assert first.knowledge("a").exact
    assert held(first, "a") == {(0, H[n]): 1 for n in range(4)}


def test_long_prompts_are_read_in_windows(server: RedisServer) -> None:
    """6,250 blocks of one engine, 3 of another: each is matched to its last block, in both forms of hashes."""
    hashes = list(range(1, 6251))
    index = shared(server)
    index.apply_records(
        "a", [record(0, stored(hashes[:3000])), record(1, stored(hashes[3000:], hashes[2999]))]
    )
    index.apply_record("b", record(0, stored(hashes[:3])))
    found = index.longest_prefix(hashes)
    assert (found["a"].blocks, found["b"].blocks) == (6250, 3)
    assert index.longest_prefix([value.to_bytes(32, "big") for value in hashes])["a"].blocks == 6250
    assert len(index) == 6253


def test_chunks_and_settings(server: RedisServer) -> None:
    """Offload chunks named by their last hash, a drafter and hash settings are reckoned with here too."""
    settings = {"a": EngineSettings(offload_chunk_blocks=4, tokens_per_hash=SIZE, use_eagle=True)}
    index = shared(server, settings=settings)
    index.apply_record(
        "a", record(0, *(BlockStored((H[i],), None, (), 0, medium="CPU") for i in (3, 7)), stored(H[:5]))
    )
    match = index.longest_prefix(H)["a"]
    assert (match.by_tier, match.usable_tokens) == ({"GPU": 5, "CPU": 3}, 8 * SIZE)
    hashing = {"vllm": "0.33.0", "algorithm": "sha256", "block_size": SIZE}
    index.configure("b", EngineSettings(hashing=hashing))
    wrong = HASHER.chain(range(8)).external()
    index.apply_record("b", record(0, stored(wrong, token_ids=tuple(range(8)), extra_keys=(None, None))))
    assert index.knowledge("b").state is State.UNKNOWN


def test_an_engine_that_falls_silent_is_forgotten(server: RedisServer) -> None:
    """All keys of an engine have the same time to live; those of others stay."""
    index, lasting = shared(server, ttl_s=0.3), shared(server)
    index.apply_record("a", record(0, stored(H[:3]), stored(H[:3], medium="CPU")))
    lasting.apply_record("b", record(0, stored(H[:3])))
    deadline = time.monotonic() + 10
    while index.engines() != ["b"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert index.knowledge("a").reasons == ("never-heard",)
    assert sorted(server.client().keys(b"kvhash:{a}*")) == []
    assert index.longest_prefix(H, ["a"])["a"].blocks == 0
    index.apply_record("a", record(1, stored(H[3:4], H[2])))
    assert index.knowledge("a").reasons == ("joined-late",)


def test_removed_engines_are_gone(server: RedisServer) -> None:
    """No key of theirs is left, whatever their names hold."""
    index = shared(server)
    for name in ("a", "x}y{z", "", "tcp://10.0.0.1:5557"):
        index.apply_record(name, record(0, stored(H[:3], medium="CPU"), stored(H[:2]), rank=None, ts=1.0))
        assert index.longest_prefix(H, [name])[name].blocks == 3
        assert index.remove(name)
        assert not index.remove(name)
    assert server.client().keys() == []


def test_the_server_goes_away_and_comes_back(server: RedisServer) -> None:
    """Meanwhile lookups find nothing and nothing raises; what came meanwhile is applied afterwards, in order."""
    index = shared(server)
    index.apply_record("a", record(0, stored(H[:2])))
    server.stop()
    index.apply_record("a", record(1, stored(H[2:4], H[1])))
    assert not index.reachable
    assert index.longest_prefix(H, ["a"])["a"].blocks == 0
    assert (index.longest_prefix(H), index.engines(), index.holdings("a")) == ({}, [], {})
    assert index.knowledge("a").reasons == ("store-unreachable",)
    index.apply_record("a", record(2, removed(H[3:4])))
    assert index.pending == 2
    server.start()
    index.apply_record("a", record(3))
    assert (index.pending, index.reachable) == (0, True)
    assert index.longest_prefix(H)["a"].blocks == 3
    assert index.knowledge("a").exact


def test_a_server_that_comes_back_empty_is_not_believed(server: RedisServer) -> None:
    """What it lost shows: the engine is DEGRADED until it restarts or clears."""
    index = shared(server)
    index.apply_record("a", record(0, stored(H[:2])))
    index.apply_record("a", record(1))
    server.stop(forget=True)
    server.start()
    index.apply_record("a", record(2, stored(H[2:4], H[1])))
    index.apply_record("a", record(3))
    assert index.knowledge("a").reasons == ("joined-late",)
    assert index.longest_prefix(H)["a"].blocks == 0
    index.apply_record("a", record(4, CLEARED, stored(H[:1])))
    assert index.knowledge("a").exact


def test_what_waits_is_bounded(server: RedisServer) -> None:
    """While the server is away the oldest records go, are counted, and show as a loss."""
    index = shared(server, max_pending=3)
    index.apply_record("a", record(0, stored(H[:1])))
    server.stop()
    for seq in range(1, 8):
        index.apply_record("a", record(seq))
    server.start()
    assert index.flush()
    assert index.stats()["dropped"] == 4
    assert index.knowledge("a").reasons == ("lost",)


def test_no_command_crosses_the_slots_of_a_cluster() -> None:
    """A server in cluster mode refuses commands whose keys are in several slots; none of ours is refused."""
    server = RedisServer(cluster=True)
    try:
        rng = random.Random(3)
        embedded, index = ResidencyIndex(clock=lambda: 5.0), shared(server, clock=lambda: 5.0)
        for name in ("a", "b", "c"):
            for item in random_stream(rng, 20):
                for each in (embedded, index):
                    each.apply_record(name, item)
        same(embedded, index, random_stream.chains)  # type: ignore[attr-defined]
        assert held(index, "a") == held(embedded, "a")
        assert index.remove("b")
    finally:
        server.close()


def test_a_store_that_went_back_is_not_believed(server: RedisServer) -> None:
    """It comes back with an older state, as after a crash: the next batch shows the loss, and a clear heals it.

    Whoever brings the batches since once more, before a newer one, makes it exact again.
    """
    client = server.client()
    records = [record(seq, stored(H[seq : seq + 1], H[seq - 1] if seq else None)) for seq in range(10)]

    def went_back_to(position: int) -> SharedResidencyIndex:
        client.flushall()
        writer = shared(server)
        writer.apply_records("a", records[:position])
        old = {key: client.dump(key) for key in client.keys("kvhash:*")}
        writer.apply_records("a", records[position:9])
        client.flushall()
        for key, value in old.items():
            client.restore(key, 0, value)
        return writer

    continuing = went_back_to(5)
    assert continuing.position("a", 0) == 4
    continuing.apply_record("a", records[9])
    assert continuing.knowledge("a").reasons == ("lost",)
    assert continuing.longest_prefix(H)["a"].blocks == 5
    continuing.apply_record("a", record(10, CLEARED))
    assert continuing.knowledge("a").state is State.EXACT
    replaying = went_back_to(5)
    replaying.apply_records("a", records)
    assert replaying.knowledge("a").state is State.EXACT
    assert replaying.longest_prefix(H)["a"].blocks == 10


@pytest.mark.timeout(120)
def test_engines_spread_over_the_nodes_of_a_cluster() -> None:
    """Three nodes and a cluster's client: the embedded one's answers; away as a whole, it waits, and goes on."""
    cluster = RedisCluster()
    try:
        rng = random.Random(4)
        client = cluster.client()
        embedded = ResidencyIndex(clock=lambda: 5.0)
        index = SharedResidencyIndex(client, retry_s=0.0, clock=lambda: 5.0)
        names = [f"engine-{number}" for number in range(8)]
        for name in names:
            for item in random_stream(rng, 20):
                for each in (embedded, index):
                    each.apply_record(name, item)
        same(embedded, index, random_stream.chains)  # type: ignore[attr-defined]
        assert {held(index, name) == held(embedded, name) for name in names} == {True}
        nodes = {client.get_node_from_key(f"kvhash:{{{name}}}:meta").port for name in names}
        assert nodes == set(cluster.ports), "engines on one node only"
        assert index.remove("engine-3")
        assert "engine-3" not in index.engines()
        cluster.stop()
        assert index.longest_prefix(H, ["engine-1"])["engine-1"].blocks == 0
        assert index.knowledge("engine-1").reasons == ("store-unreachable",)
        late = record(10**6, stored(H[:2]), ts=1e9)
        index.apply_record("engine-1", late)
        embedded.apply_record("engine-1", late)
        assert index.pending == 1
        cluster.start()
        cluster.settle()
        wait_for(index.flush, "the record to be written")
        assert held(index, "engine-1") == held(embedded, "engine-1")
    finally:
        cluster.close()


def test_bad_clients_and_options_are_refused() -> None:
    """A client that decodes answers, and a time to live of nothing."""
    for client, options in ((redis.Redis(decode_responses=True), {}), (redis.Redis(), {"ttl_s": 0})):
        with pytest.raises(KvHashError):
            SharedResidencyIndex(client, **options)
