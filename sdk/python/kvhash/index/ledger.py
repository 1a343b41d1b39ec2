"""What is known of one rank's stream: which numbers were applied, what is missing, and since when."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from kvhash.events.message import following

from .types import Knowledge, State

__all__ = ["REASONS", "Ledger"]

#: Why a rank's knowledge is not EXACT.
REASONS: Mapping[str, str] = {
    "cleared-below": "the cache was cleared; what the tiers below the device still hold is not known",
    "collision": "two blocks of the rank have hashes with the same low 64 bits",
    "evicted": "the index dropped blocks of this rank to stay within its bound",
    "gap": "batches are missing, and a replay may still bring them",
    "hash-mismatch": "published hashes are not what the hash settings give",
    "hash-unverified": "none of the published hashes could be confirmed under the hash settings",
    "joined-late": "the stream was joined after its beginning; what was stored before is not known",
    "lost": "batches were lost for good",
    "never-heard": "no batch of the engine has been applied",
    "other-life": "a batch was applied that may be of another life than the one held, as replicas tell of several",
    "refused": "what the engine published is beyond what an index takes: ranks, groups, or tokens of a block",
    "restored": "restored from a snapshot; the stream has not shown that it is the same life",
    "reuse-reported": "stores may be reports of reuse, so copies cannot be counted",
    "stale": "a batch came that has no place in the stream: of a former life, or of one that has not shown itself",
    "store-unreachable": "the shared store does not answer",
    "unconfirmed": "the publisher may be in another life than the one followed, and has not said so",
    "undecodable": "a batch, or an event in one, could not be read",
    "unknown-event": "an event of a kind that is not known was passed over",
}


class Ledger:
    """The bookkeeping of one rank. Numbers are the batches' sequence numbers."""

    def __init__(self) -> None:
        #: Number and engine's time of the last batch; None before the first.
        self.last_seq: int | None = None
        self.last_ts: float | None = None
        #: The latest time of this life; later than the last one's where the engine's clock was set back.
        self.peak_ts: float | None = None
        self.faults: dict[str, float] = {}
        self.missing: list[tuple[int, int, float]] = []
        self.heard = False
        self._expected: int | None = None

    @property
    def next_seq(self) -> int:
        """The number that a batch has which follows what was applied or lost."""
        return self._expected or 0

    # --- what the stream says ---------------------------------------------------------------------------------

    def accept(self, seq: int, ts: float, now: float) -> Literal["next", "again", "new-life"]:
        """Place a batch: to be applied, a repetition, or the first that is seen of a new life.

        A number that is not above the last is of a new life if its time is later than every one of this life, and a
        repetition if not. A number that is skipped without a word is a loss.
        """
        if self.last_seq is not None and seq <= self.last_seq and seq != self._expected:
            if self.last_ts is not None and self.peak_ts is not None and ts > self.peak_ts:
                return "new-life"
            if seq == self.last_seq and ts == self.last_ts:
                for reason in ("other-life", "restored", "stale"):
                    self.faults.pop(reason, None)
            return "again"
        if self._expected is None and seq != 0:
            self.fault("joined-late", now)
        elif self._expected is not None and seq != self._expected:
            self.fault("lost", now)
        # Batches come in order: what is missing below this one was delivered, or is the loss just noted.
        self.recovered(0, seq)
        self.applied(seq, ts)
        return "next"

    def applied(self, seq: int, ts: float) -> None:
        """Note the last batch that was taken in."""
        self.heard = True
        self.last_seq, self.last_ts = seq, ts
        self._see(ts)
        self._expected = following(seq)
        self.faults.pop("stale", None)

    def _see(self, ts: float) -> None:
        if math.isfinite(ts) and (self.peak_ts is None or ts > self.peak_ts):
            self.peak_ts = ts

    def unnumbered(self, ts: float) -> None:
        """Note a batch whose number is not known: the caller vouches for the order."""
        self.heard = True
        self.last_ts = ts
        self._see(ts)

    def gap(self, first: int, last: int, now: float) -> None:
        """Note missing batches."""
        self.heard = True
        self.missing.append((first, last, now))

    def recovered(self, first: int, last: int) -> None:
        """Note that missing batches were delivered."""
        left: list[tuple[int, int, float]] = []
        for low, high, since in self.missing:
            if low < first:
                left.append((low, min(high, first - 1), since))
            if high > last:
                left.append((max(low, last + 1), high, since))
        self.missing = left

    def lost(self, first: int, last: int, now: float) -> None:
        """Note that missing batches will not come."""
        since = min((at for low, high, at in self.missing if low <= last and first <= high), default=now)
        self.recovered(first, last)
        self.fault("lost", since)
        self._expected = following(last)

    def unreadable(self, seq: int | None, now: float) -> None:
        """Note a batch that could not be read."""
        self.heard = True
        self.fault("undecodable", now)
        if seq is not None:
            self.last_seq, self.last_ts = seq, None
            self._expected = following(seq)

    def stale(self, now: float) -> None:
        """Note a batch that was not delivered: until one is, it may be of a new life as well as of a former one."""
        if self.heard:
            self.fault("stale", now)

    def confirmed(self) -> None:
        """Note that the publisher was asked and is in the life that is followed; what is still missing never was."""
        self.faults.pop("stale", None)
        self.faults.pop("unconfirmed", None)
        self.faults.pop("other-life", None)
        self.missing = []

    def fault(self, reason: str, now: float) -> None:
        """Note a fault, where it is not known yet."""
        self.faults.setdefault(reason, now)

    def cleared(self) -> None:
        """Heal what a clear heals: everything that is about blocks stored before it."""
        about_hashes = {name: since for name, since in self.faults.items() if name.startswith("hash-")}
        self.faults.clear()
        self.faults.update(about_hashes)

    def restarted(self) -> None:
        """Begin a new life: number 0 is next, and nothing is wrong."""
        self.__init__()  # type: ignore[misc]
        self.heard = True
        self._expected = 0

    # --- what follows -----------------------------------------------------------------------------------------

    def knowledge(self) -> Knowledge:
        """Return the rank's state."""
        if not self.heard:
            return Knowledge(State.UNKNOWN, None, ("never-heard",))
        reasons = sorted(self.faults)
        times = list(self.faults.values())
        if self.missing:
            reasons = sorted([*reasons, "gap"])
            times += [since for _, _, since in self.missing]
        state = State.DEGRADED if reasons else State.EXACT
        if any(reason.startswith("hash-") for reason in self.faults):
            state = State.UNKNOWN
        return Knowledge(state, min(times, default=None), tuple(reasons), self.last_ts)

    # --- keeping ----------------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """Return the ledger as plain values."""
        return {
            "seq": self.last_seq,
            "ts": self.last_ts,
            "peak": self.peak_ts,
            "expected": self._expected,
            "faults": self.faults,
            "missing": self.missing,
            "heard": self.heard,
        }

    @classmethod
    def restore(cls, values: Mapping[str, Any]) -> Ledger:
        """Return a ledger from what `dump` gave."""
        ledger = cls()
        ledger.last_seq, ledger.last_ts, ledger.peak_ts = values["seq"], values["ts"], values["peak"]
        ledger._expected = values["expected"]
        ledger.faults = dict(values["faults"])
        ledger.missing = [(first, last, since) for first, last, since in values["missing"]]
        ledger.heard = values["heard"]
        return ledger
