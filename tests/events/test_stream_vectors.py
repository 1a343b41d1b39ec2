"""The subscriber's state machine ends every stream of the corpus in the state that the vectors say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from kvhash.events import AllBlocksCleared, BlockRemoved, BlockStored, hash_key
from kvhash.events.message import Message, parse_message, parse_reply
from kvhash.events.records import BadMessage, Batch, Lost, Record, Restart
from kvhash.events.tracker import PublisherTracker
from kvhash.vectors import load_corpus

from ..vectors.programs import CORPUS

STREAMS = [vector for file, vector in load_corpus(CORPUS) if file.kind == "streams"]


class Follower:
    """One rank's tracker, and what its records add up to."""

    def __init__(self, rank: int) -> None:
        self.tracker = PublisherTracker("e", rank, can_replay=True)
        self.resident: dict[str, Counter[int]] = {}
        self.restarts = self.malformed = 0
        self.lost: list[list[str]] = []

    def take(self, source: str, frames: list[bytes]) -> None:
        """Take one message as the subscriber would."""
        message: Message | BadMessage | None
        message = parse_message(frames, "e", 0) if source == "live" else parse_reply(frames, 0)
        if not isinstance(message, Message):
            self.malformed += 1
        elif source == "replay":
            self._add(self.tracker.reply(message, 0))
        else:
            if self.tracker.expected is None and message.seq > 0:
                self.tracker.start_from(0, 0)  # a late joiner that wants all that there was
            self._add(self.tracker.live(message, 0))

    def _add(self, records: Iterable[Record]) -> None:
        for record in records:
            if isinstance(record, Restart):
                self.restarts += 1
                self.resident = {}
            elif isinstance(record, Lost):
                self.lost.append([str(record.first), str(record.last)])
            elif isinstance(record, Batch):
                for event in record.batch.events:
                    self._apply(event)

    def _apply(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            self.resident = {}
        elif isinstance(event, (BlockStored, BlockRemoved)):
            tier = self.resident.setdefault(event.medium or "GPU", Counter())
            for value in event.block_hashes:
                key = hash_key(value)
                tier[key] = tier[key] + 1 if isinstance(event, BlockStored) else max(0, tier[key] - 1)

    def state(self) -> dict[str, Any]:
        """Return what can be compared with a vector."""
        there = {
            medium: [str(key) for key, count in sorted(tier.items()) if count]
            for medium, tier in sorted(self.resident.items())
        }
        return {
            "resident": {medium: keys for medium, keys in there.items() if keys},
            "restarts": self.restarts,
            "malformed": self.malformed,
            "lost": self.lost,
        }


@pytest.mark.parametrize("vector", STREAMS, ids=lambda vector: str(vector["id"]))
def test_a_stream_ends_as_the_corpus_says(vector: dict[str, Any]) -> None:
    """Residency, restarts, unreadable messages and losses are those of the vector."""
    followers: dict[str, Follower] = {}
    for step in vector["input"]["steps"]:
        follower = followers.setdefault(str(step["rank"]), Follower(step["rank"]))
        follower.take(step["from"], [bytes.fromhex(frame) for frame in step["frames"]])
    got = {rank: follower.state() for rank, follower in followers.items()}
    names = ("resident", "restarts", "malformed", "lost")
    choices = [
        {rank: {name: state[name] for name in names} for rank, state in choice.items()}
        for choice in vector.get("accepted", [vector["expected"]])
    ]
    assert got in choices
