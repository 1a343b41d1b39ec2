"""One publisher's sequence numbers: what is next, what is missing, what was a restart. No sockets, no clock of its own.

A tracker is fed live messages and the replies of replays, with the time, and returns records in order. While it
waits for a replay it holds newer live batches back, so that an old batch is never delivered after a newer one.

How a restart is told from a late or repeated message: within one life of a publisher a higher number has no earlier
time (each batch carries its own). So against the latest message

* a lower number with a later time begins a new life;
* a higher number with an earlier time, or a lower one that is not among those delivered, is of a former life or was
  given up already: it is not delivered (a run of such messages is a new life whose clock was set back; where there is
  a replay, the publisher is asked at the first of them, and has that batch only if its own life is meant; if it
  has nothing but what was delivered, the life that is followed is `Confirmed`);
* a number and payload that were delivered before are a repetition.

A new life whose first messages were all missed can look like a gap, or like no gap at all; therefore a replay asks for
some numbers before the missing ones too, and a batch there that differs from the one delivered shows the new life.
A publisher keeps its newest batches, so one that is asked for what was delivered last, and has neither that nor
anything newer, is in a new life, too; it is asked when it has been silent, and after every new connection.
(Where there is no replay nothing on the wire tells two lives apart without a gap or a late message, as when a life of
one batch is followed by one whose first batch was missed. Where the new life's buffer no longer reaches back to the
numbers that were delivered, a `Lost` stands between them.)
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from .message import END_SEQ, Message, following
from .records import BadMessage, Batch, Confirmed, Gap, Lost, Record, Recovered, Restart, Stale

__all__ = ["PublisherTracker", "Replay"]

#: How many delivered batches are remembered, to tell a repeated message from a restart.
_REMEMBERED = 4096
#: So many messages in a row that seem old are a clock that was set back, not old messages.
_STALE_RUN = 8
#: For so many batches after a restart, messages of the life before it are reckoned with.
_FORMER_LIFE = 1000
#: A replay may take so many times its timeout in all, however often it answers.
_LONGEST_REPLAY = 10
#: A replay asks for up to so many delivered batches before the missing ones, to see that they are of one life.
_OVERLAP = 16


@dataclass(slots=True)
class Replay:
    """A replay under way: from which number it asks, until when it may take, and what it has brought.

    ``wanted``: the first number that is missing; ``start`` may be one before it. ``probe``: asked without a gap, to
    see whether the last messages were missed. ``verify``: a probe that must end, since the publisher may be in another
    life. ``until``: the end of it, however often it answers; ``seen``: the highest number that it answered, a lower or
    repeated one being no progress. ``whole``: the end marker came. ``suspect``: number and fingerprint of a batch that
    seems old; a publisher that has it is in another life than the one followed.
    """

    start: int
    wanted: int
    deadline: float
    until: float
    attempt: int = 1
    probe: bool = False
    verify: bool = False
    lowest: int | None = None
    highest: int | None = None
    seen: int = -1
    ended: bool = False
    whole: bool = False
    suspect: tuple[int, bytes] | None = None


@dataclass(slots=True)
class PublisherTracker:
    """The state of one publisher, named by its endpoint and rank.

    ``can_replay``: whether a replay endpoint is known. ``replay_timeout``: seconds that a replay may be silent.
    ``max_held``: live batches held back while a replay is under way, at most. ``reorder_s``: seconds that a gap may
    fill by itself where there is no replay. ``replay`` is what the caller has to run, None when there is none.
    """

    endpoint: str
    rank: int | None
    can_replay: bool
    replay_timeout: float = 5.0
    replay_attempts: int = 3
    max_held: int = 20_000
    reorder_s: float = 0.5
    expected: int | None = None
    replay: Replay | None = None
    #: Grows with every replay asked for, so that the caller sees a new one.
    asked: int = 0
    _held: dict[int, Message] = field(default_factory=dict)
    _hold_until: float | None = None
    _delivered: OrderedDict[int, tuple[bytes, float]] = field(default_factory=OrderedDict)
    #: Number and time of the latest message of this life.
    _newest: tuple[int, float] | None = None
    #: No message of this life has an earlier time.
    _floor: float = float("-inf")
    #: Up to this number, messages of a life before may still come.
    _former_until: int | None = None
    _stale_run: int = 0
    _gaps: list[tuple[int, int]] = field(default_factory=list)
    _last_seq: int | None = None
    #: Whether the publisher was seen to keep batches for replays.
    _keeps: bool = False
    #: Whether a replay was under way when the life that is followed came into doubt, so that another has to be asked.
    _verify_due: bool = False
    #: The first replay (of `asked`) that can settle the doubt which a stale message raised; None without a doubt.
    _doubt: int | None = None

    # --- feeding ----------------------------------------------------------------------------------------------

    def start_from(self, seq: int, now: float) -> None:
        """Begin with a replay from `seq`, before any live message (or with the first one in hand)."""
        self.expected = seq
        self._ask(seq, now, overlap=False)

    def live(self, message: Message, now: float) -> list[Record]:
        """Take a live message; return the records that are due."""
        if self.expected is None:
            self.expected = message.seq
        if self.replay and self.replay.probe and not self.replay.verify and message.seq == self.expected:
            self.replay = None  # the stream goes on by itself
        held = self._held.get(message.seq)
        if held is not None and (held.payload == message.payload or _ts(message) <= _ts(held)):
            return []
        if self._is_behind(message.seq):
            return self._behind(message, now)
        order = self._order(message)
        if order == "new":
            return self._new_life(message, now)
        if order == "old" and not self._is_plain_next(message):
            return self._stale(message, now)
        self._stale_run = 0
        if (
            self._newest is None
            or message.seq > self._newest[0]
            or self._wrapped(message.seq, self._newest[0])
        ):
            # One whose time cannot be read says nothing about time: the last known stays.
            known = float("-inf") if self._newest is None else self._newest[1]
            self._newest = (message.seq, _ts(message) if _is_timed(message) else known)
        self._held[message.seq] = message
        return self._advance(now)

    def reply(self, message: Message, now: float) -> list[Record]:
        """Take a reply of the replay under way; return the records that are due."""
        replay = self.replay
        if replay is None:
            return []
        if message.seq == END_SEQ:
            replay.ended = replay.whole = True
            return self._advance(now)
        if message.seq < replay.start:
            replay.ended = True  # not what was asked for: taking it would go on for ever
            return self._advance(now)
        self._keeps = True
        if message.seq > replay.seen:
            replay.seen = message.seq
            replay.deadline = min(now + self.replay_timeout, replay.until)
        if message.seq < replay.wanted:
            known, shown = self._delivered.get(message.seq), _fingerprint(message.payload)
            differs = self._order(message) == "new" if known is None else known[0] != shown
            if differs or replay.suspect == (message.seq, shown):
                return self._begin_anew(message, now)
            return []
        if replay.suspect is not None and replay.suspect == (message.seq, _fingerprint(message.payload)):
            return self._begin_anew(message, now)
        replay.lowest = message.seq if replay.lowest is None else min(replay.lowest, message.seq)
        replay.highest = message.seq if replay.highest is None else max(replay.highest, message.seq)
        order = self._order(message)
        if order == "new":
            return self._begin_anew(message, now)
        if order != "old" and not self._is_behind(message.seq):
            held = self._held.get(message.seq)
            if held is None or (held.payload != message.payload and _ts(held) < _ts(message)):
                self._held[message.seq] = message
        return self._advance(now)

    def tick(self, now: float) -> list[Record]:
        """Let time pass: deadlines of a replay or of a gap; return the records that are due."""
        records = self._advance(now)
        if self._verify_due and self.replay is None:
            self._verify_due = False
            self.probe(now, verify=True)
        return records

    def probe(self, now: float, *, verify: bool = False) -> None:
        """Ask for what follows the last delivered batch, in case that the newest messages were missed.

        `verify`: after a new connection, behind which there may be a new life: what comes meanwhile waits for it.
        """
        self._verify_due |= verify and self.replay is not None
        if self.replay is None and self.expected is not None and not self._held and self.can_replay:
            self._ask(self.expected, now, probe=True)
            assert self.replay is not None
            self.replay.verify = verify

    @property
    def next_deadline(self) -> float | None:
        """When `tick` has to be called at the latest."""
        deadlines = [self.replay.deadline] if self.replay else []
        if self._hold_until is not None:
            deadlines.append(self._hold_until)
        return min(deadlines, default=None)

    # --- numbers below the expected one -----------------------------------------------------------------------

    def _is_behind(self, seq: int) -> bool:
        assert self.expected is not None
        if self.expected == 0 and seq > END_SEQ // 2:
            return True  # just wrapped
        return seq < self.expected and not self._wrapped(seq, self.expected)

    def _order(self, message: Message) -> Literal["fits", "old", "new"]:
        """Place a message against the latest one: within a life, a higher number has no earlier time.

        ``old``: it is of a former life; ``new``: it is of a life after the one that is followed.
        """
        if self._newest is None or message.batch is None or not _is_timed(message):
            return "fits"
        if message.batch.ts < self._floor:
            return "old"
        seq, ts = self._newest
        if message.seq > seq or self._wrapped(message.seq, seq):
            return "old" if message.batch.ts < ts else "fits"
        return "new" if message.batch.ts > ts else "fits"

    @staticmethod
    def _wrapped(seq: int, before: int) -> bool:
        return seq < 1 << 32 and before > END_SEQ - (1 << 32)

    def _is_plain_next(self, message: Message) -> bool:
        """Return whether the message is simply the next: then its clock was set back, and no former life is about."""
        return (
            message.seq == self.expected
            and not self._held
            and not self._stale_run
            and self._former_until is None
        )

    def _behind(self, message: Message, now: float) -> list[Record]:
        known = self._delivered.get(message.seq)
        if known is not None and known[0] == _fingerprint(message.payload):
            return []
        if self._order(message) == "new":
            return self._new_life(message, now)
        if known is not None and self.can_replay and known[1] < _ts(message):
            return self._begin_anew(message, now)  # one number, two contents: a life began unseen
        return self._stale(message, now)

    def _stale(self, message: Message, now: float) -> list[Record]:
        self._stale_run += 1
        if self._stale_run > _STALE_RUN:
            return self._new_life(message, now)
        if self._stale_run == 1 and self.replay is None and self.can_replay and message.batch is not None:
            self._suspect(message, now)
            self._doubt = self.asked
        else:
            self._raise_doubt()
        return [Stale(self.endpoint, self.rank, message.seq)]

    def _raise_doubt(self) -> None:
        """Have the publisher asked once the replay under way, which may be of the life before, is over."""
        self._verify_due, self._doubt = True, self.asked + 1

    def _suspect(self, message: Message, now: float) -> None:
        """Ask whether a batch that seems old is the publisher's own; what comes meanwhile waits for the answer."""
        assert self.expected is not None
        behind = self._is_behind(message.seq)
        self._ask(self.expected, now, overlap=not behind, probe=True)
        assert self.replay is not None
        self.replay.verify = True
        self.replay.suspect = (message.seq, _fingerprint(message.payload))
        if behind:
            self.replay.start = message.seq

    def _settle(self, replay: Replay) -> list[Record]:
        """Confirm the life that is followed, if a replay asked since the doubt has what was delivered and no more."""
        if self._doubt is None or self.asked < self._doubt or not replay.whole or not self._keeps:
            return []
        if self.expected != (0 if replay.seen < 0 else following(replay.seen)):
            return []
        self._doubt = None
        return [Confirmed(self.endpoint, self.rank, self._last_seq)]

    def _new_life(self, message: Message, now: float) -> list[Record]:
        records = self._restart(message)
        self._held[message.seq] = message
        return records + self._advance(now)

    def _restart(self, shown: Message) -> list[Record]:
        """Forget the former life; `shown` is the message of the new one."""
        records = self._flush()
        last, self._last_seq = self._last_seq, None
        self._gaps.clear()
        self._held.clear()
        self._delivered.clear()
        self.replay = None
        self._hold_until = None
        self._stale_run, self._doubt = 0, None
        self.expected = 0
        # Whatever is as old as the former life's latest message is of that life, unless the clock was set back.
        former = float("-inf") if self._newest is None else self._newest[1]
        self._floor = former if _is_timed(shown) and former < _ts(shown) else float("-inf")
        self._newest = (shown.seq, _ts(shown) if _is_timed(shown) else float("-inf"))
        self._former_until = shown.seq + _FORMER_LIFE
        return [*records, Restart(self.endpoint, self.rank, last)]

    def _flush(self) -> list[Record]:
        """Deliver what is held of a life that is over, in order; each hole in it is lost."""
        records: list[Record] = []
        while self._held:
            records += self._deliver()
            if self._held:
                last = self._hole_end()
                self._note_gap(records, last)
                records += self._give_up(last, "not-in-buffer")
        return records + [Lost(self.endpoint, self.rank, *gap, "not-in-buffer") for gap in self._gaps]

    def _look_back(self, replay: Replay, now: float) -> None:
        """Ask for all that there is: another life is seen by it, and a publisher that keeps nothing has nothing."""
        assert self.expected is not None
        self._ask(0, now, overlap=False, probe=True)
        assert self.replay is not None
        self.replay.wanted, self.replay.verify = self.expected, replay.verify

    def _begin_empty(self, now: float) -> list[Record]:
        """Start a new life of which nothing was seen; what it has published is asked for."""
        last, self._last_seq = self._last_seq, None
        self._gaps.clear()
        self._delivered.clear()
        self._newest, self._floor, self._former_until = None, float("-inf"), None
        self._stale_run, self._doubt = 0, None
        self.expected = 0
        self._ask(0, now, overlap=False)
        return [Restart(self.endpoint, self.rank, last)]

    def _begin_anew(self, shown: Message, now: float) -> list[Record]:
        """Start the new life that `shown` is of; all of it is asked for, from 0."""
        kept = [m for m in self._held.values() if m.seq >= shown.seq and _ts(m) >= _ts(shown)]
        for message in kept:
            del self._held[message.seq]
        records = self._restart(shown)
        self._held.update((message.seq, message) for message in [shown, *kept])
        newest = max(filter(_is_timed, self._held.values()), key=lambda message: message.seq, default=None)
        if newest is not None:
            self._newest = (newest.seq, _ts(newest))
        self._ask(0, now, overlap=False)
        return records

    # --- moving on --------------------------------------------------------------------------------------------

    def _ask(
        self, wanted: int, now: float, *, overlap: bool = True, attempt: int = 1, probe: bool = False
    ) -> None:
        start = wanted
        while overlap and wanted - start < _OVERLAP and start - 1 in self._delivered:
            start -= 1
        until = now + _LONGEST_REPLAY * self.replay_timeout
        self.replay = Replay(start, wanted, now + self.replay_timeout, until, attempt, probe)
        self.asked += 1

    def _advance(self, now: float) -> list[Record]:
        if self.expected is None:
            return []
        waits = self.replay is not None and not self.replay.ended and len(self._held) <= self.max_held
        records = [] if waits else list(self._deliver())
        if self.replay is not None:
            timed_out = now >= self.replay.deadline
            if self.replay.ended or timed_out or len(self._held) > self.max_held:
                records += self._finish_replay(now, timed_out=timed_out and not self.replay.ended)
        elif self._held:
            records += self._missing(now)
        return records

    def _missing(self, now: float) -> list[Record]:
        """Handle the hole before the held messages, no replay being under way."""
        assert self.expected is not None
        first, last = self.expected, self._hole_end()
        records: list[Record] = []
        if not self._gaps or self._gaps[-1][1] < first:
            self._gaps.append((first, last))
            records.append(Gap(self.endpoint, self.rank, first, last))
        if self.can_replay:
            self._ask(first, now)
            return records
        if self._hold_until is None:
            self._hold_until = now + self.reorder_s
        if now >= self._hold_until or len(self._held) > self.max_held:
            self._hold_until = None
            records += self._give_up(last, "no-replay")
            records += self._advance(now)
        return records

    def _finish_replay(self, now: float, *, timed_out: bool) -> list[Record]:
        replay = self.replay
        assert replay is not None
        assert self.expected is not None
        self.replay = None
        records = list(self._deliver())
        overflow = len(self._held) > self.max_held
        if not self._held:
            if replay.whole and replay.seen < 0 and replay.start < replay.wanted:
                # It has nothing of what it sent last.
                if self._keeps:
                    return records + self._begin_empty(now)
                if replay.start > 0:
                    self._look_back(replay, now)
            return records + self._settle(replay)
        if self.expected in self._held:
            return records
        hole_end = self._hole_end()
        # The buffer is contiguous: a hole above the lowest number returned was dropped on its way, and what lies above
        # the highest was published after the answer. Both are worth another attempt; what lies below was evicted.
        evicted = not timed_out and (replay.lowest is None or self.expected < replay.lowest)
        if replay.highest is not None and self.expected > replay.highest and not timed_out:
            evicted = False
        if not evicted and not overflow and replay.attempt < self.replay_attempts:
            self._note_gap(records, hole_end)
            # One that brought something was no failure; a long replay over a bad line takes as many as it needs.
            attempt = replay.attempt + 1 if self.expected == replay.wanted else 1
            self._ask(self.expected, now, attempt=attempt)
            return records
        reason = "overflow" if overflow else "no-answer" if timed_out else "not-in-buffer"
        self._note_gap(records, hole_end)
        records += self._give_up(hole_end, reason)
        return records + self._advance(now)

    def _hole_end(self) -> int:
        """Return the last number of the hole before the held messages; one over the wrap is taken as two."""
        assert self.expected is not None
        expected = self.expected
        return min((seq for seq in self._held if seq >= expected), default=END_SEQ) - 1

    def _note_gap(self, records: list[Record], last: int) -> None:
        assert self.expected is not None
        if not self._gaps:
            self._gaps.append((self.expected, last))
            records.append(Gap(self.endpoint, self.rank, self.expected, last))
        elif self._gaps[-1][1] < last:
            records.append(Gap(self.endpoint, self.rank, self._gaps[-1][1] + 1, last))
            self._gaps[-1] = (self._gaps[-1][0], last)

    def _give_up(self, last: int, reason: str) -> list[Record]:
        assert self.expected is not None
        first = self.expected
        self.expected = following(last)
        # Of a gap that goes on behind what is lost, the rest is still to be recovered or lost.
        self._gaps = [(max(low, last + 1), high) for low, high in self._gaps if high > last]
        return [Lost(self.endpoint, self.rank, first, last, reason)]

    def _deliver(self) -> Iterator[Record]:
        """Deliver held messages that are next in order, and say what of a gap they recovered."""
        assert self.expected is not None
        while self.expected in self._held:
            message = self._held.pop(self.expected)
            if self._former_until is not None and _ts(message) < self._floor:
                # It came while its place was empty, but is older than the batch before it: of a former life.
                self._raise_doubt()
                yield Stale(self.endpoint, self.rank, message.seq)
                return
            seq = self.expected
            self.expected = following(seq)
            self._last_seq = seq
            self._hold_until = None
            yield self._record(message)
            if self._gaps and seq == self._gaps[0][1]:
                first, last = self._gaps.pop(0)
                yield Recovered(self.endpoint, self.rank, first, last)
            elif (
                self._gaps and self._gaps[0][0] <= seq < self._gaps[0][1] and self.expected not in self._held
            ):
                first, last = self._gaps[0]
                self._gaps[0] = (self.expected, last)
                yield Recovered(self.endpoint, self.rank, first, seq)

    def _record(self, message: Message) -> Record:
        self._delivered[message.seq] = (_fingerprint(message.payload), _ts(message))
        if self._former_until is not None:
            self._floor = max(self._floor, _ts(message)) if message.batch is not None else self._floor
        if self._former_until is not None and message.seq > self._former_until:
            self._former_until = None
        if message.batch is not None:
            self._doubt = None
        if len(self._delivered) > _REMEMBERED:
            self._delivered.popitem(last=False)
        if message.batch is None:
            frames = (message.topic, message.seq.to_bytes(8, "big"), message.payload)
            return BadMessage(
                self.endpoint, self.rank, message.seq, message.received_ns, message.fault, frames
            )
        return Batch(
            self.endpoint,
            self.rank,
            message.seq,
            message.topic,
            message.received_ns,
            message.batch,
            message.payload,
            message.replayed,
        )


def _ts(message: Message) -> float:
    """Return the batch's own time; of a message that cannot be read, one that decides nothing."""
    return message.batch.ts if message.batch is not None else float("inf")


def _is_timed(message: Message) -> bool:
    return message.batch is not None and math.isfinite(message.batch.ts)


def _fingerprint(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()
