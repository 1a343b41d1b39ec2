"""Sequence numbers: gaps, replays, restarts, order. Without sockets."""

from __future__ import annotations

from typing import Any

import pytest

from kvhash.events.encode import encode_batch
from kvhash.events.message import END_SEQ, Message, following, parse_message, parse_reply
from kvhash.events.records import BadMessage, Batch, Confirmed, Gap, Lost, Record, Recovered, Restart, Stale
from kvhash.events.schema import BlockRemoved, BlockStored, EventBatch
from kvhash.events.tracker import PublisherTracker

from .simulation import check_story, run_story


def _payload(seq: int, *, ts: float | None = None, mark: int = 0) -> bytes:
    event = BlockStored(((seq * 10 + mark + 1) % (1 << 64),), None, (), 0, medium="GPU")
    return encode_batch(EventBatch(100.0 + seq if ts is None else ts, (event,), 0), "0.33.0")


def _live(seq: int, **options: float) -> Message:
    message = parse_message([b"t", seq.to_bytes(8, "big"), _payload(seq, **options)], "e", 0)  # type: ignore[arg-type]
    assert isinstance(message, Message)
    return message


def _reply(seq: int, **options: float) -> Message:
    frames = [b"", b"t", (seq % (1 << 64)).to_bytes(8, "big"), b"" if seq == -1 else _payload(seq, **options)]  # type: ignore[arg-type]
    message = parse_reply(frames, 0)
    assert message is not None
    return message


def _tracker(*, can_replay: bool = True, **options: Any) -> PublisherTracker:
    return PublisherTracker("e", 0, can_replay, **options)


def _short(records: list[Record]) -> list[object]:
    names = {Gap: "gap", Recovered: "recovered", Lost: "lost"}
    return [
        r.seq
        if isinstance(r, Batch)
        else (names[type(r)], r.first, r.last)
        if isinstance(r, (Gap, Recovered, Lost))
        else type(r).__name__
        for r in records
    ]


def test_a_stream_in_order_is_delivered_as_it_comes() -> None:
    """No gap, no delay; a late join begins where it begins."""
    tracker = _tracker()
    assert _short([r for seq in (40, 41, 42) for r in tracker.live(_live(seq), 0)]) == [40, 41, 42]
    assert tracker.replay is None


@pytest.mark.parametrize("topic_frame", [True, False])
def test_a_gap_is_replayed_before_newer_live_batches(topic_frame: bool) -> None:
    """Stored 5, removed 6: 6 arrives live, 5 by replay; 5 is delivered first, so the block is not resurrected."""
    stored = encode_batch(EventBatch(5.0, (BlockStored((1,), None, (), 0),), 0), "0.33.0")
    removed = encode_batch(EventBatch(6.0, (BlockRemoved((1,)),), 0), "0.33.0")
    tracker = _tracker()
    tracker.live(_live(4, ts=4.0), 0)
    message = parse_message([b"", (6).to_bytes(8, "big"), removed], "e", 0)
    assert isinstance(message, Message)
    assert _short(tracker.live(message, 0)) == [("gap", 5, 5)]
    assert tracker.replay is not None
    assert (tracker.replay.start, tracker.replay.wanted) == (4, 5)
    topic = [b""] if topic_frame else []
    for seq, payload in ((5, stored), (6, removed)):
        reply = parse_reply([b"", *topic, seq.to_bytes(8, "big"), payload], 0)
        assert reply is not None
        assert tracker.reply(reply, 0) == []
    records = tracker.reply(_reply(-1), 0)
    assert _short(records) == [5, ("recovered", 5, 5), 6]
    held = set()
    for record in records:
        if isinstance(record, Batch):
            (event,) = record.batch.events
            held = held | {1} if isinstance(event, BlockStored) else held - {1}
    assert held == set()


def test_a_buffer_shorter_than_the_gap_is_a_loss_with_its_range() -> None:
    """Seq 1, 2, then 5 with a buffer from 4: 3 is lost, 4 recovered."""
    tracker = _tracker()
    for seq in (1, 2):
        tracker.live(_live(seq), 0)
    tracker.live(_live(5), 0)
    for seq in (4, 5, -1):
        records = tracker.reply(_reply(seq), 0)
    assert _short(records) == [("lost", 3, 3), 4, ("recovered", 4, 4), 5] or _short(records) == [
        ("lost", 3, 3),
        4,
        5,
    ]
    assert [r.reason for r in records if isinstance(r, Lost)] == ["not-in-buffer"]


def test_a_late_join_fetched_from_the_start() -> None:
    """First live number 40, asked from 0; the server has 12 to 39: 0 to 11 are lost, the rest is in order."""
    tracker = _tracker()
    tracker.start_from(0, 0)
    assert tracker.live(_live(40), 0) == []
    records: list[Record] = []
    for seq in (*range(12, 41), -1):
        records += tracker.reply(_reply(seq), 0)
    assert _short(records) == [("gap", 0, 11), ("lost", 0, 11), *range(12, 41)]


def test_an_end_marker_that_never_comes() -> None:
    """After the deadline, and the attempts, the gap is lost and the stream goes on."""
    tracker = _tracker(replay_timeout=1.0, replay_attempts=2)
    tracker.live(_live(0), 0)
    tracker.live(_live(3), 0)
    assert tracker.tick(0.9) == []
    assert tracker.tick(1.1) == []
    assert tracker.replay is not None
    assert tracker.replay.attempt == 2
    records = tracker.tick(2.2)
    assert _short(records) == [("lost", 1, 2), 3]
    assert [r.reason for r in records if isinstance(r, Lost)] == ["no-answer"]
    assert _short(tracker.live(_live(4), 3)) == [4]


def test_replies_that_were_not_asked_for_end_the_replay() -> None:
    """A server that answers with numbers below the request must not be listened to for ever."""
    tracker = _tracker()
    tracker.live(_live(10), 0)
    tracker.live(_live(15), 0)
    records = tracker.reply(_reply(2), 0)
    assert _short(records) == [("lost", 11, 14), 15]


def test_a_replay_with_a_hole_is_asked_again() -> None:
    """A reply dropped on its way lies between others that came: it is worth another attempt."""
    tracker = _tracker()
    tracker.live(_live(0), 0)
    tracker.live(_live(4), 0)
    tracker.reply(_reply(1), 0)
    tracker.reply(_reply(3), 0)
    tracker.reply(_reply(4), 0)
    assert _short(tracker.reply(_reply(-1), 0)) == [1, ("recovered", 1, 1)]
    assert tracker.replay is not None
    assert tracker.replay.wanted == 2
    for seq in (2, 3, 4, -1):
        records = tracker.reply(_reply(seq), 0)
    assert _short(records)[0] == 2
    assert _short(records)[-1] == 4
    assert not [r for r in records if isinstance(r, Lost)]


def test_without_a_replay_endpoint_a_gap_may_fill_by_itself_for_a_moment() -> None:
    """A reordered message fills the hole in time; else the loss is reported and the stream goes on."""
    tracker = _tracker(can_replay=False, reorder_s=0.5)
    tracker.live(_live(0), 0)
    assert _short(tracker.live(_live(2), 0.1)) == [("gap", 1, 1)]
    assert _short(tracker.live(_live(1), 0.2)) == [1, ("recovered", 1, 1), 2]
    assert _short(tracker.live(_live(5), 0.3)) == [("gap", 3, 4)]
    assert tracker.next_deadline == pytest.approx(0.8)
    assert tracker.tick(0.7) == []
    assert _short(tracker.tick(0.9)) == [("lost", 3, 4), 5]


def test_repeated_and_late_messages() -> None:
    """A message delivered twice is dropped; one that was given up is reported as stale and not delivered."""
    tracker = _tracker(can_replay=False, reorder_s=0.1)
    tracker.live(_live(0), 0)
    tracker.live(_live(2), 0)
    assert _short(tracker.tick(0.2)) == [("lost", 1, 1), 2]
    assert tracker.live(_live(2), 0.3) == []
    assert tracker.live(_live(1), 0.3) == [Stale("e", 0, 1)]


def test_a_batch_that_seems_old_is_asked_for() -> None:
    """A new life with an earlier clock is found by its first batch: the publisher has it, so it is its own."""
    tracker = _tracker()
    for seq in range(6):
        tracker.live(_live(seq), 0)
    assert _short(tracker.live(_live(0, ts=40.0), 1)) == ["Stale"]
    assert tracker.replay is not None
    assert tracker.replay.start == 0
    assert _short(tracker.live(_live(1, ts=41.0), 1)) == ["Stale"]
    assert _short(tracker.reply(_reply(0, ts=40.0), 1)) == ["Restart"]
    for seq in (0, 1):
        tracker.reply(_reply(seq, ts=40.0 + seq), 1)
    assert _short(tracker.reply(_reply(-1), 1)) == [0, 1]
    assert _short(tracker.live(_live(2, ts=42.0), 2)) == [2]


def test_a_late_batch_of_a_former_life_is_none_of_the_publishers() -> None:
    """It is asked for once; the publisher has another batch of that number, or none, and its stream goes on."""
    tracker = _tracker()
    tracker.live(_live(5), 0)
    tracker.live(_live(0, ts=200.0), 0)
    for seq in (1, 2, 3):
        tracker.live(_live(seq, ts=200.0 + seq), 0)
    assert _short(tracker.live(_live(2, ts=102.0), 1)) == ["Stale"]
    assert _short(tracker.live(_live(4, ts=204.0), 1)) == []  # waits for the answer
    asked = tracker.asked
    assert _short(tracker.live(_live(1, ts=101.0), 1)) == ["Stale"]
    assert tracker.asked == asked + 1  # the answer under way may be older
    for seq in (2, 3, 4):
        assert "Restart" not in _short(tracker.reply(_reply(seq, ts=200.0 + seq), 1))
    assert _short(tracker.reply(_reply(-1), 1)) == [4, "Confirmed"]
    assert _short(tracker.live(_live(5, ts=205.0), 2)) == [5]


def _restarted(**options: Any) -> PublisherTracker:
    """Return a tracker in a second life, 0 to 3, whose former life was longer."""
    tracker = _tracker(**options)
    tracker.live(_live(20), 0)
    for seq in range(4):
        tracker.live(_live(seq, ts=200.0 + seq), 0)
    return tracker


@pytest.mark.parametrize("late", [2, 3, 4, 18], ids=["behind", "last", "next", "ahead"])
def test_when_nothing_follows_a_late_batch_the_life_is_confirmed(late: int) -> None:
    """The publisher is asked; it has what was delivered and not the late batch, and publishes nothing for hours."""
    tracker = _restarted()
    assert _short(tracker.live(_live(late), 1)) == ["Stale"]
    assert tracker.replay is not None
    for seq in range(tracker.replay.start, 4):
        assert tracker.reply(_reply(seq, ts=200.0 + seq), 1) == []
    assert tracker.reply(_reply(-1), 1) == [Confirmed("e", 0, 3)]
    assert tracker.replay is None


def test_a_second_late_batch_is_settled_by_a_replay_asked_after_it() -> None:
    """The answer under way may have been given before it came."""
    tracker = _restarted()
    tracker.live(_live(18), 1)
    assert _short(tracker.live(_live(19), 1)) == ["Stale"]
    for seq in range(4):
        tracker.reply(_reply(seq, ts=200.0 + seq), 1)
    asked = tracker.asked
    assert tracker.reply(_reply(-1), 1) == []
    assert tracker.tick(1) == []
    assert tracker.asked == asked + 1
    for seq in range(4):
        tracker.reply(_reply(seq, ts=200.0 + seq), 1)
    assert tracker.reply(_reply(-1), 1) == [Confirmed("e", 0, 3)]


def test_a_question_without_an_answer_is_settled_by_the_next_probe() -> None:
    """The replay stalls: nothing is confirmed until one answers whole."""
    tracker = _restarted(replay_timeout=1.0)
    tracker.live(_live(18), 1)
    assert tracker.live(_live(4, ts=204.0), 1) == []  # it may be of another life
    assert tracker.tick(2.5) == []
    assert tracker.tick(4) == []
    assert _short(tracker.tick(5.5)) == ["Unconfirmed", 4]
    assert tracker.replay is None
    assert _short(tracker.live(_live(5, ts=205.0), 6)) == [5]
    tracker.probe(12)
    for seq in range(6):
        tracker.reply(_reply(seq, ts=200.0 + seq), 12)
    assert tracker.reply(_reply(-1), 12) == [Confirmed("e", 0, 5)]


def test_a_publisher_that_does_not_answer_is_asked_again_after_a_while() -> None:
    """Messages wait for the first questions and for later ones, but the doubt is said once; an answer ends it."""
    tracker = _restarted(replay_timeout=1.0, replay_attempts=1)
    tracker.live(_live(18), 1)
    assert _short(tracker.tick(2)) == ["Unconfirmed"]
    for seq, now in ((4, 12), (5, 33), (6, 74)):  # after ever longer pauses
        assert tracker.next_deadline == now
        assert tracker.tick(now) == []
        assert tracker.live(_live(seq, ts=200.0 + seq), now) == []
        assert _short(tracker.tick(now + 1)) == [seq]
    tracker.tick(155)
    assert tracker.reply(_reply(6, ts=206.0), 155) == []
    assert tracker.reply(_reply(-1), 155) == [Confirmed("e", 0, 6)]
    assert tracker.next_deadline is None


@pytest.mark.parametrize("step", [-0.05, -3600.0])
def test_a_clock_that_is_set_back_in_mid_life_begins_no_new_one(step: float) -> None:
    """The publisher's answer has what was delivered, so what it has beyond is of this life, whatever its time."""
    tracker = _restarted()
    assert _short(tracker.live(_live(4, ts=203.0 + step), 1)) == ["Stale"]
    assert _short(tracker.live(_live(5, ts=203.5 + step), 1)) == (["Stale"] if step < -1 else [])
    records: list[Record] = []
    while tracker.replay is not None:
        for seq in range(tracker.replay.start, 6):
            records += tracker.reply(
                _reply(seq, ts=200.0 + seq if seq < 4 else 203.0 + step + (seq - 4) / 2), 1
            )
        records += tracker.reply(_reply(-1), 1)
        records += tracker.tick(1)
    assert _short(records) == [4, 5, "Confirmed"]
    assert _short(tracker.live(_live(6, ts=204.0 + step), 2)) == [6]


def test_batches_missed_while_the_clock_was_set_back() -> None:
    """The first that is seen lies ahead: it waits, and those before it are brought."""
    tracker = _restarted()
    assert _short(tracker.live(_live(6), 1)) == ["Stale"]
    for seq in range(4):
        tracker.reply(_reply(seq, ts=200.0 + seq), 1)
    for seq in (4, 5, 6):
        assert tracker.reply(_reply(seq), 1) == []
    assert _short(tracker.reply(_reply(-1), 1)) == [4, 5, 6, "Confirmed"]


def test_a_held_batch_that_the_publisher_never_sent_is_dropped() -> None:
    """A straggler of a former life seems to follow a gap; three answers end before it: nothing is missing, nor lost."""
    tracker = _restarted()
    assert _short(tracker.live(_live(9, ts=300.0), 1)) == [("gap", 4, 8)]
    for attempt in range(3):
        for seq in range(4):
            tracker.reply(_reply(seq, ts=200.0 + seq), 1)
        records = tracker.reply(_reply(-1), 1)
        assert _short(records) == ([] if attempt < 2 else ["Stale", "Confirmed"])
    assert _short(tracker.live(_live(4, ts=204.0), 2)) == [4]


def test_an_answer_without_what_was_delivered_last_is_of_a_new_life() -> None:
    """The publisher has 0 alone, and that is what was delivered as 0; but 1 was delivered too: it is asked again."""
    tracker = _tracker()
    tracker.start_from(0, 0)
    # Of a life whose 0 was missed; the answer is of the next one, whose clock was set back.
    tracker.live(_live(1), 0)
    tracker.reply(_reply(0, ts=50.0), 0)
    assert _short(tracker.reply(_reply(-1), 0)) == [0]
    # So 1 waits until an answer has it, too; one that ends before it leaves a doubt.
    tracker.reply(_reply(0, ts=50.0), 0)
    assert _short(tracker.reply(_reply(-1), 0)) == ["Unconfirmed", 1]
    tracker.tick(0)
    for attempt in range(3):
        tracker.reply(_reply(0, ts=50.0), 1)
        assert _short(tracker.reply(_reply(-1), 1)) == ([] if attempt < 2 else ["Restart"])
    tracker.reply(_reply(0, ts=50.0), 1)
    assert _short(tracker.reply(_reply(-1), 1)) == [0]


def test_an_answer_that_lacks_what_was_held_leaves_a_doubt() -> None:
    """It fills the gap, but the batch behind the gap is not in it: delivered, and unconfirmed until the next answer."""
    tracker = _tracker()
    tracker.live(_live(0), 0)
    tracker.live(_live(2), 0)
    for seq in (0, 1):
        tracker.reply(_reply(seq), 0)
    assert _short(tracker.reply(_reply(-1), 0)) == ["Unconfirmed", 1, ("recovered", 1, 1), 2]
    assert tracker.tick(0) == []
    for seq in (0, 1, 2):
        tracker.reply(_reply(seq), 0)
    assert tracker.reply(_reply(-1), 0) == [Confirmed("e", 0, 2)]


def test_without_a_replay_nothing_is_confirmed() -> None:
    """A late batch stays in doubt until the next one comes."""
    tracker = _restarted(can_replay=False)
    assert _short(tracker.live(_live(18), 1)) == ["Stale"]
    tracker.probe(20)
    assert tracker.tick(20) == []
    assert _short(tracker.live(_live(4, ts=204.0), 21)) == [4]


def test_a_restart_is_a_new_life() -> None:
    """Numbers fall back to 0 with a later time: what was held is gone, and the new life is complete."""
    tracker = _tracker()
    tracker.live(_live(812), 0)
    assert _short(tracker.live(_live(0, ts=2000.0), 0)) == ["Restart", 0]
    assert _short(tracker.live(_live(1, ts=2001.0), 0)) == [1]


def test_a_restart_whose_first_batches_were_missed() -> None:
    """The new life is first seen at 3: 0 to 2 are asked for."""
    tracker = _tracker()
    for seq in (10, 11):
        tracker.live(_live(seq), 0)
    assert _short(tracker.live(_live(3, ts=2003.0), 0)) == ["Restart", ("gap", 0, 2)]
    for seq in (0, 1, 2, 3):
        tracker.reply(_reply(seq, ts=2000.0 + seq), 0)
    assert _short(tracker.reply(_reply(-1), 0)) == [0, 1, 2, ("recovered", 0, 2), 3]


def test_a_restart_that_looks_like_a_gap_is_found_by_the_replay() -> None:
    """The new life is already past the old number: the batch before the gap differs, so it is another life's."""
    tracker = _tracker()
    for seq in (0, 1, 2):
        tracker.live(_live(seq), 0)
    assert _short(tracker.live(_live(6, ts=2006.0), 0)) == [("gap", 3, 5)]
    assert _short(tracker.reply(_reply(2, ts=2002.0), 0)) == [("lost", 3, 5), "Restart"]
    assert tracker.replay is not None
    assert tracker.replay.start == 0
    for seq in range(7):
        tracker.reply(_reply(seq, ts=2000.0 + seq), 0)
    assert _short(tracker.reply(_reply(-1), 0)) == list(range(7))


def test_a_probe_finds_what_was_missed_last() -> None:
    """After silence the replay is asked for what follows; a live message meanwhile ends that at once."""
    tracker = _tracker()
    tracker.live(_live(0), 0)
    tracker.probe(10)
    assert tracker.replay is not None
    for seq in (0, 1, 2):
        tracker.reply(_reply(seq), 10)
    assert _short(tracker.reply(_reply(-1), 10)) == [1, 2]
    tracker.probe(20)
    assert _short(tracker.live(_live(3), 20)) == [3]
    assert tracker.replay is None


def test_a_publisher_that_has_nothing_of_what_it_sent_is_in_a_new_life() -> None:
    """It keeps its newest batches: no answer to the question for the last one shows a restart that said nothing."""
    tracker = _tracker()
    tracker.start_from(0, 0)
    for seq in (0, 1):
        tracker.reply(_reply(seq), 0)
    assert _short(tracker.reply(_reply(-1), 0)) == [0, 1]
    tracker.probe(10)
    assert tracker.reply(_reply(1), 10) == []
    assert tracker.reply(_reply(-1), 10) == []
    tracker.probe(20)
    assert _short(tracker.reply(_reply(-1), 20)) == ["Restart"]
    assert tracker.reply(_reply(-1), 20) == []  # it is asked for what it has
    assert _short(tracker.live(_live(0, ts=150.0), 30)) == [0]


@pytest.mark.parametrize("kept", [False, True])
def test_a_restart_into_fewer_batches_is_seen_without_a_live_one(kept: bool) -> None:
    """A new life is behind the former one's numbers: its first batches come by replay, though nothing is published.

    `kept`: whether a replay had shown before that the publisher keeps its batches.
    """
    tracker = _tracker()
    for seq in range(92):
        tracker.live(_live(seq), 0)
    if kept:
        tracker.probe(5)
        tracker.reply(_reply(91), 5)
        assert tracker.reply(_reply(-1), 5) == []
    tracker.probe(10)
    records = tracker.reply(_reply(-1), 10)
    assert _short(records) == (["Restart"] if kept else [])
    for _ in range(3):  # as often as it asks
        for seq in range(24) if tracker.replay else ():
            records += tracker.reply(_reply(seq, ts=2000.0 + seq), 11)
        records += tracker.reply(_reply(-1), 11)
    assert _short(records) == ["Restart", *range(24)]
    assert _short(tracker.live(_live(24, ts=2024.0), 20)) == [24]


def test_a_publisher_that_keeps_nothing_is_not_taken_for_a_new_one() -> None:
    """One whose replays never brought anything says nothing by an empty one; neither does one that does not answer."""
    tracker = _tracker()
    tracker.live(_live(0), 0)
    tracker.probe(10, verify=True)
    assert tracker.reply(_reply(-1), 10) == []
    assert _short(tracker.live(_live(1), 11)) == [1]
    tracker.probe(20, verify=True)
    tracker.reply(_reply(1), 20)
    tracker.reply(_reply(-1), 20)
    tracker.probe(30, verify=True)
    assert tracker.tick(40) == []
    assert tracker.tick(50) == []
    assert _short(tracker.tick(60)) == ["Unconfirmed"]
    assert tracker.replay is None


def test_a_straggler_after_a_restart_that_said_nothing_is_not_of_the_new_life() -> None:
    """All that is known of the new life is that it is empty: a batch no later than the former life's is asked for."""
    for mine in (False, True):
        tracker = _tracker()
        tracker.start_from(0, 0)
        for seq in (0, 1, -1):
            tracker.reply(_reply(seq), 0)
        tracker.probe(10)
        assert _short(tracker.reply(_reply(-1), 10)) == ["Restart"]
        assert tracker.reply(_reply(-1), 10) == []
        assert _short(tracker.live(_live(0), 20)) == ["Stale"]
        if mine:  # the clock was set back
            tracker.reply(_reply(0), 20)
        assert _short(tracker.reply(_reply(-1), 20)) == ([0, "Confirmed"] if mine else ["Confirmed"])
        assert _short(tracker.live(_live(int(mine), ts=200.0), 30)) == [int(mine)]


def test_after_a_new_connection_nothing_is_delivered_before_the_life_is_known() -> None:
    """A life of one batch, then one whose batch 1 comes first: batch 0 of the replay differs, so it is a new life."""
    tracker = _tracker()
    tracker.live(_live(0), 0)
    tracker.probe(10, verify=True)
    assert tracker.live(_live(1, ts=2001.0), 10) == []
    assert _short(tracker.reply(_reply(0, ts=2000.0), 10)) == ["Restart"]
    for seq in (0, 1):
        tracker.reply(_reply(seq, ts=2000.0 + seq), 10)
    assert _short(tracker.reply(_reply(-1), 10)) == [0, 1]


@pytest.mark.parametrize("gap", [False, True])
def test_a_replay_under_way_at_a_new_connection_is_asked_anew(gap: bool) -> None:
    """Its answer may be the former life's; what comes meanwhile waits for the new one."""
    tracker = _tracker()
    tracker.live(_live(0), 0)
    if gap:
        tracker.live(_live(3), 0)
    else:
        tracker.probe(10)
    asked = tracker.asked
    tracker.probe(10, verify=True)
    assert tracker.asked == asked + 1
    if not gap:
        assert tracker.live(_live(1, ts=2001.0), 10) == []
    assert _short(tracker.reply(_reply(0, ts=2000.0), 10))[-1] == "Restart"
    for seq in (0, 1):
        tracker.reply(_reply(seq, ts=2000.0 + seq), 10)
    assert _short(tracker.reply(_reply(-1), 10)) == [0, 1]


def test_an_answer_from_before_anything_was_published_loses_nothing() -> None:
    """0 to 2 are published before the live socket joins, and 3 comes before the empty answer to the first question."""
    tracker = _tracker()
    tracker.start_from(0, 0)
    assert tracker.live(_live(3), 0) == []
    assert _short(tracker.reply(_reply(-1), 0)) == [("gap", 0, 2)]
    for seq in range(4):
        tracker.reply(_reply(seq), 0)
    assert _short(tracker.reply(_reply(-1), 0)) == [0, 1, 2, ("recovered", 0, 2), 3]


def test_what_was_held_when_a_publisher_ended_is_of_its_former_life() -> None:
    """A gap was open; the new life has published nothing: the batch behind the gap is delivered before the Restart."""
    tracker = _tracker()
    tracker.start_from(0, 0)
    for seq in (0, 1, -1):
        tracker.reply(_reply(seq), 0)
    assert _short(tracker.live(_live(3), 1)) == [("gap", 2, 2)]
    records: list[Record] = []
    for _ in range(3):
        records += tracker.reply(_reply(-1), 1)
    assert _short(records) == [("lost", 2, 2), 3, "Restart"]
    assert tracker.reply(_reply(-1), 1) == []
    assert tracker.replay is None
    assert _short(tracker.live(_live(0, ts=900.0), 2)) == [0]


def test_what_an_answer_brought_before_a_new_connection_has_to_be_brought_again() -> None:
    """The publisher is killed within its answer to the first question; the next one is of its new life alone."""
    tracker = _tracker()
    tracker.start_from(0, 0)
    for seq in range(8):
        tracker.reply(_reply(seq), 0)
    tracker.probe(1, verify=True)
    for seq in (0, 1, 2):
        tracker.reply(_reply(seq, ts=900.0 + seq), 1)
    assert _short(tracker.reply(_reply(-1), 1)) == [0, 1, 2]
    assert tracker.tick(1) == []
    assert _short(tracker.live(_live(3, ts=903.0), 2)) == [3]


def test_a_dead_replay_endpoint_does_not_hold_up_the_stream_again_and_again() -> None:
    """The question after the first connection needs no answer: the next batch is delivered at once."""
    tracker = _tracker(replay_timeout=1.0)
    tracker.start_from(0, 0)
    tracker.follow_up(0)
    tracker.live(_live(0), 0)
    assert _short(tracker.tick(1)) == [0]
    for seq in range(1, 100):
        assert _short(tracker.live(_live(seq), seq)) == [seq]
        assert tracker.tick(seq) == []


def test_another_ranks_answer_says_nothing() -> None:
    """Several ranks answer behind one socket: an answer that is all of another's is not an empty one."""
    tracker = _tracker()
    tracker.start_from(0, 0)
    for seq in (0, 1, -1):
        tracker.reply(_reply(seq), 0)
    tracker.probe(10)
    assert tracker.cut(10) == []
    tracker.live(_live(3), 11)
    for _ in range(2):
        assert tracker.cut(11) == []
    for seq in (1, 2, 3):
        tracker.reply(_reply(seq), 11)
    assert _short(tracker.reply(_reply(-1), 11)) == [2, ("recovered", 2, 2), 3]


def test_an_unreadable_repetition_is_no_new_life() -> None:
    """It has no time; the number was delivered."""
    tracker = _tracker()
    for seq in range(4):
        tracker.live(_live(seq), 0)
    message = parse_message([b"t", (2).to_bytes(8, "big"), b"\xc1"], "e", 0)
    assert isinstance(message, Message)
    assert _short(tracker.live(message, 0)) == ["Stale"]
    for seq in range(4):
        tracker.reply(_reply(seq), 0)
    assert tracker.reply(_reply(-1), 0) == [Confirmed("e", 0, 3)]


def test_what_was_delivered_of_a_gap_is_not_lost_with_the_rest() -> None:
    """The one behind it is of a former life: what came of the gap is said to be recovered, before anything is lost."""
    tracker = _restarted()
    tracker.live(_live(6, ts=206.0), 1)
    for seq in range(4):
        tracker.reply(_reply(seq, ts=200.0 + seq), 1)
    tracker.reply(_reply(4, ts=204.0), 1)
    records = tracker.reply(_reply(-1), 1) + tracker.live(_live(0, ts=900.0), 2)
    delivered = {r.seq for r in records if isinstance(r, Batch)}
    for r in records:
        assert not isinstance(r, Lost) or not delivered & set(range(r.first, r.last + 1))


def test_numbers_wrap_before_the_end_marker() -> None:
    """After 2^64 - 2 comes 0, without a restart."""
    assert following(END_SEQ - 1) == 0
    tracker = _tracker()
    records = [
        *tracker.live(_live(END_SEQ - 1, ts=1.0), 0),
        *tracker.live(_live(0, ts=2.0), 0),
        *tracker.live(_live(1, ts=3.0), 0),
    ]
    assert _short(records) == [END_SEQ - 1, 0, 1]


def test_too_many_held_batches_end_the_wait() -> None:
    """Memory is bounded: beyond the limit the gap is given up, with the reason."""
    tracker = _tracker(max_held=10)
    tracker.live(_live(0), 0)
    records = [r for seq in range(2, 14) for r in tracker.live(_live(seq), 0)]
    assert [r.reason for r in records if isinstance(r, Lost)] == ["overflow"]
    assert _short(records)[-1] == 13


def test_messages_that_are_no_batch() -> None:
    """1, 2 and 4 frames, a short number, and an unreadable payload are records, and the stream goes on."""
    for frames in ([b"x"], [b"t", b"x"], [b"t", bytes(8), b"x", b"y"], [b"t", b"\0", b"x"]):
        assert isinstance(parse_message(frames, "e", 0), BadMessage)
    tracker = _tracker()
    tracker.live(_live(0), 0)
    message = parse_message([b"t", (1).to_bytes(8, "big"), b"\xc1"], "e", 0)
    assert isinstance(message, Message)
    (record,) = tracker.live(message, 0)
    assert isinstance(record, BadMessage)
    assert record.seq == 1
    assert _short(tracker.live(_live(2), 0)) == [2]


def test_a_clock_set_back_is_no_end() -> None:
    """A new life whose clock runs behind is taken for one after a few messages, not refused for ever."""
    tracker = _tracker(can_replay=False, reorder_s=0.0)
    for seq in range(5):
        tracker.live(_live(seq, ts=5000.0 + seq), 0)
    records = [r for seq in range(20) for r in tracker.live(_live(seq, ts=1000.0 + seq, mark=1), 0)]
    assert any(isinstance(r, Restart) for r in records)
    assert _short(records)[-1] == 19


def _blocks(short: int, whole: int) -> list[object]:
    """Return the numbers of blocks of a hundred stories; those after the first `short` are for the long tests."""
    return [pytest.param(i, marks=pytest.mark.long if i >= short else ()) for i in range(whole)]


@pytest.mark.parametrize("block", _blocks(3, 10))
def test_random_stories_end_in_the_truth(block: int) -> None:
    """Drops, repeats, delays, stalls, restarts: each number of the last life is delivered or reported lost."""
    for seed in range(block * 100, block * 100 + 100):
        check_story(run_story(seed))


@pytest.mark.parametrize("block", _blocks(3, 10))
def test_random_stories_of_clocks_that_are_set_back(block: int) -> None:
    """The same, with stragglers of former lives, and times that tell nothing: what the publisher has decides."""
    for seed in range(block * 100, block * 100 + 100):
        check_story(run_story(seed, clocks=True))


@pytest.mark.parametrize("block", _blocks(1, 3))
def test_random_stories_without_replay(block: int) -> None:
    """Without a replay endpoint and restarts the same holds."""
    for seed in range(block * 100, block * 100 + 100):
        check_story(run_story(seed, replay=False, restarts=False))


def test_what_lies_behind_a_loss_in_one_gap_is_still_recovered() -> None:
    """A gap of which the beginning is lost and the rest comes late: each of its numbers is lost or recovered."""
    tracker = _tracker(can_replay=False, reorder_s=10.0)
    assert _short(tracker.live(_live(0), 0)) == [0]
    assert _short(tracker.live(_live(9), 0)) == [("gap", 1, 8)]
    assert _short(tracker.live(_live(5), 1)) == []
    records = _short([*tracker.tick(20.0), *tracker.tick(40.0), *tracker.tick(60.0)])
    covered = [r for r in records if isinstance(r, tuple) and r[0] in ("lost", "recovered")]
    numbers = sorted(n for _, first, last in covered for n in range(first, last + 1))  # type: ignore[misc]
    assert numbers == list(range(1, 9))
    assert [r for r in records if isinstance(r, int)] == [5, 9]
