"""The shared index and its store: what a store refuses or holds of others, and what hostile engines leave in it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import redis

from kvhash import Contract, DecodeError
from kvhash.events import EventDecodeError, encode_batch
from kvhash.events.records import Batch, Gap, Lost, Restart
from kvhash.events.schema import BlockStored
from kvhash.index import EngineSettings, ResidencyIndex, State
from kvhash.index import shared as module
from kvhash.index.shared import SharedResidencyIndex

from .build import CLEARED, SIZE, batch, record, removed, stored
from .redis_server import RedisServer, shared

H = list(range(101, 161))
NEWEST = Contract.events_for_vllm("latest")


def test_a_store_that_is_full_is_away(server: RedisServer) -> None:
    """It answers and takes nothing: records wait, lookups go on, nothing raises; with room again they are written."""
    index = shared(server)
    index.apply_record("a", record(0, stored(H[:3])))
    server.client().config_set("maxmemory", 1)
    try:
        index.apply_record("a", record(1, stored(H[3:4], H[2])))
        assert (index.pending, index.reachable) == (1, False)
        assert shared(server).longest_prefix(H)["a"].blocks == 3
        assert index.knowledge("a").reasons == ("store-unreachable",)
    finally:
        server.client().config_set("maxmemory", 0)
    assert index.flush()
    assert index.longest_prefix(H)["a"].blocks == 4
    assert index.knowledge("a").exact


def losing(server: RedisServer, answers: list[bool], *, retried: bool = False) -> SharedResidencyIndex:
    """Return an index whose client gets no answer to a script while `answers` has True; `retried`: it asks again."""
    client = server.client()
    send = client.execute_command

    def execute(*args: Any, **options: Any) -> Any:
        answer = send(*args, **options)
        if args[0] == "EVALSHA" and answers and answers.pop():
            if not retried:
                raise redis.ConnectionError("the answer was lost")
            answer = send(*args, **options)
        return answer

    client.execute_command = execute  # type: ignore[method-assign]
    return SharedResidencyIndex(client, retry_s=0.0)


@pytest.mark.parametrize("retried", [False, True])
@pytest.mark.parametrize("payloads", [False, True])
def test_a_write_whose_answer_is_lost_is_taken_once(
    server: RedisServer, payloads: bool, retried: bool
) -> None:
    """Whether the client or the index writes again: batches without numbers, as those with, count once."""
    answers: list[bool] = []
    index = losing(server, answers, retried=retried)
    todo = [batch(stored(H[:1])), batch(stored(H[1:2], H[0])), batch(removed(H[1:2]))]
    for each in todo:
        index.flush()
        answers.append(True)
        if payloads:
            index.apply_payloads("a", [encode_batch(each, NEWEST)])
        else:
            index.apply("a", each)
    assert index.flush()
    assert (list(index.holdings("a").values()), index.stats()["removed_unknown"]) == ([{H[0]: 1}], 0)
    assert index.knowledge("a").exact
    assert index.stats()["repeated"] == len(todo)
    index.apply("a", batch(stored(H[1:2], H[0])))
    assert (index.longest_prefix(H)["a"].blocks, index.knowledge("a").exact) == (2, True)


def test_batches_without_numbers_that_never_came_are_missed(server: RedisServer) -> None:
    """What did not fit while the store was away, and what a store that comes back empty has forgotten, shows."""
    index = shared(server, max_pending=1)
    index.apply("a", batch(stored(H[:1])))
    server.client().config_set("maxmemory", 1)
    try:
        index.apply("a", batch(stored(H[4:5])))
        index.apply("a", batch(stored(H[5:6])))
    finally:
        server.client().config_set("maxmemory", 0)
    assert index.flush()
    assert index.knowledge("a").reasons == ("lost",)
    index.apply("a", batch(CLEARED))
    assert index.knowledge("a").exact
    server.client().flushall()
    index.apply("a", batch(stored(H[1:2], H[0])))
    assert index.knowledge("a").reasons == ("joined-late",)
    assert index.remove("a")
    index.apply("a", batch(stored(H[:1])))
    assert index.knowledge("a").exact


def test_any_number_of_former_writers_leaves_a_state_of_bounded_size(server: RedisServer) -> None:
    """A writer that takes over begins anew and is no loss; the last ones alone are remembered."""
    sizes = []
    for at in range(30):
        index = shared(server)
        index.apply("a", batch(stored([at + 1])))
        assert index.knowledge("a").exact
        sizes.append(server.client().hstrlen("kvhash:{a}:meta", "0"))
    assert sizes[-1] <= sizes[9] + 8


def test_what_no_index_wrote_is_no_state(server: RedisServer) -> None:
    """A typed error says so, for asking and for writing; the other engines are answered."""
    index = shared(server)
    index.apply_record("b", record(0, stored(H[:3])))
    for raw in (b"junk", b"\x80", b"\xc0", b"\x91" * 5000):
        server.client().hset("kvhash:{a}:meta", "0", raw)
        fresh = shared(server)
        for call in (
            lambda fresh=fresh: fresh.knowledge("a"),
            lambda fresh=fresh: fresh.longest_prefix(H, ["a"]),
            lambda fresh=fresh: fresh.apply_record("a", record(0)),
        ):
            with pytest.raises(DecodeError, match="no index wrote"):
                call()
        assert fresh.longest_prefix(H, ["b"])["b"].blocks == 3
    server.client().delete("kvhash:{a}:meta")


def test_hostile_places_leave_nothing_behind(server: RedisServer) -> None:
    """Stores and removals of ever new groups, life after life: as many keys and bytes of state as one life may have."""
    index, embedded = shared(server, clock=lambda: 5.0), ResidencyIndex(clock=lambda: 5.0)
    sizes = []
    for life in range(4):
        events = [
            stored(H[:2], group_idx=1000 * (life + 1) + group, medium=medium, locality=locality)
            for group in range(70)
            for medium in ("GPU", "CPU", "DISK")
            for locality in ("LOCAL", "REMOTE")
        ]
        gone = [removed(H[:1], group_idx=10**6 + group) for group in range(300)]
        for each in (index, embedded):
            each.apply_record("a", record(0, *events, *gone, ts=10.0 * life))
        assert index.holdings("a") == embedded.holdings("a")
        assert len(index.holdings("a")) == 64 * 6 > 255
        assert index.knowledge("a") == embedded.knowledge("a")
        assert index.stats()["refused"] == embedded.stats()["refused"] == 36 * (life + 1)
        assert index.stats()["removed_unknown"] == embedded.stats()["removed_unknown"] == 300 * (life + 1)
        assert index.longest_prefix(H) == embedded.longest_prefix(H)
        sizes.append((len(server.client().keys("kvhash:*")), server.client().hstrlen("kvhash:{a}:meta", "0")))
        for each in (index, embedded):
            each.apply_record("a", Restart("e", 0, 0))
    assert max(keys for keys, _ in sizes) <= sizes[0][0]
    assert max(size for _, size in sizes) < 1.1 * sizes[0][1]
    assert index.remove("a")
    assert server.client().keys("kvhash:{a}*") == []


def test_an_engine_has_no_more_ranks_than_engines_have(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank more scores nothing, is counted, and makes the engine DEGRADED for every replica, until its removal."""
    monkeypatch.setattr(module, "MAX_RANKS", 3)
    index, other = shared(server), shared(server, clock=lambda: 7.0)
    for rank in (None, -4, 12):
        index.apply_record("a", record(0, stored(H[:3]), rank=rank))
    assert index.knowledge("a").exact
    other.apply_records("a", [record(0, stored(H[:3]), rank=5), record(1, stored(H[:3]), rank=5)])
    assert other.pending == 0
    assert index.ranks("a") == [None, -4, 12]
    assert (index.knowledge("a").state, index.knowledge("a").reasons) == (State.DEGRADED, ("refused",))
    assert (index.knowledge("a").since, other.stats()["refused"]) == (7.0, 2)
    assert index.knowledge("a", 12).exact
    index.apply_record("a", record(1, stored(H[3:4], H[2]), rank=12))
    assert index.longest_prefix(H)["a"].blocks == 4
    assert index.remove("a")
    index.apply_record("a", record(0, rank=5))
    assert index.knowledge("a").exact


def test_batches_without_numbers_follow_each_other(server: RedisServer) -> None:
    """`apply` is for a single writer; what waits while the server is away is applied in order all the same."""
    index = shared(server)
    index.apply("a", batch(stored(H[:1]), ts=5.0))
    server.stop()
    for n in (1, 2, 3):
        index.apply("a", batch(stored(H[n : n + 1], H[n - 1]), ts=5.0 + n % 2))
    assert index.pending == 3
    server.start()
    index.apply("a", batch(stored(H[4:5], H[3]), ts=5.0))
    assert (index.pending, index.position("a", 0)) == (0, 4)
    assert index.longest_prefix(H)["a"].blocks == 5
    assert index.knowledge("a").exact
    assert index.stats()["repeated"] == index.stats()["restarts"] == 0


def test_removing_an_engine_drops_what_waits_of_it(server: RedisServer) -> None:
    """It does not come back by records that were older than its removal; those of others are kept."""
    index = shared(server)
    index.apply_record("a", record(0, stored(H[:1])))
    server.stop()
    for name in ("a", "b"):
        index.apply_record(name, record(1, stored(H[:1])))
    assert not index.remove("a")
    assert index.pending == 2
    server.start()
    assert index.remove("a")
    assert index.flush()
    assert index.engines() == ["b"]


def test_threads_feed_engines_of_their_own(server: RedisServer) -> None:
    """Four threads and a reader: every batch is applied once, in order, and nothing raises."""
    index = shared(server)
    faults: list[BaseException] = []

    def feed(name: str) -> None:
        try:
            for seq in range(50):
                index.apply_record(name, record(seq, stored(H[seq : seq + 1], H[seq - 1] if seq else None)))
        except BaseException as error:
            faults.append(error)

    def ask() -> None:
        try:
            while any(thread.is_alive() for thread in feeders):
                for match in index.longest_prefix(H).values():
                    assert match.blocks <= 50
                index.knowledge("engine-1")
                index.stats()
        except BaseException as error:
            faults.append(error)

    feeders = [threading.Thread(target=feed, args=(f"engine-{n}",)) for n in range(4)]
    asking = threading.Thread(target=ask)
    for thread in (*feeders, asking):
        thread.start()
    for thread in (*feeders, asking):
        thread.join()
    assert faults == []
    for n in range(4):
        assert index.longest_prefix(H)[f"engine-{n}"].blocks == 50
        assert index.knowledge(f"engine-{n}").exact
    assert index.stats()["stored"] == 200


def test_every_tier_ends_its_chunks_as_the_embedded_index_does(server: RedisServer) -> None:
    """REMOTE device blocks are retrievable one by one; reported reuse does not take away where a chunk ends."""
    settings = {"b": EngineSettings(reports_reuse=True, tokens_per_hash=SIZE)}
    index, embedded = shared(server, settings=settings), ResidencyIndex(settings=settings)
    for each in (index, embedded):
        each.apply_record("a", record(0, stored(H[:5], locality="REMOTE"), stored(H[:2])))
        each.apply_record(
            "b", record(0, stored(H[:2]), stored(H[:5], medium="CPU"), stored(H[:4], medium="CPU"))
        )
        each.apply_record("b", record(1, removed(H[:2])))
        assert each.longest_prefix(H[:4])["a"].remote == {"GPU": 2}
        assert each.longest_prefix(H[:4])["b"].by_tier == {"CPU": 4}
        assert each.knowledge("b").reasons == ("reuse-reported",)
    assert index.longest_prefix(H) == embedded.longest_prefix(H)


def test_statistics_have_the_embedded_index_s_names(server: RedisServer) -> None:
    """Each count is there from the beginning and is the embedded one's, but for what takes knowing the blocks."""
    index, embedded = shared(server), ResidencyIndex()
    assert set(embedded.stats()) - set(index.stats()) == {
        *(
            "engines",
            "blocks",
            "evicted",
            "collisions",
            "conflicts",
            "tokenless",
            "sparse_placed",
            "sparse_unplaced",
        )
    }
    records: list[Any] = [
        record(0, stored(H[:3]), stored(H[:1], medium="TAPE"), removed(H[:1]), removed(H[7:9])),
        record(0, stored(H[:3]), ts=0.0),
        Gap("e", 0, 1, 3),
        Lost("e", 0, 1, 3, "no-replay"),
        record(4, CLEARED, BlockStored((H[0],), None, (), 1 << 40)),
        Restart("e", 0, 4),
        record(0, ts=9.0),
        Batch("e", 0, 0, b"", 0, batch(ts=11.0), b""),
    ]
    for each in (index, embedded):
        for one in records:
            each.apply_record("a", one)
    for name in set(index.stats()) & set(embedded.stats()) - {"reachable"}:
        assert index.stats()[name] == embedded.stats()[name], name
    assert (index.stats()["restarts"], index.stats()["lost"], index.stats()["repeated"]) == (2, 3, 1)


def test_payloads_are_applied_as_the_embedded_index_does(server: RedisServer) -> None:
    """Batches of two ranks as they were published; one that cannot be read is named, and costs exactness."""
    index, embedded = shared(server, clock=lambda: 5.0), ResidencyIndex(clock=lambda: 5.0)
    payloads = [
        encode_batch(batch(stored(H[n : n + 1], H[n - 1] if n else None), rank=n % 2, ts=n)) for n in range(9)
    ]
    for each in (index, embedded):
        each.apply_payloads("a", iter(payloads[:5]))
        assert each.knowledge("a").exact
        with pytest.raises(EventDecodeError) as caught:
            each.apply_payloads("a", [*payloads[5:7], b"\xc1", *payloads[7:]])
        assert caught.value.at == "$[2]"
        assert each.knowledge("a").reasons == each.knowledge("a", 1).reasons == ("undecodable",)
        assert each.stats()["bad_messages"] == 1
        assert each.stats()["batches"] == 7
    assert index.holdings("a") == embedded.holdings("a")
    assert index.longest_prefix(H) == embedded.longest_prefix(H)
    assert index.knowledge("a") == embedded.knowledge("a")
