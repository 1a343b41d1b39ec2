"""Publisher and subscriber over real sockets, on loopback."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import zmq

from kvhash._errors import UsageError
from kvhash.events.aio import AsyncSubscriber
from kvhash.events.encode import encode_batch
from kvhash.events.endpoint import (
    EndpointError,
    binds,
    check_connectable,
    is_loopback,
    offset_endpoint,
    parse_ranks,
)
from kvhash.events.publisher import Publisher, PublisherClosedError
from kvhash.events.records import BadMessage, Batch, Gap, Lost, Record, Recovered, Restart
from kvhash.events.schema import AllBlocksCleared, BlockStored, EventBatch
from kvhash.events.subscriber import RemoteEndpointWarning, Source, Subscriber

from ..data_files import CAPTURES, capture
from ..ports import free_base, free_endpoints
from ..waiting import wait_for

ANY = "tcp://127.0.0.1:*"


def _batch(number: int, rank: int | None = None) -> EventBatch:
    return EventBatch(time.time(), (BlockStored((number + 1,), None, (1, 2), 2, medium="GPU"),), rank)


def _publisher(**options: Any) -> Publisher:
    return Publisher(ANY, ANY, **{"release": "0.33.0", **options})


def _source(publisher: Publisher) -> Source:
    return Source(publisher.endpoint, publisher.replay_endpoint)


def _until(
    subscriber: Subscriber, done: Callable[[list[Record]], bool], timeout: float = 20.0
) -> list[Record]:
    """Read records until `done`, or fail at the deadline."""
    deadline = time.monotonic() + timeout
    records: list[Record] = []
    while not done(records):
        assert time.monotonic() < deadline, records[-5:]
        record = subscriber.poll(0.2)
        if record is not None:
            records.append(record)
    return records


def _seqs(records: list[Record]) -> list[int]:
    return [record.seq for record in records if isinstance(record, Batch)]


def _join(subscriber: Subscriber, publisher: Publisher) -> list[Record]:
    """Publish until the subscription has arrived; return what was received."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        publisher.publish(_batch(0))
        record = subscriber.poll(0.05)
        if record is not None:
            return [record]
    raise AssertionError("nothing arrived")


# --- subscriber and publisher together ------------------------------------------------------------------------


@pytest.mark.parametrize("release", ["0.25.0", "0.26.0", "0.33.0"])
def test_everything_from_the_start_in_both_replay_framings(release: str) -> None:
    """A late subscriber that asks from the start gets every batch, in order, then goes on live."""
    with _publisher(release=release) as publisher:
        for number in range(50):
            publisher.publish(_batch(number))
        with Subscriber(_source(publisher), from_seq="start", probe_idle_s=0.5) as subscriber:
            records = _until(subscriber, lambda r: len(_seqs(r)) >= 50)
            assert _seqs(records) == list(range(50))
            publisher.publish(_batch(50))
            assert _seqs(_until(subscriber, lambda r: len(_seqs(r)) >= 1)) == [50]


def test_the_last_batches_before_joining() -> None:
    """from_seq=-3 begins three batches before the first live one."""
    with _publisher() as publisher:
        for number in range(20):
            publisher.publish(_batch(number))
        wait_for(
            lambda: publisher.published == 20, "the batches"
        )  # else a quick subscriber sees the first of them live
        with Subscriber(_source(publisher), from_seq=-3) as subscriber:
            records = _join(subscriber, publisher)
            records += _until(subscriber, lambda r: any(not b.replayed for b in r if isinstance(b, Batch)))
    seqs = _seqs(records)
    live = next(b.seq for b in records if isinstance(b, Batch) and not b.replayed)
    assert live >= 20
    assert seqs[0] == live - 3
    assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))


def test_a_capture_published_again_is_read_back_frame_by_frame() -> None:
    """Every recorded payload of a real server arrives as it is."""
    payloads = [bytes.fromhex(payload) for _t, _s, payload in capture(CAPTURES[1])["frames"]]
    with _publisher() as publisher:
        for payload in payloads:
            publisher.publish_payload(payload)
        with Subscriber(_source(publisher), from_seq="start", probe_idle_s=0.5) as subscriber:
            records = _until(subscriber, lambda r: len(_seqs(r)) >= len(payloads))
    assert [record.payload for record in records if isinstance(record, Batch)] == payloads


def test_ranks_on_neighbouring_ports() -> None:
    """Ranks 0 to 2 publish on port, port + 1, port + 2; each is followed by its own sequence."""
    base = free_base(1, 2, 100, 101, 102)
    endpoint, replay = f"tcp://*:{base}", f"tcp://*:{base + 100}"
    publishers = [Publisher(endpoint, replay, data_parallel_rank=rank) for rank in range(3)]
    try:
        for number in range(5):
            for publisher in publishers:
                publisher.publish(_batch(number))
        sources = Source.for_ranks(f"tcp://127.0.0.1:{base}", f"tcp://127.0.0.1:{base + 100}", range(3))
        with Subscriber(sources, from_seq="start") as subscriber:
            records = _until(subscriber, lambda r: len(_seqs(r)) >= 15)
    finally:
        for publisher in publishers:
            publisher.close()
    for rank in range(3):
        assert [r.seq for r in records if isinstance(r, Batch) and r.rank == rank] == list(range(5))


def test_two_publishers_behind_one_socket() -> None:
    """Publishers that connect to the subscriber's socket interleave 0, 0, 1, 1; the rank tells them apart."""
    port = free_base()
    with Subscriber(f"tcp://127.0.0.1:{port}", bind=True) as subscriber:
        a, b = (Publisher(f"tcp://127.0.0.1:{port}", release="0.33.0") for _ in range(2))
        with a, b:
            deadline = time.monotonic() + 20
            records: list[Record] = []
            while not all(
                len([r for r in records if isinstance(r, Batch) and r.rank == rank]) >= 3 for rank in (1, 2)
            ):
                assert time.monotonic() < deadline
                for publisher, rank in ((a, 1), (b, 2)):
                    publisher.publish(_batch(0, rank))
                record = subscriber.poll(0.05)
                records += [] if record is None else [record]
    assert not [r for r in records if isinstance(r, (Gap, Lost, Restart))]


def test_a_slow_reader_learns_the_exact_missing_range() -> None:
    """High-water marks of a few messages and a reader that sleeps: what ZeroMQ dropped is reported as lost, exactly."""
    publisher = Publisher(ANY, None, hwm=2, release="0.33.0")
    with publisher, Subscriber(publisher.endpoint, rcvhwm=2, reorder_s=0.05) as subscriber:
        first = _join(subscriber, publisher)
        start = _seqs(first)[0]
        big = encode_batch(
            EventBatch(time.time(), (BlockStored((1,), None, tuple(range(200_000)), 1),), 0), "0.33.0"
        )
        for _ in range(100):
            publisher.publish_payload(big)
        records = first
        deadline = time.monotonic() + 30
        while not any(isinstance(r, Lost) for r in records):
            assert time.monotonic() < deadline
            publisher.publish(_batch(1))
            record = subscriber.poll(0.05)
            records += [] if record is None else [record]
        records += _until(subscriber, lambda r: bool(_seqs(r)))
    covered = set(_seqs(records))
    for record in records:
        if isinstance(record, Lost):
            covered |= set(range(record.first, record.last + 1))
    assert covered == set(range(start, max(covered) + 1))


def test_replay_over_a_small_mark_still_ends() -> None:
    """10,000 buffered batches replayed: no message is dropped, and the end marker comes."""
    with _publisher(buffer_steps=10_000) as publisher:
        for number in range(10_000):
            publisher.publish(_batch(number))
        with Subscriber(_source(publisher), from_seq="start", probe_idle_s=0.5) as subscriber:
            records = _until(subscriber, lambda r: len(_seqs(r)) >= 10_000, timeout=60)
    assert _seqs(records) == list(range(10_000))


def test_a_stalled_replay_client_stalls_nobody() -> None:
    """One client asks again and again and never reads; another is answered, and live batches go on."""
    with (
        _publisher(buffer_steps=200) as publisher,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as stalled,
    ):
        stalled.setsockopt(zmq.RCVHWM, 1)
        stalled.setsockopt(zmq.LINGER, 0)
        assert publisher.replay_endpoint is not None
        stalled.connect(publisher.replay_endpoint)
        for number in range(200):
            publisher.publish(_batch(number))
        for _ in range(20):
            stalled.send_multipart((b"", bytes(8)))
        with Subscriber(_source(publisher), from_seq="start", probe_idle_s=0.5) as subscriber:
            assert len(_seqs(_until(subscriber, lambda r: len(_seqs(r)) >= 200))) == 200
            publisher.publish(_batch(1))
            assert _seqs(_until(subscriber, lambda r: bool(_seqs(r)))) == [200]


def test_a_replay_socket_that_never_answers() -> None:
    """The deadline passes, the range is lost, the stream goes on."""
    with _publisher() as publisher, zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        source = Source(publisher.endpoint, f"tcp://127.0.0.1:{port}")
        with Subscriber(source, from_seq="start", replay_timeout=0.2) as subscriber:
            deadline = time.monotonic() + 20
            records: list[Record] = []
            for _ in range(5):
                publisher.publish(_batch(0))
            while not _seqs(records):
                assert time.monotonic() < deadline
                publisher.publish(_batch(0))
                record = subscriber.poll(0.1)
                records += [] if record is None else [record]
        silent.close(0)
    lost = [r for r in records if isinstance(r, Lost)]
    assert [r.reason for r in lost] in ([], ["no-answer"])
    assert _seqs(records)[0] == (lost[0].last + 1 if lost else 0)


def test_a_restart_that_says_nothing_is_seen_at_the_new_connection() -> None:
    """Killed and started again, nothing published since: a Restart, though no message and no silence told it."""
    first = Publisher(*free_endpoints(), release="0.33.0", bind=True)
    first.publish(_batch(0))
    wait_for(lambda: first.published == 1, "the batch")
    source = _source(first)
    with Subscriber(source, from_seq="start", probe_idle_s=None) as subscriber:
        _until(subscriber, lambda r: _seqs(r) == [0])
        # The first connection is made before there is a second one.
        first.publish(_batch(1))
        _until(subscriber, lambda r: _seqs(r) == [1])
        first.close()
        with Publisher(source.endpoint, source.replay_endpoint, release="0.33.0", bind=True) as second:
            records = _until(subscriber, lambda r: any(isinstance(one, Restart) for one in r))
            assert _seqs(records) == []
            second.publish(_batch(0))
            assert _seqs(_until(subscriber, lambda r: len(_seqs(r)) >= 1)) == [0]


def test_what_was_published_before_the_first_connection_is_asked_for() -> None:
    """A replay has brought the beginning; two more are published before the live socket connects, then nothing."""
    with _publisher() as publisher, zmq.Context() as context:
        port = free_base()
        for number in range(3):
            publisher.publish(_batch(number))
        wait_for(lambda: publisher.published == 3, "the beginning")
        source = Source(f"tcp://127.0.0.1:{port}", publisher.replay_endpoint)
        with Subscriber(source, from_seq="start", probe_idle_s=None) as subscriber:
            assert _seqs(_until(subscriber, lambda records: len(records) == 3)) == [0, 1, 2]
            for number in (3, 4):
                publisher.publish(_batch(number))
            wait_for(lambda: publisher.published == 5, "the rest")
            socket = context.socket(zmq.PUB)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(f"tcp://127.0.0.1:{port}")
            assert _seqs(_until(subscriber, lambda records: len(records) == 2)) == [3, 4]
            socket.close(0)


def test_a_restart_over_sockets() -> None:
    """The engine is killed and started again on its port: a Restart, then the new life from its first batch."""
    first = Publisher(*free_endpoints(), release="0.33.0", bind=True)
    source = _source(first)
    with Subscriber(source, from_seq="start", probe_idle_s=0.5) as subscriber:
        for number in range(10):
            first.publish(_batch(number))
        _until(subscriber, lambda r: len(_seqs(r)) >= 10)
        first.close()
        with Publisher(source.endpoint, source.replay_endpoint, release="0.33.0", bind=True) as second:
            deadline = time.monotonic() + 20
            records: list[Record] = []
            while not any(isinstance(r, Restart) for r in records):
                assert time.monotonic() < deadline
                second.publish(_batch(0))
                record = subscriber.poll(0.05)
                records += [] if record is None else [record]
            second.publish(_batch(1))
            second.publish(_batch(2))
            records += _until(subscriber, lambda r: len(_seqs(r)) >= 2)
    after = records[next(i for i, r in enumerate(records) if isinstance(r, Restart)) :]
    assert _seqs(after)[:2] == [0, 1]


def test_foreign_messages_are_counted_and_passed_over() -> None:
    """Messages of 1, 2 and 4 frames and rubbish payloads are records; good ones around them are delivered."""
    with zmq.Context() as context, context.socket(zmq.PUB) as pub:
        port = pub.bind_to_random_port("tcp://127.0.0.1")
        good = encode_batch(_batch(0, 0), "0.33.0")
        with Subscriber(f"tcp://127.0.0.1:{port}") as subscriber:
            deadline = time.monotonic() + 20
            records: list[Record] = []
            seq = 0
            while len(records) < 30:
                assert time.monotonic() < deadline
                for frames in (
                    [b"x"],
                    [b"x", b"y"],
                    [b"", bytes(8), b"", b""],
                    [b"", seq.to_bytes(8, "big"), good],
                ):
                    pub.send_multipart(frames)
                seq += 1
                record = subscriber.poll(0.05)
                records += [] if record is None else [record]
        pub.close(0)
    assert any(isinstance(r, BadMessage) for r in records)
    seqs = _seqs(records)
    assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))


@pytest.mark.parametrize("endpoint", ["ipc://{tmp}/kv.sock", "tcp://[::1]:*"])
def test_ipc_and_ipv6(endpoint: str, tmp_path: Any) -> None:
    """The same over a Unix socket and over IPv6."""
    with (
        Publisher(endpoint.format(tmp=tmp_path), release="0.33.0") as p,
        Subscriber(p.endpoint) as subscriber,
    ):
        assert _seqs(_join(subscriber, p))


def test_topics_are_matched_by_prefix() -> None:
    """A subscription takes the topics that begin with it, also odd ones."""
    topic = "kv@10.0.0.1:8000@org/model@v2"
    with Publisher(ANY, topic=topic, release="0.33.0") as publisher:
        with Subscriber(publisher.endpoint, topic="kv@10.0.0.1") as subscriber:
            (record,) = _join(subscriber, publisher)
            assert isinstance(record, Batch)
            assert record.topic == topic.encode()
        with Subscriber(publisher.endpoint, topic="other") as subscriber:
            for _ in range(20):
                publisher.publish(_batch(0))
            assert subscriber.poll(0.3) is None


def test_the_asynchronous_form_yields_the_same() -> None:
    """`async for` over a late join from the start."""

    async def read(publisher: Publisher) -> list[Record]:
        records: list[Record] = []
        async with AsyncSubscriber(_source(publisher), from_seq="start", idle_timeout=20) as subscriber:
            async for record in subscriber:
                records.append(record)
                if len(_seqs(records)) >= 30:
                    break
        return records

    with _publisher() as publisher:
        for number in range(30):
            publisher.publish(_batch(number))
        assert _seqs(asyncio.run(read(publisher))) == list(range(30))


@pytest.mark.filterwarnings("ignore::kvhash.events.subscriber.RemoteEndpointWarning")
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("replay", [None, "tcp://127.0.0.1:2"])
def test_an_endpoint_that_zmq_refuses_is_named(before: int, replay: str | None) -> None:
    """A host's name that none has: a typed error with nothing behind it; all sockets are closed."""
    sources = [Source("tcp://127.0.0.1:1", replay)] * before + [Source("tcp://a b:1", replay)]
    context: zmq.Context[Any] = zmq.Context()
    opened: list[zmq.Socket[Any]] = []
    make = context.socket
    context.socket = lambda kind: opened.append(make(kind)) or opened[-1]  # type: ignore[method-assign, func-returns-value]
    with pytest.raises(UsageError, match="cannot connect to tcp://a b:1") as caught:
        Subscriber(sources, context=context)
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    assert len(opened) > before
    assert all(socket.closed for socket in opened)
    context.term()  # would wait for ever for a socket, or a monitor, that is still open


@pytest.mark.parametrize("number", [1 << 64, (1 << 64) - 1, -(1 << 64), 10**30, 1.5, True, None, "end"])
def test_a_number_that_no_batch_has_is_refused(number: Any) -> None:
    """Before anything is connected, and not when it is to be sent."""
    with pytest.raises(UsageError) as caught:
        Subscriber(Source("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"), from_seq=number)
    assert caught.value.code == "invalid-from-seq"


def test_idle_and_closed_subscribers_end() -> None:
    """Nothing for a while ends the iteration when asked; a closed subscriber yields nothing more."""
    with _publisher() as publisher, Subscriber(publisher.endpoint, idle_timeout=0.2) as subscriber:
        assert list(subscriber) == []
        subscriber.close()
        subscriber.close()
        assert list(subscriber) == []


# --- publisher alone ------------------------------------------------------------------------------------------


def test_a_full_queue_drops_and_counts_or_blocks() -> None:
    """With ``drop`` the caller never waits and the loss is counted; with ``block`` every batch is published."""
    with _publisher(max_queue_size=1, when_full="drop") as publisher:
        taken = sum(publisher.publish(_batch(number)) for number in range(2000))
        assert taken + publisher.dropped == 2000
    with _publisher(max_queue_size=1) as publisher:
        assert all(publisher.publish(_batch(number)) for number in range(200))
    assert publisher.published == 200


def test_close_flushes_and_always_returns() -> None:
    """What is queued is published before the end; a second close does nothing; publishing afterwards is an error."""
    publisher = _publisher()
    for number in range(500):
        publisher.publish(_batch(number))
    assert publisher.close(timeout=10) == 0
    assert publisher.published == 500
    assert publisher.close() == 0
    with pytest.raises(PublisherClosedError):
        publisher.publish(_batch(0))


def test_the_rank_is_filled_in() -> None:
    """A batch without a rank is published with the publisher's."""
    with (
        Publisher(ANY, data_parallel_rank=0, release="0.33.0") as publisher,
        Subscriber(publisher.endpoint) as subscriber,
    ):
        (record,) = _join(subscriber, publisher)
        assert record.rank == 0
        publisher.publish(EventBatch(time.time(), (AllBlocksCleared(),), 7))
        records = _until(subscriber, lambda r: any(x.rank == 7 for x in r))
        assert records


# --- endpoints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://[::1]:5557", 2, "tcp://[::1]:5559"),
        ("inproc://cache", 2, "inproc://cache_dp2"),
        ("ipc:///tmp/x", 0, "ipc:///tmp/x"),
        ("tcp://*:0", 1, "tcp://*:0"),
    ],
)
def test_rank_offsets(endpoint: str, rank: int, expected: str) -> None:
    """VLLM's rule: the port plus the rank, a suffix for inproc; port 0 is left to the system from 0.33."""
    assert offset_endpoint(endpoint, rank) == expected
    assert offset_endpoint("tcp://*:0", 1, port_zero_from_os=False) == "tcp://*:1"


@pytest.mark.parametrize(
    ("endpoint", "rank"),
    [
        ("5557", 0),
        ("tcp://host", 0),
        ("tcp://h:99999", 0),
        ("tcp://h:65535", 1),
        ("ipc:///tmp/x", 1),
        ("udp://h:1", 0),
        ("tcp://h:1", -1),
    ],
)
def test_endpoints_that_cannot_be(endpoint: str, rank: int) -> None:
    """No scheme, no port, a port out of range, ranks on ipc: typed errors."""
    with pytest.raises(EndpointError):
        offset_endpoint(endpoint, rank)


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557", "tcp://:5557", "tcp://h:0", "x"]
)
def test_wildcards_are_not_connected_to(endpoint: str) -> None:
    """Where a publisher listens is no address to connect to, and the error says so."""
    with pytest.raises(EndpointError):
        check_connectable(endpoint)
    with pytest.raises(EndpointError):
        Subscriber(endpoint)


def test_a_path_longer_than_a_unix_sockets_is_refused() -> None:
    """In bytes, not letters, and before anything is connected; a path of exactly the longest length is taken."""
    longest = zmq.IPC_PATH_MAX_LEN
    assert check_connectable("ipc://" + "x" * longest)
    for path in ("x" * (longest + 1), chr(0xE9) * (longest // 2 + 1)):
        with pytest.raises(EndpointError, match=f"at most {longest} bytes"):
            Subscriber(Source("tcp://127.0.0.1:1", f"ipc://{path}"))


def test_who_binds() -> None:
    """Wildcards, ipc and inproc are bound to, other addresses connected to: two such sides never meet."""
    assert all(map(binds, ("tcp://*:1", "tcp://[::]:1", "ipc://x", "inproc://x")))
    assert not any(map(binds, ("tcp://127.0.0.1:1", "tcp://h:1")))


def test_a_remote_engine_is_warned_about_once() -> None:
    """Token ids travel in clear: said for a remote endpoint, not for loopback."""
    assert is_loopback("tcp://127.0.0.1:1")
    assert is_loopback("tcp://[::1]:1")
    assert is_loopback("tcp://localhost:1")
    assert is_loopback("ipc://x")
    with pytest.warns(RemoteEndpointWarning, match="in clear"):
        Subscriber("tcp://192.0.2.1:5557").close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Subscriber("tcp://127.0.0.1:5557").close()


def test_rank_lists() -> None:
    """0-7, lists and mixtures; anything else is an error."""
    assert parse_ranks("0-3") == (0, 1, 2, 3)
    assert parse_ranks("0,2,5-6,2") == (0, 2, 5, 6)
    for text in ("", "a", "3-1", "1-", "-1"):
        with pytest.raises(EndpointError):
            parse_ranks(text)


def test_a_port_that_is_taken() -> None:
    """The publisher says which endpoint it cannot use."""
    with Publisher(ANY, release="0.33.0") as publisher, pytest.raises(EndpointError, match="cannot use"):
        Publisher(publisher.endpoint.replace("127.0.0.1", "*"), release="0.33.0")
    assert Recovered
