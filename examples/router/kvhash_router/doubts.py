"""Whether what the index says of an engine comes true: the cached tokens that its answers report are the judge.

Events that are another engine's verify as well as its own do, so nothing else tells that two endpoints were swapped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Predictions"]

#: Answers with something predicted, before anything is said; and the share of it that should come true.
_ENOUGH = 20
_SHARE = 0.25
#: What is kept of the past at each answer.
_KEPT = 0.95


@dataclass(slots=True)
class _Sums:
    answers: int = 0
    predicted: float = 0.0
    reported: float = 0.0
    told: bool = False


@dataclass(slots=True)
class Predictions:
    """What was predicted and reported of each engine lately."""

    _sums: dict[str, _Sums] = field(default_factory=dict)

    def saw(self, engine: str, *, predicted: int, reported: int | None) -> str | None:
        """Take in an answer's cached tokens (None: not reported); returns what is to be said now, once in a row."""
        if predicted <= 0 or reported is None:
            return None
        sums = self._sums.setdefault(engine, _Sums())
        sums.answers += 1
        sums.predicted = _KEPT * sums.predicted + predicted
        sums.reported = _KEPT * sums.reported + min(reported, predicted)
        wrong = sums.answers >= _ENOUGH and sums.reported < _SHARE * sums.predicted
        said, sums.told = wrong and not sums.told, wrong
        if not said:
            return None
        share = sums.reported / sums.predicted
        return (
            f"engine {engine} reports {share:.0%} of the cached tokens that its events promise; "
            "are its endpoints of events another engine's?"
        )
