"""One publisher's sequence numbers: what is next, what is missing, what was a restart. No sockets, no clock of its own.

A tracker is fed live messages and the replies of replays, with the time, and returns records in order. While it
waits for a replay it holds newer live batches back, so that an old batch is never delivered after a newer one.

How a restart is told from a late or repeated message. By the batches' own times: within one life of a publisher a
higher number has no earlier time, unless its clock was set back. So against the latest message

* a lower number with a later time begins a new life;
* a higher number with an earlier time, or a lower one that is not among those delivered, seems to be of a former life
  or was given up already: it is not delivered (`Stale`; without a replay a run of them is a new life whose clock was
  set back);
* a number and payload that were delivered before are a repetition.

And by what the publisher has, where there is a replay; this outweighs times. An answer is of one life, so

* one with a batch that was delivered is joined: it is of the life that is followed, and so is all that it has;
* one with another batch of a number that was delivered is of a new life, and so is one that has a `Stale` batch;
* a publisher keeps its newest batches: one that ends before what was delivered is in a new life, and what was held when
  it was asked, and is not in it, is of no life of this publisher's that goes on. Replies are lost at times, so such an
  answer is asked for again before anything follows from it.

So a replay asks for some numbers before the missing ones, too; and the publisher is asked after every new connection,
when it has been silent, and when a `Stale` batch came, while what comes live waits. `Confirmed` says that a doubt was
settled, `Unconfirmed` that it was not: batches are delivered then, and it is asked again later.

(Where there is no replay, or a publisher that keeps nothing, nothing on the wire tells two lives apart without a gap or
a late message, as when a life of one batch is followed by one whose first batch was missed. Where the new life's buffer
no longer reaches back to the numbers that were delivered, a `Lost` stands between them.)
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from .message import END_SEQ, Message, following
from .records import BadMessage, Batch, Confirmed, Gap, Lost, Record, Recovered, Restart, Stale, Unconfirmed

__all__ = ["PublisherTracker", "Replay"]

#: How many delivered batches are remembered, to tell a repeated message from a restart.
_REMEMBERED = 4096
#: So many messages in a row that seem old are a clock that was set back, not old messages.
_STALE_RUN = 8
#: For so many batches after a restart, messages of the life before it are reckoned with.
_FORMER_LIFE = 1000
#: A replay may take so many times its timeout in all, however often it answers.
_LONGEST_REPLAY = 10
#: One that does not answer is asked again after ever longer pauses, up to so many seconds.
_LONGEST_PAUSE_S = 3600.0
#: A replay asks for up to so many delivered batches before the missing ones, to see that they are of one life.
_OVERLAP = 16


@dataclass(slots=True)
class Replay:
    """A replay under way: from which number it asks, until when it may take, and what it has brought.

    ``wanted``: the first number that is missing; ``start`` may be one before it. ``probe``: asked without a gap, to
    see whether the last messages were missed. ``verify``: must be answered, since the publisher may be in another
    life. ``until``: the end of it, however often it answers; ``seen``: the highest number that it answered, a lower or
    repeated one being no progress. ``whole``: the end marker came. ``suspect``: number and fingerprint of a batch that
    seems old; a publisher that has it is in another life than the one followed, unless the answer is joined.

    An answer is of one life. ``joined``: that it is the life followed, since it has a batch that was delivered, or
    since nothing was yet; what else it has is the publisher's own then, whatever its time. ``held``: the highest number
    held when it was asked for; an answer that ends below has another life's publisher, or something of it was dropped.
    ``cut``: another publisher answered.
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
    joined: bool = False
    held: int = -1
    cut: bool = False


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
    #: Number of the last batch delivered, and the time of the last one that has any.
    _last_seq: int | None = None
    _last_ts: float = float("-inf")
    #: Whether the publisher was seen to keep batches for replays.
    _keeps: bool = False
    #: Whether the publisher has to be asked once more when the replay under way is over.
    _ask_again: bool = False
    #: The first replay (of `asked`) that can settle whether the life followed is the publisher's; None without a doubt.
    _doubt: int | None = None
    #: The same, but that nothing has to wait for the answer.
    _follow_up: bool = False
    #: When to ask again, the publisher having left a doubt unanswered, after how long; and whether that was said.
    _again_at: float | None = None
    _again_s: float = 0.0
    _unconfirmed: bool = False

    # --- feeding ----------------------------------------------------------------------------------------------

    def start_from(self, seq: int, now: float) -> None:
        """Begin with a replay from `seq`, before any live message (or with the first one in hand)."""
        self.expected = seq
        self._ask(seq, now, overlap=False)

    def live(self, message: Message, now: float) -> list[Record]:
        """Take a live message; return the records that are due."""
        if self.expected is None:
            self.expected = message.seq
        replay = self.replay
        if (
            replay
            and replay.probe
            and not replay.verify
            and not self._ask_again
            and message.seq == self.expected
        ):
            self.replay = None  # the stream goes on by itself
        held = self._held.get(message.seq)
        if held is not None and (held.payload == message.payload or _ts(message) <= _ts(held)):
            return []
        if self._is_behind(message.seq):
            return self._behind(message, now)
        order = self._order(message)
        if order == "new":
            return self._new_life(message, now)
        if order == "old" and (self._answers or not self._is_plain_next(message)):
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
        replay.lowest = message.seq if replay.lowest is None else min(replay.lowest, message.seq)
        if message.seq > replay.seen:
            replay.seen = message.seq
            replay.deadline = min(now + self.replay_timeout, replay.until)
        if message.seq < replay.wanted:
            known, shown = self._delivered.get(message.seq), _fingerprint(message.payload)
            differs = self._order(message) == "new" if known is None else known[0] != shown
            if differs or replay.suspect == (message.seq, shown):
                return self._begin_anew(message, now)
            replay.joined |= known is not None
            return []
        replay.highest = message.seq if replay.highest is None else max(replay.highest, message.seq)
        if replay.joined:
            if not self._is_behind(message.seq):
                self._take_in(message)
            return self._advance(now)
        if replay.suspect is not None and replay.suspect == (message.seq, _fingerprint(message.payload)):
            return self._begin_anew(message, now)
        order = self._order(message)
        if order == "new":
            return self._begin_anew(message, now)
        if order != "old" and not self._is_behind(message.seq):
            held = self._held.get(message.seq)
            if held is None or (held.payload != message.payload and _ts(held) < _ts(message)):
                self._held[message.seq] = message
        return self._advance(now)

    def cut(self, now: float) -> list[Record]:
        """Take the end of an answer that was another publisher's; return the records that are due."""
        if self.replay is None:
            return []
        self.replay.ended = self.replay.cut = True
        return self._advance(now)

    def _take_in(self, message: Message) -> None:
        """Hold a batch that is the publisher's own by its answer; its time is one of this life, earlier or not."""
        held = self._held.get(message.seq)
        own = held if held is not None and held.payload == message.payload else message
        self._held[message.seq] = replace(own, sure=True)
        self._stale_run = 0
        if not _is_timed(message):
            return
        self._floor = min(self._floor, _ts(message))
        newest = self._newest
        if newest is None or message.seq >= newest[0] or self._wrapped(message.seq, newest[0]):
            self._newest = (message.seq, _ts(message))

    def tick(self, now: float) -> list[Record]:
        """Let time pass: deadlines of a replay or of a gap; return the records that are due."""
        records = self._advance(now)
        if self._gaps and self.replay is None and not self._held:
            # What seemed to follow them was dropped, so nothing tells that they were ever published.
            self._gaps.clear()
            self._raise_doubt()
        if self.replay is None and (
            self._ask_again or (self._again_at is not None and now >= self._again_at)
        ):
            # The one that was left unanswered is asked once; what comes meanwhile has waited for it before.
            attempt = 1 if self._ask_again else self.replay_attempts
            self._ask_again, self._again_at = False, None
            self.probe(now, verify=True, attempt=attempt)
        elif self.replay is None and self._follow_up:
            self._follow_up = False
            self.probe(now)
        return records

    def probe(self, now: float, *, verify: bool = False, attempt: int = 1) -> None:
        """Ask for what follows the last delivered batch, in case that the newest messages were missed.

        `verify`: after a new connection, behind which there may be a new life: what comes meanwhile waits for it, and
        a replay under way, which may be of the life before, is asked anew.
        """
        if self.expected is None or not self.can_replay:
            return
        if self.replay is None and not self._held:
            self._ask(self.expected, now, probe=True, attempt=attempt, verify=verify)
        elif self.replay is not None and verify:
            # What the answer under way brought is the publisher's own only if the next one has it, too.
            self._held = {
                seq: replace(held, sure=False) if held.sure else held
                for seq, held in self._held.items()
                if not held.replayed
            }
            last = (self._last_seq, self._last_ts) if self._last_seq is not None else None
            timed = [(seq, _ts(held)) for seq, held in self._held.items() if _is_timed(held)]
            self._newest = max(timed, default=last, key=lambda one: one[0])
            former = self.replay
            again = self._repeat(former, now, 1)
            again.verify = True
            again.until = former.until  # connections that keep breaking must not hold up everything for ever

    def follow_up(self, now: float) -> None:
        """Ask for what follows, now or when the replay under way is over; what comes meanwhile need not wait."""
        if self.replay is None:
            self.probe(now)
        else:
            self._follow_up = True

    @property
    def next_deadline(self) -> float | None:
        """When `tick` has to be called at the latest."""
        deadlines = [self.replay.deadline] if self.replay else []
        if self._hold_until is not None:
            deadlines.append(self._hold_until)
        if self._again_at is not None and self.replay is None:
            deadlines.append(self._again_at)
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
        if message.batch is None or not _is_timed(message):
            return "fits"
        if message.batch.ts < self._floor:
            return "old"
        if self._newest is None:
            return "fits"
        seq, ts = self._newest
        if message.seq > seq or self._wrapped(message.seq, seq):
            return "old" if message.batch.ts < ts else "fits"
        return "new" if message.batch.ts > ts else "fits"

    @staticmethod
    def _wrapped(seq: int, before: int) -> bool:
        return seq < 1 << 32 and before > END_SEQ - (1 << 32)

    def _is_plain_next(self, message: Message) -> bool:
        """Return whether the message is simply the next: its clock was set back, then, if nobody can be asked."""
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
        if known is not None and self.can_replay and message.batch is not None and known[1] < _ts(message):
            return self._begin_anew(message, now)  # one number, two contents: a life began unseen
        return self._stale(message, now)

    @property
    def _answers(self) -> bool:
        """Whether the publisher can be asked, and did not leave the last question open."""
        return self.can_replay and not self._unconfirmed

    def _stale(self, message: Message, now: float) -> list[Record]:
        self._stale_run += 1
        if self._stale_run > _STALE_RUN and not (self._answers and (self._keeps or self.replay is not None)):
            return self._new_life(message, now)
        if self._stale_run > 1 or not self.can_replay:
            self._raise_doubt()
        elif self.replay is not None and self._delivered:
            self.probe(now, verify=True)
            self._doubt = self.asked
        else:
            self._suspect(message, now)
            self._doubt = self.asked
        return [Stale(self.endpoint, self.rank, message.seq)]

    def _raise_doubt(self) -> None:
        """Have the publisher asked once the replay under way, which may be of the life before, is over."""
        if self.can_replay:
            self._ask_again, self._doubt = True, self.asked + 1

    def _suspect(self, message: Message, now: float) -> None:
        """Ask whether a batch that seems old is the publisher's own; what comes meanwhile waits for the answer."""
        assert self.expected is not None
        behind = self._is_behind(message.seq)
        replay = self._ask(self.expected, now, overlap=not behind, probe=True, verify=True)
        if message.batch is not None:
            replay.suspect = (message.seq, _fingerprint(message.payload))
        if behind:
            replay.start = message.seq

    def _settle(self, replay: Replay) -> list[Record]:
        """Confirm the life that is followed, if a replay asked since the doubt was answered whole, and out of it."""
        if self._doubt is None or self.asked < self._doubt or not replay.whole:
            return []
        if not replay.joined or (replay.seen < 0 and not (self.expected == 0 and self._keeps)):
            return []
        if self._gaps:
            self._ask_again = True  # when they are recovered or lost
            return []
        return self._confirm()

    def _confirm(self) -> list[Record]:
        self._certain()
        return [Confirmed(self.endpoint, self.rank, self._last_seq)]

    def _certain(self) -> None:
        """Forget all doubts about the life that is followed."""
        self._stale_run, self._doubt, self._again_at, self._unconfirmed = 0, None, None, False
        self._again_s = 0.0

    def _stay_unsure(self, now: float) -> list[Record]:
        """Go on though the publisher did not say in which life it is; it is asked again later."""
        self._doubt = self.asked + 1
        self._again_s = min(_LONGEST_PAUSE_S, max(2 * self._again_s, _LONGEST_REPLAY * self.replay_timeout))
        self._again_at = now + self._again_s
        return self._say_unconfirmed()

    def _say_unconfirmed(self) -> list[Record]:
        said, self._unconfirmed = self._unconfirmed, True
        return [] if said else [Unconfirmed(self.endpoint, self.rank)]

    def _drop_strangers(self, replay: Replay, now: float) -> list[Record]:
        """Drop what was held when the publisher was asked, and is above all that it has: it is of another life."""
        strangers = [seq for seq in sorted(self._held) if replay.seen < seq <= replay.held]
        for seq in strangers:
            del self._held[seq]
        records: list[Record] = [Stale(self.endpoint, self.rank, seq) for seq in strangers]
        if self._held:
            return records + self._advance(now)
        self._gaps.clear()  # what was missing before the strangers was never published
        open_since = self._doubt is not None and self.asked < self._doubt
        return records if open_since else records + self._confirm()

    def _new_life(self, message: Message, now: float) -> list[Record]:
        records = self._restart(message)
        self._held[message.seq] = message
        return records + self._advance(now)

    def _restart(self, shown: Message) -> list[Record]:
        """Forget the former life; `shown` is the message of the new one."""
        records = self._flush()
        last, self._last_seq, self._last_ts = self._last_seq, None, float("-inf")
        self._gaps.clear()
        self._held.clear()
        self._delivered.clear()
        self.replay = None
        self._hold_until = None
        self._certain()
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
        if self._held and self.replay is not None and (self.replay.verify or not self._delivered):
            records += self._say_unconfirmed()  # what waited for an answer may be of several lives
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
        whole = self._ask(0, now, overlap=False, probe=True, verify=replay.verify)
        whole.wanted = self.expected

    def _begin_empty(self, replay: Replay, now: float) -> list[Record]:
        """Start a new life of which nothing was seen; what it has published is asked for."""
        later = {seq: message for seq, message in self._held.items() if seq > replay.held}
        for seq in later:
            del self._held[seq]
        records = self._flush()
        self._held.update(later)
        last, self._last_seq, self._last_ts = self._last_seq, None, float("-inf")
        self._gaps.clear()
        self._delivered.clear()
        former = self._floor if self._newest is None else max(self._floor, self._newest[1])
        # Stragglers of the life before are no later than its latest message.
        self._newest, self._floor, self._former_until = None, math.nextafter(former, math.inf), _FORMER_LIFE
        self._certain()
        self.expected = 0
        self._ask(0, now, overlap=False)
        return [*records, Restart(self.endpoint, self.rank, last)]

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
        self,
        wanted: int,
        now: float,
        *,
        overlap: bool = True,
        attempt: int = 1,
        probe: bool = False,
        verify: bool = False,
    ) -> Replay:
        start = wanted
        if overlap and self._last_seq is not None and self._last_seq < wanted:
            start = self._last_seq + 1  # what was lost in between says nothing about the life
        least = start - _OVERLAP
        while overlap and start > least and start - 1 in self._delivered:
            start -= 1
        until = now + _LONGEST_REPLAY * self.replay_timeout
        replay = Replay(start, wanted, now + self.replay_timeout, until, attempt, probe, verify)
        replay.joined = not self._delivered
        replay.held = max(self._held, default=-1)
        self.replay = replay
        self.asked += 1
        return replay

    def _repeat(self, replay: Replay, now: float, attempt: int) -> Replay:
        """Ask the same again."""
        assert self.expected is not None
        again = self._ask(
            self.expected, now, overlap=False, attempt=attempt, probe=replay.probe, verify=replay.verify
        )
        again.start = min(replay.start, self.expected)
        again.suspect = replay.suspect
        return again

    def _advance(self, now: float) -> list[Record]:
        if self.expected is None:
            return []
        replay = self.replay
        if replay is None:
            records = list(self._deliver())
            return records + self._missing(now) if self._held else records
        timed_out = now >= replay.deadline and not replay.ended
        if replay.ended or timed_out:
            return self._finish_replay(now, timed_out=timed_out)
        if len(self._held) <= self.max_held:
            return []
        records = list(self._deliver())
        return (
            records + self._finish_replay(now, timed_out=False)
            if len(self._held) > self.max_held
            else records
        )

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

    def _is_below(self, replay: Replay, needed: int) -> bool:
        """Return whether an answer ends below a number that the publisher must have: it is of another life, or was cut.

        A publisher keeps its newest batches, so it has what was delivered or held before it was asked, or newer ones.
        """
        return replay.whole and 0 <= replay.seen < needed and not self._wrapped(replay.seen, needed)

    def _finish_replay(self, now: float, *, timed_out: bool) -> list[Record]:
        replay = self.replay
        assert replay is not None
        assert self.expected is not None
        self.replay = None
        unsure = replay.verify and not replay.whole
        behind = replay.start < replay.wanted and self._is_below(replay, replay.wanted - 1)
        # It has nothing of what it sent last.
        empty = replay.whole and replay.seen < 0 and replay.start < replay.wanted
        if empty and self._keeps and not self._held:
            return self._begin_empty(replay, now)
        short = self._is_below(replay, replay.held)
        cannot_follow = short and not replay.joined and following(replay.seen) not in self._held
        behind |= (empty and self._keeps) or cannot_follow
        if unsure or behind:
            if replay.attempt < self.replay_attempts and len(self._held) <= self.max_held:
                self._repeat(replay, now, replay.attempt + 1)
                return []
            if behind:
                return self._begin_empty(replay, now)
        records = self._stay_unsure(now) if unsure else []
        if replay.joined and replay.whole and replay.lowest is not None:
            # What the answer passed over is of another life, or its reply was dropped: it is a hole.
            for seq in [seq for seq in self._held if replay.lowest < seq < replay.seen]:
                if not self._held[seq].sure:
                    del self._held[seq]
        if not self._delivered and replay.whole and len(self._held) <= self.max_held:
            # Nothing that was delivered tells yet that what came live is of the life that answered.
            records += self._deliver(sure=True)
            if self._delivered and self.expected in self._held:
                self._ask(self.expected, now, probe=True, verify=True)
                return records
        delivered = list(self._deliver())
        if short and self.expected > following(replay.seen):
            # What was held fills up the answer, which should have had it.
            records += self._say_unconfirmed()
            self._raise_doubt()
        records += delivered
        records += self._settle(replay)
        overflow = len(self._held) > self.max_held
        if not self._held:
            if empty and replay.start > 0:
                self._look_back(replay, now)
            return records
        if self.expected in self._held:
            return records
        hole_end = self._hole_end()
        # The buffer is contiguous: a hole above the lowest number returned was dropped on its way, and what lies above
        # the highest was published after the answer. Both are worth another attempt; what lies below was evicted.
        # An empty answer may be older than what came since it was asked for, and than what lies before that.
        newer = replay.lowest is None and hole_end + 1 > replay.held
        evicted = not timed_out and not replay.cut and not newer
        evicted = evicted and (replay.lowest is None or self.expected < replay.lowest)
        if short or (replay.highest is not None and self.expected > replay.highest and not timed_out):
            evicted = False
        if not evicted and not overflow and replay.attempt < self.replay_attempts:
            self._note_gap(records, hole_end)
            # One that brought something was no failure; a long replay over a bad line takes as many as it needs.
            attempt = replay.attempt + 1 if self.expected == replay.wanted else 1
            self._ask(self.expected, now, attempt=attempt)
            return records
        if short and replay.joined and not overflow:
            return records + self._drop_strangers(replay, now)
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

    def _deliver(self, *, sure: bool = False) -> Iterator[Record]:
        """Deliver held messages that are next in order, and say what of a gap they recovered.

        `sure`: up to the first that is not known to be the publisher's own.
        """
        assert self.expected is not None
        while self.expected in self._held and (not sure or self._held[self.expected].sure):
            message = self._held.pop(self.expected)
            if not message.sure and self._is_earlier(message):
                # It came while its place was empty, but is older than the batch before it: of a former life.
                self._raise_doubt()
                yield from self._recovered_part()
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
        yield from self._recovered_part()

    def _recovered_part(self) -> Iterator[Record]:
        """Say what was recovered of a gap of which more is missing."""
        assert self.expected is not None
        if self._gaps and self._gaps[0][0] < self.expected <= self._gaps[0][1]:
            first, last = self._gaps[0]
            self._gaps[0] = (self.expected, last)
            yield Recovered(self.endpoint, self.rank, first, self.expected - 1)

    def _is_earlier(self, message: Message) -> bool:
        """Return whether a batch has an earlier time than what was delivered, where that shows another life."""
        if self._answers:
            return not message.replayed and _is_timed(message) and _ts(message) < self._last_ts
        return self._former_until is not None and _ts(message) < self._floor

    def _record(self, message: Message) -> Record:
        if _is_timed(message):
            self._last_ts = _ts(message)
        self._delivered[message.seq] = (_fingerprint(message.payload), _ts(message))
        if self._former_until is not None and _is_timed(message):
            self._floor = _ts(message) if message.sure else max(self._floor, _ts(message))
        if self._former_until is not None and message.seq > self._former_until:
            self._former_until = None
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
