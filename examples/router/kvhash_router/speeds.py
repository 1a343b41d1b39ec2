"""How fast each engine is, measured from the requests it answers: tokens of work a second.

Work over time, both as sums that fade (half is gone after `half_life_s`), so large requests weigh more and an old
measurement less. To both sums a little of the fleet's median is added: an engine that is new, or that has had no
request for long, counts as a median one and so gets requests, and with them is measured again.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Kind", "SpeedBook"]

#: What was timed: until a stream's first token, or a whole answer; they are never compared with each other.
Kind = Literal["first", "whole"]

#: Tokens a second where nothing is measured yet. Only ratios matter to a decision between engines.
_GUESS = 10_000.0


@dataclass(slots=True)
class _Sums:
    work: float = 0.0
    seconds: float = 0.0
    at: float = 0.0

    def fade(self, now: float, half_life_s: float) -> None:
        if now > self.at:
            kept = 0.5 ** ((now - self.at) / half_life_s)
            self.work *= kept
            self.seconds *= kept
            self.at = now


@dataclass(slots=True)
class SpeedBook:
    """Measured speeds by engine. ``prior_tokens``: how much work at the median speed every engine begins with."""

    half_life_s: float = 30.0
    prior_tokens: float = 256.0
    _sums: dict[tuple[str, Kind], _Sums] = field(default_factory=dict)

    def observe(self, engine: str, kind: Kind, *, work: float, seconds: float, now: float) -> None:
        """Add one request: `work` tokens were done within `seconds` from when it was sent."""
        if work <= 0 or seconds <= 0:
            return
        sums = self._sums.setdefault((engine, kind), _Sums(at=now))
        sums.fade(now, self.half_life_s)
        sums.work += work
        sums.seconds += seconds

    def forget(self, engine: str) -> None:
        """Drop what was measured of an engine."""
        for key in [key for key in self._sums if key[0] == engine]:
            del self._sums[key]

    def speeds(self, engines: Iterable[str], *, now: float) -> dict[str, float]:
        """Return tokens a second for each of `engines`, all by the kind of which there is most."""
        names = list(engines)
        for sums in self._sums.values():
            sums.fade(now, self.half_life_s)
        kinds: tuple[Kind, ...] = ("first", "whole")
        totals = {kind: sum(self._work(name, kind) for name in names) for kind in kinds}
        kind = max(kinds, key=lambda one: totals[one])
        measured = [
            sums.work / sums.seconds
            for name in names
            if (sums := self._sums.get((name, kind), _Sums())).seconds > 0
        ]
        median = statistics.median(measured) if measured else _GUESS
        return {name: self._speed(name, kind, median) for name in names}

    def _work(self, engine: str, kind: Kind) -> float:
        sums = self._sums.get((engine, kind))
        return 0.0 if sums is None else sums.work

    def _speed(self, engine: str, kind: Kind, median: float) -> float:
        sums = self._sums.get((engine, kind)) or _Sums()
        return (sums.work + self.prior_tokens) / (sums.seconds + self.prior_tokens / median)
