"""The smallest reader of a stream of frames that gets everything right: what the stream vectors expect.

For reading, not for speed. One publisher is one data parallel rank of one socket. Its rules:

* A live message is ``[topic, sequence (8 bytes, big-endian), payload]``. A replay reply is that with an empty frame
  before it, or (before 0.26) without the topic; sequence ``ff..ff`` (-1) ends the replies. Other frames are counted.
* The next sequence number is applied. A later one opens a gap: what follows waits until replay has filled it, or
  has ended; then the rest of the gap is lost and what waited is applied.
* The first live message may have any number: what was before it is a gap like any other.
* A number already applied: a replayed one is passed over. A live one with the same payload as before is a
  duplicate; with another payload the engine was started anew: residency is dropped, and numbering starts at 0;
  what was missed of the new life is a gap.
* Blocks are counted per medium: stored twice and removed once, a block is still there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvhash.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventDecodeError,
    decode_batch,
    hash_key,
)

__all__ = ["StreamModel", "final_state"]

_END = b"\xff" * 8


class StreamModel:
    """One publisher's stream, message by message."""

    def __init__(self) -> None:
        self.next: int | None = None
        self.waiting: dict[int, bytes] = {}
        self.applied: dict[int, bytes] = {}
        self.resident: dict[str, dict[int, int]] = {}
        self.gaps: list[list[str]] = []
        self.lost: list[list[str]] = []
        self.restarts = self.duplicates = self.malformed = self.undecodable = 0

    def take(self, source: str, frames: list[bytes]) -> None:
        """Take one message, ``live`` or ``replay``."""
        if source == "replay":
            if not frames or frames[0] != b"":
                self.malformed += 1
                return
            frames = frames[1:]
            if len(frames) == 2:
                frames = [b"", *frames]
        if len(frames) != 3 or len(frames[1]) != 8:
            self.malformed += 1
            return
        if source == "replay" and frames[1] == _END:
            self._give_up()
            return
        number = int.from_bytes(frames[1], "big")
        if source == "replay":
            if self.next is None or number >= self.next:
                self.waiting.setdefault(number, frames[2])
        else:
            self._live(number, frames[2])
        self._drain()

    def _live(self, number: int, payload: bytes) -> None:
        if self.next is None:
            self.next = 0
        if number < self.next:
            if self.applied.get(number) == payload:
                self.duplicates += 1
                return
            self.restarts += 1
            self.resident, self.applied, self.waiting, self.next = {}, {}, {}, 0
        newest = max([self.next - 1, *self.waiting])
        if number > newest + 1:
            self.gaps.append([str(newest + 1), str(number - 1)])
        self.waiting.setdefault(number, payload)

    def _drain(self) -> None:
        while self.next is not None and self.next in self.waiting:
            payload = self.waiting.pop(self.next)
            self._apply(payload)
            self.applied[self.next] = payload
            self.next += 1

    def _give_up(self) -> None:
        """Replay has ended: what is still missing is lost."""
        while self.waiting and self.next is not None:
            first = min(self.waiting)
            self.lost.append([str(self.next), str(first - 1)])
            self.next = first
            self._drain()

    def _apply(self, payload: bytes) -> None:
        try:
            events = decode_batch(payload).events
        except EventDecodeError:
            self.undecodable += 1
            return
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.resident = {}
            elif isinstance(event, BlockStored):
                tier = self.resident.setdefault(event.medium or "GPU", {})
                for value in event.block_hashes:
                    tier[hash_key(value)] = tier.get(hash_key(value), 0) + 1
            elif isinstance(event, BlockRemoved):
                tier = self.resident.get(event.medium or "GPU", {})
                for value in event.block_hashes:
                    left = tier.get(hash_key(value), 0) - 1
                    if left > 0:
                        tier[hash_key(value)] = left
                    else:
                        tier.pop(hash_key(value), None)

    def state(self) -> dict[str, Any]:
        """Return the state as the vectors carry it."""
        return {
            "next_sequence": None if self.next is None else str(self.next),
            "waiting": [str(number) for number in sorted(self.waiting)],
            "gaps": self.gaps,
            "lost": self.lost,
            "restarts": self.restarts,
            "duplicates": self.duplicates,
            "malformed": self.malformed,
            "undecodable_batches": self.undecodable,
            "resident": {
                medium: [str(key) for key in sorted(blocks)]
                for medium, blocks in sorted(self.resident.items())
                if blocks
            },
        }


def final_state(steps: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state after the steps of a stream vector, per data parallel rank."""
    models: dict[str, StreamModel] = {}
    for step in steps:
        model = models.setdefault(str(step["rank"]), StreamModel())
        model.take(step["from"], [bytes.fromhex(frame) for frame in step["frames"]])
    return {rank: model.state() for rank, model in sorted(models.items())}
