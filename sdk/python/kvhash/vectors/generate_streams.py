"""Makes the stream vectors: frames in the order of their arrival, and the state that a reader must end in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from kvhash.contract import CHANGES

from .record import vector
from .releases import OLDEST_TEXT, since_of
from .stream_model import final_state

__all__ = ["make_streams"]

_pack = msgspec.msgpack.Encoder().encode
_TOPIC = b"kv-events"


def _stored(*hashes: Any, medium: str = "GPU", parent: int | None = None) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(range(4 * len(hashes))),
        "block_size": 4,
        "lora_id": None,
        "medium": medium,
    }


def _removed(*hashes: Any, medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium}


_CLEARED = {"type": "AllBlocksCleared"}


def _payload(*events: Any, rank: int | None = None, ts: float = 1.5) -> bytes:
    return _pack([ts, list(events), rank])


def _sequence(number: int) -> bytes:
    return (number % (1 << 64)).to_bytes(8, "big")


def _step(source: str, frames: list[bytes], rank: int = 0) -> dict[str, Any]:
    return {"from": source, "rank": rank, "frames": [frame.hex() for frame in frames]}


def _live(number: int, *events: Any, rank: int = 0, ts: float = 1.5) -> dict[str, Any]:
    return _step("live", [_TOPIC, _sequence(number), _payload(*events, ts=ts)], rank)


class _Replay:
    """Replay replies in one framing: with the topic frame, or (before it came) without."""

    def __init__(self, topic: bool) -> None:
        self.topic = topic

    def __call__(self, number: int, *events: Any) -> dict[str, Any]:
        topic = [_TOPIC] if self.topic else []
        return _step("replay", [b"", *topic, _sequence(number), _payload(*events)])

    def end(self) -> dict[str, Any]:
        topic = [b""] if self.topic else []
        return _step("replay", [b"", *topic, _sequence(-1), b""])


def _plain_stories() -> Iterator[tuple[str, str, list[str], list[dict[str, Any]]]]:
    yield (
        "in-order",
        "three messages in order",
        ["stream-gap"],
        [_live(0, _stored(1)), _live(1, _stored(2)), _live(2, _removed(1))],
    )
    yield (
        "gap-unfilled",
        "a gap that nothing fills yet: what came later waits",
        ["stream-gap"],
        [_live(0, _stored(1)), _live(1, _stored(2)), _live(4, _removed(1))],
    )
    yield (
        "two-gaps",
        "two gaps",
        ["stream-gap"],
        [_live(0, _stored(1)), _live(2, _stored(2)), _live(5, _stored(3))],
    )
    yield (
        "duplicate",
        "one message twice",
        ["stream-duplicate"],
        [_live(0, _stored(1)), _live(0, _stored(1)), _live(1, _removed(1))],
    )
    yield (
        "restart",
        "sequence numbers start anew: residency is dropped",
        ["stream-restart"],
        [
            _live(0, _stored(1, 2)),
            _live(1, _stored(3)),
            _live(0, _stored(9), ts=9.0),
            _live(1, _stored(10), ts=9.5),
        ],
    )
    yield (
        "restart-late",
        "a restart whose first messages were missed",
        ["stream-restart", "stream-gap"],
        [*[_live(i, _stored(i + 1)) for i in range(6)], _live(2, _stored(99), ts=9.0)],
    )
    yield (
        "late-join",
        "the first message has number 40",
        ["stream-late"],
        [_live(40, _stored(1)), _live(41, _stored(2))],
    )
    yield (
        "clear",
        "a clear drops every tier",
        ["stream-clear"],
        [_live(0, _stored(1), _stored(2, medium="CPU")), _live(1, _CLEARED), _live(2, _stored(3))],
    )
    yield (
        "clear-in-batch",
        "a clear between two stores of one batch",
        ["stream-clear"],
        [_live(0, _stored(1), _CLEARED, _stored(2))],
    )
    yield (
        "tiers",
        "a block of two tiers leaves one",
        ["stream-duplicate"],
        [_live(0, _stored(1)), _live(1, _stored(1, medium="CPU")), _live(2, _removed(1))],
    )
    yield (
        "cpu-first",
        "the CPU tier is told before the GPU",
        ["stream-duplicate"],
        [_live(0, _stored(1, medium="CPU")), _live(1, _stored(1)), _live(2, _removed(1))],
    )
    yield (
        "remove-unknown",
        "a removal of a block never stored",
        ["stream-duplicate"],
        [_live(0, _removed(7)), _live(1, _stored(7))],
    )
    yield (
        "hash-forms",
        "stored unsigned, removed signed",
        ["event-hash-forms"],
        [_live(0, _stored(2**63 + 5)), _live(1, _removed(5 - 2**63))],
    )
    yield (
        "hash-bytes",
        "stored as bytes, removed as a number",
        ["event-hash-forms"],
        [_live(0, _stored(bytes(24) + (77).to_bytes(8, "big"))), _live(1, _removed(77))],
    )
    yield (
        "ranks",
        "two ranks, each with its own numbers",
        ["stream-ranks"],
        [
            _live(0, _stored(1), rank=0),
            _live(0, _stored(2), rank=1),
            _live(1, _stored(3), rank=0),
            _live(1, _removed(2), rank=1),
        ],
    )
    yield (
        "rank-gap",
        "a gap of one rank is none of the other",
        ["stream-ranks", "stream-gap"],
        [
            _live(0, _stored(1), rank=0),
            _live(0, _stored(2), rank=1),
            _live(3, _stored(3), rank=0),
            _live(1, _stored(4), rank=1),
        ],
    )
    yield (
        "malformed-frames",
        "messages of 1, 2 and 4 frames",
        ["event-hostile"],
        [
            _step("live", [_payload(_stored(1))]),
            _step("live", [_TOPIC, _payload(_stored(1))]),
            _step("live", [_TOPIC, _sequence(0), _payload(_stored(1)), b""]),
            _live(0, _stored(2)),
        ],
    )
    yield (
        "short-sequence",
        "a sequence number of 4 bytes",
        ["event-hostile"],
        [_step("live", [_TOPIC, b"\0\0\0\0", _payload(_stored(1))]), _live(0, _stored(2))],
    )
    yield (
        "bad-payload",
        "a payload that is no batch keeps its number",
        ["event-malformed"],
        [_step("live", [_TOPIC, _sequence(0), b"\xc1"]), _live(1, _stored(2))],
    )
    yield (
        "bad-event",
        "one bad event does not lose the others of its batch",
        ["event-hostile"],
        [
            _live(
                0,
                _stored(1),
                {"type": "BlockStored", "block_hashes": "x"},
                {"type": "BlockMoved"},
                _stored(2),
            )
        ],
    )
    yield (
        "empty-topic",
        "an empty topic",
        ["stream-gap"],
        [_step("live", [b"", _sequence(0), _payload(_stored(1))])],
    )
    yield (
        "same-hash-twice-in-event",
        "one hash twice in one event",
        ["stream-duplicate"],
        [_live(0, _stored(3), _stored(1, 1))],
    )


def _replay_stories(replay: _Replay) -> Iterator[tuple[str, str, list[str], list[dict[str, Any]]]]:
    yield (
        "fills-gap",
        "replay fills a gap",
        ["stream-replay", "stream-gap"],
        [
            _live(0, _stored(1)),
            _live(3, _stored(4)),
            replay(1, _stored(2)),
            replay(2, _stored(3)),
            replay(3, _stored(4)),
            replay.end(),
        ],
    )
    yield (
        "removed-after",
        "a replayed store older than a live removal",
        ["stream-replay"],
        [
            _live(4, _stored(9)),
            replay.end(),
            _live(6, _removed(1)),
            replay(5, _stored(1)),
            replay(6, _removed(1)),
            replay.end(),
        ],
    )
    yield (
        "buffer-too-short",
        "replay begins after the gap's start: the rest is lost",
        ["stream-replay", "stream-gap"],
        [
            *[_live(i, _stored(i + 1)) for i in range(3)],
            _live(6, _stored(7)),
            replay(5, _stored(6)),
            replay(6, _stored(7)),
            replay.end(),
        ],
    )
    yield (
        "nothing",
        "replay has nothing",
        ["stream-replay", "stream-gap"],
        [_live(0, _stored(1)), _live(3, _stored(4)), replay.end()],
    )
    yield (
        "late-join",
        "a late join, replay from 12",
        ["stream-replay", "stream-late"],
        [
            _live(14, _stored(3)),
            replay(12, _stored(1)),
            replay(13, _stored(2)),
            replay(14, _stored(3)),
            replay.end(),
            _live(15, _removed(1)),
        ],
    )
    yield (
        "late-join-whole",
        "a late join, everything replayed",
        ["stream-replay", "stream-late"],
        [
            _live(2, _stored(3)),
            replay(0, _stored(1)),
            replay(1, _stored(2)),
            replay(2, _stored(3)),
            replay.end(),
        ],
    )
    yield (
        "old-numbers",
        "replay of what was applied long ago",
        ["stream-replay", "stream-duplicate"],
        [_live(0, _stored(1)), _live(1, _removed(1)), replay(0, _stored(1)), replay.end()],
    )
    yield (
        "live-between",
        "live messages between the replies",
        ["stream-replay"],
        [
            _live(0, _stored(1)),
            _live(2, _stored(3)),
            replay(1, _stored(2)),
            _live(3, _removed(2)),
            replay(2, _stored(3)),
            replay.end(),
        ],
    )
    yield (
        "out-of-order",
        "replies out of order",
        ["stream-replay"],
        [
            _live(0, _stored(1)),
            _live(3, _removed(2)),
            replay(2, _stored(3)),
            replay(1, _stored(2)),
            replay.end(),
        ],
    )
    yield (
        "no-end",
        "the end marker has not come: nothing is given up yet",
        ["stream-replay", "stream-gap"],
        [_live(0, _stored(1)), _live(4, _stored(5)), replay(2, _stored(3))],
    )


def make_streams() -> dict[str, list[dict[str, Any]]]:
    """Return the stream vectors."""
    made = []
    stories: list[tuple[str, str, list[str], list[dict[str, Any]], str, str | None]]
    stories = [(slug, name, flags, steps, OLDEST_TEXT, None) for slug, name, flags, steps in _plain_stories()]
    since = str(next(change.since for change in CHANGES if change.events.get("replay_topic_frame")))
    for topic in (False, True):
        form = "with-topic" if topic else "without-topic"
        start, end = (since_of("replay_topic_frame", True), None) if topic else (OLDEST_TEXT, since)
        for slug, name, flags, steps in _replay_stories(_Replay(topic)):
            stories.append(
                (
                    f"replay-{slug}-{form}",
                    f"{name}; replies {form.replace('-', ' ')}",
                    flags,
                    steps,
                    start,
                    end,
                )
            )
    for slug, name, flags, steps, start, end in stories:
        made.append(
            vector(
                f"streams/{slug}/{start}",
                name,
                flags=flags,
                since=start,
                until=end,
                input={"steps": steps},
                expected=final_state(steps),
            )
        )
    twice = [_live(0, _stored(1)), _live(1, _stored(1)), _live(2, _removed(1))]
    counted = final_state(twice)
    gone = {"0": {**counted["0"], "resident": {}}}
    made.append(
        vector(
            f"streams/stored-twice-removed-once/{OLDEST_TEXT}",
            "two copies of a block, one removed: vLLM does not say which",
            flags=["stream-duplicate", "implementation-defined"],
            since=OLDEST_TEXT,
            result="implementation_defined",
            input={"steps": twice},
            expected=counted,
            accepted=[counted, gone],
        )
    )
    return {"streams": made}
