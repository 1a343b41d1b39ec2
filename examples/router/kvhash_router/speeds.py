"""How fast each engine is, measured from the requests it answers: what it has to do must not look like speed.

Seconds are fitted over work, by one slope within all engines. An engine's slowness is what its requests took over what
that line says of their work. Its raw work over time would not do: an answer takes some time however little work it is,
so the busiest engine would look fastest and get still more. All sums fade (half is gone after `half_life_s`). A little
of the fleet's median is added to each engine: one that is new, or has had no request for long, counts as a median one
and so gets requests, and with them is measured again.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Kind", "SpeedBook"]

#: What was timed: until a stream's first token, or a whole answer; they are never compared with each other.
Kind = Literal["first", "whole"]

#: Tokens a second where nothing is measured yet. Only ratios matter to a decision between engines.
_GUESS = 10_000.0
#: Fewer faded requests than this are none.
_LEAST = 1e-6


@dataclass(slots=True)
class _Sums:
    """Fading sums over requests: their number, work, seconds, and the products that a line is fitted from."""

    count: float = 0.0
    work: float = 0.0
    seconds: float = 0.0
    work_work: float = 0.0
    work_seconds: float = 0.0
    at: float = 0.0

    def fade(self, now: float, half_life_s: float) -> None:
        if now > self.at:
            kept = 0.5 ** ((now - self.at) / half_life_s)
            self.count *= kept
            self.work *= kept
            self.seconds *= kept
            self.work_work *= kept
            self.work_seconds *= kept
            self.at = now

    def add(self, other: _Sums) -> None:
        self.count += other.count
        self.work += other.work
        self.seconds += other.seconds
        self.work_work += other.work_work
        self.work_seconds += other.work_seconds

    @property
    def spread(self) -> float:
        """How far the work of requests differs, squared and summed."""
        return max(0.0, self.work_work - self.work * self.work / self.count)

    @property
    def covariance(self) -> float:
        """How far seconds go with work, summed."""
        return self.work_seconds - self.work * self.seconds / self.count


def _line(measured: Collection[_Sums]) -> tuple[float, float]:
    """Return the fitted seconds of no work and seconds a token, neither below 0, not both 0."""
    spread = sum(sums.spread for sums in measured)
    work = sum(sums.work for sums in measured)
    slope = 0.0
    if spread > 1e-6 * sum(sums.work_work for sums in measured):
        slope = max(0.0, sum(sums.covariance for sums in measured) / spread)
    start = statistics.median((sums.seconds - slope * sums.work) / sums.count for sums in measured)
    return (start, slope) if start > 0 else (0.0, sum(sums.seconds for sums in measured) / work)


@dataclass(slots=True)
class SpeedBook:
    """Measured speeds by engine. ``prior_requests``: how many median requests every engine begins with."""

    half_life_s: float = 30.0
    prior_requests: float = 2.0
    _sums: dict[tuple[str, Kind], _Sums] = field(default_factory=dict)

    def observe(self, engine: str, kind: Kind, *, work: float, seconds: float, now: float) -> None:
        """Add one request: `work` tokens were done within `seconds` from when it was sent."""
        if work <= 0 or seconds <= 0:
            return
        sums = self._sums.setdefault((engine, kind), _Sums(at=now))
        sums.fade(now, self.half_life_s)
        sums.add(_Sums(1.0, work, seconds, work * work, work * seconds))

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
        by_kind = {kind: self._of(names, kind) for kind in kinds}
        measured = max(by_kind.values(), key=lambda each: sum(sums.count for sums in each.values()))
        if not measured:
            return dict.fromkeys(names, _GUESS)
        start, slope = _line(measured.values())
        expected = {name: start * sums.count + slope * sums.work for name, sums in measured.items()}
        median = statistics.median(measured[name].seconds / expected[name] for name in measured)
        speed = statistics.median(sums.work / sums.seconds for sums in measured.values())
        usual = statistics.median(sums.work / sums.count for sums in measured.values())
        prior = self.prior_requests * (start + slope * usual)
        return {
            name: speed
            * median
            * (expected.get(name, 0.0) + prior)
            / ((measured[name].seconds if name in measured else 0.0) + prior * median)
            for name in names
        }

    def _of(self, names: Iterable[str], kind: Kind) -> dict[str, _Sums]:
        found = {name: self._sums.get((name, kind)) for name in names}
        return {name: sums for name, sums in found.items() if sums is not None and sums.count > _LEAST}
