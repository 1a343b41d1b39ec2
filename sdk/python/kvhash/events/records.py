"""What a subscriber yields: batches, and in the same stream what it noticed about them.

Every record names its publisher: the endpoint that it came through, and the data parallel rank that its batches
carry (two publishers behind one socket are told apart by it). Ranges of sequence numbers hold both ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .schema import EventBatch

__all__ = [
    "BadMessage",
    "Batch",
    "Confirmed",
    "Gap",
    "Lost",
    "Record",
    "Recovered",
    "Restart",
    "Stale",
    "Unconfirmed",
]


@dataclass(frozen=True, slots=True)
class _Record:
    """``endpoint``, ``rank``: the publisher."""

    endpoint: str
    rank: int | None


@dataclass(frozen=True, slots=True)
class Batch(_Record):
    """One batch, in the order of the publisher's sequence numbers.

    ``received_ns``: ns since the epoch. ``payload``: the batch as it came. ``replayed``: whether it came by replay.
    """

    seq: int
    topic: bytes
    received_ns: int
    batch: EventBatch
    payload: bytes
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class Gap(_Record):
    """The numbers `first` to `last` are missing; `Recovered`, `Lost` or `Confirmed` follows for each of them."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Recovered(_Record):
    """The missing batches `first` to `last` were delivered, just before this record."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Lost(_Record):
    """The batches `first` to `last` will not come; what the publisher holds is uncertain from here on.

    ``reason``: ``no-replay`` (no replay endpoint is known), ``not-in-buffer`` (the publisher no longer has them),
    ``no-answer`` (the replay did not answer in time), ``overflow`` (too much arrived meanwhile to wait longer).
    """

    first: int
    last: int
    reason: str


@dataclass(frozen=True, slots=True)
class Restart(_Record):
    """The publisher began anew: what it held before is gone. ``last_seq``: the last of its former life."""

    last_seq: int | None


@dataclass(frozen=True, slots=True)
class Stale(_Record):
    """A batch came after it was given up as lost, or from a former life; it is not delivered.

    It may as well be of a new life whose clock was set back; where there is a replay the publisher is asked, and
    `Confirmed`, `Restart` or `Unconfirmed` follows, unless it keeps nothing that it could answer with.
    """

    seq: int


@dataclass(frozen=True, slots=True)
class Confirmed(_Record):
    """The publisher was asked and is in the life that is followed; numbers of a `Gap` that are still missing are none.

    ``last_seq``: the last of what was delivered before; None when that is nothing.
    """

    last_seq: int | None


@dataclass(frozen=True, slots=True)
class Unconfirmed(_Record):
    """The publisher may be in another life than the one followed: it was asked, and did not answer.

    Batches are delivered as if it were not. It is asked again, and `Confirmed` or `Restart` follows when it answers.
    """


@dataclass(frozen=True, slots=True)
class BadMessage(_Record):
    """A message that is no batch: a wrong number of frames, a wrong sequence number, or an unreadable payload.

    ``seq`` is None where it could not be read. ``frames`` holds the message.
    """

    seq: int | None
    received_ns: int
    reason: str
    frames: tuple[bytes, ...]


#: What a subscriber yields.
Record: TypeAlias = "Batch | Gap | Recovered | Lost | Restart | Stale | Confirmed | Unconfirmed | BadMessage"
