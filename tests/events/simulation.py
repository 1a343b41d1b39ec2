"""A publisher, a faulty line and a tracker without sockets: thousands of stories in the time of one."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kvhash.events.encode import encode_batch
from kvhash.events.message import END_SEQ, Message, parse_message, parse_reply
from kvhash.events.records import Batch, Confirmed, Lost, Record, Restart, Stale
from kvhash.events.schema import BlockStored, EventBatch
from kvhash.events.tracker import PublisherTracker


@dataclass
class SimulatedPublisher:
    """A publisher with a replay buffer that can be restarted; every life's batches are kept as the truth."""

    buffer_steps: int
    clock: float = 1000.0
    life: int = 0
    seq: int = 0
    buffer: deque[tuple[int, bytes]] = field(default_factory=deque)
    truth: list[list[bytes]] = field(default_factory=lambda: [[]])

    def publish(self) -> list[bytes]:
        """Publish one batch; return its frames."""
        self.clock += 0.01
        event = BlockStored((self.life * 1_000_000 + self.seq + 1,), None, (), 0, medium="GPU")
        payload = encode_batch(EventBatch(self.clock, (event,), 0), "0.33.0")
        frames = [b"kv", self.seq.to_bytes(8, "big"), payload]
        self.buffer.append((self.seq, payload))
        while len(self.buffer) > self.buffer_steps:
            self.buffer.popleft()
        self.truth[-1].append(payload)
        self.seq += 1
        return frames

    def restart(self, step: float = 1.0) -> None:
        """Begin a new life at sequence number 0, `step` seconds after what the former one's clock said."""
        self.clock += step
        self.life += 1
        self.seq = 0
        self.buffer.clear()
        self.truth.append([])

    def replay(self, start: int, *, topic_frame: bool = True) -> list[list[bytes]]:
        """Return the frames that answer a replay request, the end marker last."""
        topic = [b"kv"] if topic_frame else []
        replies = [
            [b"", *topic, seq.to_bytes(8, "big"), payload] for seq, payload in self.buffer if seq >= start
        ]
        return [*replies, [b"", *([b""] if topic_frame else []), END_SEQ.to_bytes(8, "big"), b""]]


def run_story(
    seed: int, *, replay: bool = True, restarts: bool = True, steps: int = 120, clocks: bool = False
) -> dict[str, Any]:
    """Run a random story; return the publisher and the records that the tracker gave, up to a quiet end.

    `clocks`: the publisher keeps everything, but its clock is set back at some restarts and now and then within a life,
    and messages of former lives come again at any time.
    """
    rng = random.Random(seed)
    publisher = SimulatedPublisher(buffer_steps=1000 if clocks else rng.choice([5, 20, 1000]))
    sent: list[list[bytes]] = []
    tracker = PublisherTracker("sim", 0, can_replay=replay, replay_timeout=1.0, reorder_s=0.2)
    line: list[tuple[float, list[bytes]]] = []
    answers: list[tuple[float, int, list[bytes]]] = []
    records: list[Record] = []
    now = 0.0
    asked = 0
    started = False
    drop, duplicate, delay = rng.random() * 0.3, rng.random() * 0.2, rng.random() * 0.3

    def deliver_due() -> None:
        nonlocal asked
        for at, frames in sorted((item for item in line if item[0] <= now), key=lambda item: item[0]):
            line.remove((at, frames))
            message = parse_message(frames, "sim", int(now * 1e9))
            assert isinstance(message, Message)
            records.extend(tracker.live(message, now))
            ask()
        for item in [item for item in answers if item[0] <= now]:
            answers.remove(item)
            if (
                item[1] == tracker.asked
            ):  # a new request has a socket of its own; answers to former ones are gone
                reply = parse_reply(item[2], int(now * 1e9))
                assert reply is not None
                records.extend(tracker.reply(reply, now))
                ask()
        records.extend(tracker.tick(now))
        ask()

    def ask() -> None:
        nonlocal asked
        if tracker.replay is not None and tracker.asked != asked:
            asked = tracker.asked
            if rng.random() < 0.15:
                return  # the replay socket stalls
            when = now + rng.random() * 0.1
            for frames in publisher.replay(tracker.replay.start, topic_frame=rng.random() < 0.5):
                if rng.random() > drop / 3:
                    answers.append((when, asked, frames))

    for _ in range(steps):
        now += 0.05
        if restarts and rng.random() < 0.02 and publisher.seq > 5:  # shorter lives can leave no trace at all
            publisher.restart(rng.choice([1.0, -0.05, -3600.0]) if clocks else 1.0)
        if clocks and rng.random() < 0.02:
            publisher.clock -= rng.choice([0.05, 3600.0])
        if clocks and sent and rng.random() < 0.05:
            line.append((now, rng.choice(sent)))
        for _ in range(rng.randrange(3)):
            frames = publisher.publish()
            sent.append(frames)
            if not started:
                started = True
                tracker.expected = 0
            for _ in range(2 if rng.random() < duplicate else 1):
                if rng.random() > drop:
                    line.append((now + (rng.random() * 0.4 if rng.random() < delay else 0.0), frames))
        deliver_due()
    # The line heals: a last few batches come through, and whatever waits comes to its end.
    for _ in range(3):
        now += 0.5
        line.append((now, publisher.publish()))
        deliver_due()
    for turn in range(800):
        now += 0.05
        if turn % 50 == 49 and turn < 700:
            tracker.probe(now)  # as subscribers do after a silence
        deliver_due()
    return {"publisher": publisher, "records": records, "tracker": tracker, "pending": tracker.replay}


def check_story(story: dict[str, Any]) -> None:
    """Hold the records against the truth: in order, nothing twice, each number delivered or reported lost."""
    lives: list[dict[int, bytes]] = [{}]
    lost: list[set[int]] = [set()]
    last = -1
    for record in story["records"]:
        if isinstance(record, Restart):
            lives.append({})
            lost.append(set())
            last = -1
        elif isinstance(record, Batch):
            assert record.seq > last, (record.seq, last)
            last = record.seq
            lives[-1][record.seq] = record.payload
        elif isinstance(record, Lost):
            numbers = set(range(record.first, record.last + 1))
            assert not numbers & set(lives[-1]), record
            assert not numbers & lost[-1], record
            lost[-1] |= numbers
    if story["tracker"].can_replay:
        settled = [type(r) for r in story["records"] if isinstance(r, (Batch, Confirmed, Restart, Stale))]
        assert settled[-1] is not Stale, "a doubt that is never settled"
    truth = story["publisher"].truth
    assert story["pending"] is None
    final = dict(enumerate(truth[-1]))
    got = lives[-1]
    assert all(final.get(seq) == payload for seq, payload in got.items()), (
        "a batch of a former life in the last one"
    )
    assert set(got) | lost[-1] == set(final), (
        sorted(set(final) - set(got) - lost[-1]),
        sorted(lost[-1] - set(final)),
    )
