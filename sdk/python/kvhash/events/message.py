"""Messages of publishers, read: live ones and a replay's replies, and the order of their sequence numbers."""

from __future__ import annotations

from dataclasses import dataclass

from kvhash._errors import KvHashError

from .decode import decode_batch
from .records import BadMessage
from .schema import EventBatch

__all__ = ["END_SEQ", "Message", "following", "parse_message", "parse_reply"]

#: The sequence number of a replay's end marker, -1.
END_SEQ = (1 << 64) - 1


def following(seq: int) -> int:
    """Return the number after `seq`; after 2^64 - 2 comes 0, since 2^64 - 1 is the end marker."""
    return 0 if seq >= END_SEQ - 1 else seq + 1


@dataclass(frozen=True, slots=True)
class Message:
    """A live message or a replay's reply, read: its batch, or None and why it could not be read.

    ``sure``: the publisher's own by its answer, whatever its time.
    """

    topic: bytes
    seq: int
    payload: bytes
    received_ns: int
    batch: EventBatch | None
    fault: str = ""
    replayed: bool = False
    sure: bool = False

    @property
    def rank(self) -> int | None:
        """The publisher's rank, as the batch says."""
        return None if self.batch is None else self.batch.data_parallel_rank


def _read(topic: bytes, seq: int, payload: bytes, received_ns: int, replayed: bool) -> Message:
    try:
        return Message(topic, seq, payload, received_ns, decode_batch(payload), "", replayed)
    except KvHashError as error:
        return Message(topic, seq, payload, received_ns, None, str(error), replayed)


def parse_message(frames: list[bytes], endpoint: str, received_ns: int) -> Message | BadMessage:
    """Read a live message ``[topic, seq, payload]``; anything else is a `BadMessage`."""
    if len(frames) != 3:
        reason = f"a message of {len(frames)} frames; expected topic, sequence number and payload"
        return BadMessage(endpoint, None, None, received_ns, reason, tuple(frames))
    if len(frames[1]) != 8:
        reason = f"a sequence number of {len(frames[1])} bytes; expected 8"
        return BadMessage(endpoint, None, None, received_ns, reason, tuple(frames))
    if int.from_bytes(frames[1], "big") == END_SEQ:
        reason = "sequence number -1, which is a replay's end marker and no batch's"
        return BadMessage(endpoint, None, None, received_ns, reason, tuple(frames))
    return _read(frames[0], int.from_bytes(frames[1], "big"), frames[2], received_ns, False)


def parse_reply(frames: list[bytes], received_ns: int) -> Message | None:
    """Read a replay's reply, with or without topic frame; the end marker has `seq` END_SEQ. None for anything else."""
    topic = b""
    if len(frames) == 4:
        topic = frames[1]
    elif len(frames) != 3:
        return None
    seq, payload = frames[-2], frames[-1]
    if len(seq) != 8:
        return None
    number = int.from_bytes(seq, "big")
    if number == END_SEQ:
        return Message(topic, END_SEQ, b"", received_ns, None, replayed=True)
    return _read(topic, number, payload, received_ns, True)
