"""What a reading of the subscriber and the publisher found broken: one test a promise."""

from __future__ import annotations

import threading
import time
import warnings
from typing import Any

import pytest
import zmq

from kvhash._errors import UsageError
from kvhash.events.aio import AsyncSubscriber
from kvhash.events.encode import encode_batch
from kvhash.events.endpoint import EndpointError, check_connectable
from kvhash.events.message import END_SEQ, Message, parse_message, parse_reply
from kvhash.events.publisher import Publisher
from kvhash.events.records import BadMessage, Batch, Gap, Lost, Record, Recovered, Restart
from kvhash.events.schema import BlockStored, EventBatch
from kvhash.events.subscriber import Source, Subscriber
from kvhash.events.tracker import PublisherTracker

ANY = "tcp://127.0.0.1:*"


def _payload(ts: float, rank: int = 0) -> bytes:
    return encode_batch(EventBatch(ts, (BlockStored((1,), None, (), 0, medium="GPU"),), rank), "0.33.0")


def _live(seq: int, ts: float, *, readable: bool = True) -> Message:
    frames = [b"t", seq.to_bytes(8, "big"), _payload(ts) if readable else b"\xc1"]
    message = parse_message(frames, "e", 0)
    assert isinstance(message, Message)
    return message


def _reply(seq: int) -> Message:
    payload = b"" if seq == END_SEQ else _payload(float(seq))
    message = parse_reply([b"", b"t", seq.to_bytes(8, "big"), payload], 0)
    assert message is not None
    return message


def _short(records: list[Record]) -> list[object]:
    return [
        r.seq
        if isinstance(r, (Batch, BadMessage))
        else (type(r).__name__, r.first, r.last)
        if isinstance(r, (Gap, Recovered, Lost))
        else type(r).__name__
        for r in records
    ]


@pytest.mark.parametrize("after_restart", [False, True])
@pytest.mark.parametrize("hole", [4, 5])
def test_an_unreadable_batch_says_nothing_about_time(after_restart: bool, hole: int) -> None:
    """The good batches behind it are delivered, also behind a hole and soon after a restart: no Stale, no Restart."""
    tracker = PublisherTracker("e", 0, can_replay=False, reorder_s=0.1)
    if after_restart:
        tracker.live(_live(7, 1.0), 0)
    records: list[Record] = []
    for seq in range(20):
        if seq != hole:
            records += tracker.live(_live(seq, 100.0 + seq, readable=seq != 3), seq * 0.2)
    begin = ["Restart"] if after_restart else []
    assert _short(records) == [
        *begin,
        *range(hole),
        ("Gap", hole, hole),
        ("Lost", hole, hole),
        *range(hole + 1, 20),
    ]


def test_a_hole_over_the_wrap_is_two_ranges() -> None:
    """2^64 - 4, then 1: both ends of each reported range are numbers, the first not above the last."""
    tracker = PublisherTracker("e", 0, can_replay=False, reorder_s=0.0)
    records = [*tracker.live(_live(END_SEQ - 3, 1.0), 0), *tracker.live(_live(1, 2.0), 0)]
    records += tracker.tick(1) + tracker.tick(2)
    lost = [(r.first, r.last) for r in records if isinstance(r, Lost)]
    assert lost == [(END_SEQ - 2, END_SEQ - 1), (0, 0)]
    assert [r.seq for r in records if isinstance(r, Batch)] == [END_SEQ - 3, 1]


def test_the_end_marker_is_no_batch() -> None:
    """A live message numbered -1 is a BadMessage; it does not pull the stream to the end of all numbers."""
    assert isinstance(parse_message([b"", END_SEQ.to_bytes(8, "big"), _payload(1.0)], "e", 0), BadMessage)


def test_a_replay_that_repeats_itself_ends() -> None:
    """The same reply once a second, and never an end marker: the gap is given up, live batches go on."""
    tracker = PublisherTracker("e", 0, can_replay=True, replay_timeout=5.0)
    records = [*tracker.live(_live(0, 0.0), 0), *tracker.live(_live(5, 5.0), 0)]
    now = 0.0
    while now < 200 and not any(isinstance(r, Batch) and r.seq == 5 for r in records):
        now += 1
        records += tracker.reply(_reply(2), now) + tracker.tick(now)
    assert _short([r for r in records if not isinstance(r, Gap)]) == [
        0,
        ("Lost", 1, 1),
        2,
        ("Recovered", 2, 2),
        ("Lost", 3, 4),
        5,
    ]


def test_a_replay_longer_than_what_may_be_held() -> None:
    """A publisher keeps more batches than a subscriber holds back: all are delivered, none is called lost."""
    tracker = PublisherTracker("e", 0, can_replay=True, max_held=50)
    tracker.start_from(0, 0)
    records: list[Record] = []
    for seq in (*range(500), END_SEQ):
        records += tracker.reply(_reply(seq), 0)
        assert len(tracker._held) <= 50
    assert [r.seq for r in records if isinstance(r, Batch)] == list(range(500))
    assert len(records) == 500


def test_a_long_replay_over_a_bad_line_takes_the_attempts_that_it_needs() -> None:
    """Each attempt brings the next few batches only: as long as it does, nothing is given up."""
    tracker = PublisherTracker("e", 0, can_replay=True, replay_attempts=2)
    records = [*tracker.live(_live(0, 0.0), 0), *tracker.live(_live(41, 41.0), 0)]
    while tracker.replay is not None:
        first = tracker.expected
        assert first is not None
        for seq in (*range(first, min(first + 5, 41)), 41, END_SEQ):
            if tracker.replay is not None:
                records += tracker.reply(_reply(seq), 0)
    assert [r.seq for r in records if isinstance(r, Batch)] == list(range(42))
    assert not any(isinstance(r, Lost) for r in records)


def test_what_was_held_back_at_a_restart_is_delivered() -> None:
    """0, 1, 3, 4, then a new life: 2 is lost, 3 and 4 came and are not silently forgotten."""
    tracker = PublisherTracker("e", 0, can_replay=True)
    records = [r for seq in (0, 1, 3, 4) for r in tracker.live(_live(seq, float(seq)), 0)]
    records += tracker.live(_live(0, 100.0), 0)
    assert _short(records) == [0, 1, ("Gap", 2, 2), ("Lost", 2, 2), 3, 4, "Restart", 0]
    assert [r.last_seq for r in records if isinstance(r, Restart)] == [4]


@pytest.mark.parametrize("host", ["[::0]", "[0::]", "0", "0.0", "[::ffff:0.0.0.0]", "*", "", "[::]"])
def test_every_spelling_of_the_wildcard_is_refused(host: str) -> None:
    """No way of writing "any address" is an address to connect to."""
    with pytest.raises(EndpointError):
        check_connectable(f"tcp://{host}:5557")


def test_a_failing_publisher_leaves_the_callers_context_alone() -> None:
    """An endpoint that cannot be used closes the publisher's own sockets, no other in the same context."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    mine = context.socket(zmq.PUB)
    port = mine.bind_to_random_port("tcp://127.0.0.1")
    for where in ((f"tcp://127.0.0.1:{port}", None), (ANY, f"tcp://127.0.0.1:{port}")):
        with pytest.raises(EndpointError):
            Publisher(*where, bind=True, context=context)
    assert not mine.closed
    assert not context.closed
    mine.close(0)
    context.term()  # returns only when no socket was left open


@pytest.mark.parametrize("option", ["buffer_steps", "hwm", "max_queue_size"])
def test_sizes_that_cannot_be_are_refused(option: str) -> None:
    """A typed error that names the option."""
    for value in (-1, 1.5, float("nan"), True, None, "5", 1 << 64):
        with pytest.raises(UsageError, match=f"^{option} is"):
            Publisher(ANY, **{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Subscriber, AsyncSubscriber])
@pytest.mark.parametrize("option", ["replay_timeout", "reorder_s", "probe_idle_s", "idle_timeout", "rcvhwm"])
def test_times_and_sizes_that_cannot_be_are_refused(kind: Any, option: str) -> None:
    """A time that is no number would make every deadline true or never come."""
    for value in (-1, float("nan"), float("inf"), 10**400, True, "5"):
        with pytest.raises(UsageError, match=f"^{option} is"):
            kind(Source("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"), **{option: value})


def test_close_from_another_thread() -> None:
    """The iteration in the other thread just ends; no error of a closed socket reaches it."""
    for _ in range(3):
        faults: list[BaseException] = []
        began = threading.Event()
        subscriber = Subscriber("tcp://127.0.0.1:1")

        def follow(subscriber: Subscriber, faults: list[BaseException], began: threading.Event) -> None:
            began.set()
            try:
                list(subscriber)
            except BaseException as error:
                faults.append(error)

        thread = threading.Thread(target=follow, args=(subscriber, faults, began))
        thread.start()
        assert began.wait(10)
        subscriber.close()
        thread.join(10)
        assert not thread.is_alive()
        assert faults == []
        assert subscriber.poll(0) is None


def test_from_the_start_without_replay_says_what_is_missing() -> None:
    """Asked from 0, first seen later, and nobody replays: the part before is reported as lost."""
    with (
        Publisher(ANY, bind=True, first_seq=40, release="0.33.0") as publisher,
        Subscriber(publisher.endpoint, from_seq="start", reorder_s=0.05) as subscriber,
    ):
        records: list[Record] = []
        deadline = time.monotonic() + 20
        while not any(isinstance(r, Batch) for r in records):
            assert time.monotonic() < deadline
            publisher.publish_payload(_payload(time.time()))
            record = subscriber.poll(0.05)
            records += [] if record is None else [record]
    batch = records[-1]
    assert isinstance(batch, Batch)
    assert _short(records) == [("Gap", 0, batch.seq - 1), ("Lost", 0, batch.seq - 1), batch.seq]


def test_unreadable_batches_of_two_publishers_make_no_third() -> None:
    """They have no rank: no gap is ever seen between the unreadable batches of one rank and of another."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    numbers = [0, 0]

    def send(rank: int, *, readable: bool = True) -> None:
        payload = _payload(time.time(), rank) if readable else b"\xc1"
        socket.send_multipart([b"", numbers[rank].to_bytes(8, "big"), payload])
        numbers[rank] += 1

    records: list[Record] = []
    with Subscriber(f"tcp://127.0.0.1:{port}", reorder_s=0.05) as subscriber:
        deadline = time.monotonic() + 20
        while subscriber.poll(0.05) is None:
            assert time.monotonic() < deadline
            send(0)
        for _ in range(100):  # far from rank 0's numbers
            send(1)
        for readable, rank in ((False, 0), (True, 0), (False, 1), (True, 1)):
            send(rank, readable=readable)
        last = (1, numbers[1] - 1)
        while (1, last[1]) not in {(r.rank, r.seq) for r in records if isinstance(r, Batch)}:
            assert time.monotonic() < deadline, records[-5:]
            record = subscriber.poll(0.2)
            records += [] if record is None else [record]
    context.destroy(linger=0)
    assert sum(isinstance(r, BadMessage) for r in records) == 2
    assert [r for r in records if not isinstance(r, (Batch, BadMessage))] == []


def test_one_warning_for_all_ranks_of_a_remote_engine() -> None:
    """Eight ranks, one warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Subscriber(Source.for_ranks("tcp://192.0.2.1:5557", ranks=range(8))).close()
    assert len(caught) == 1
