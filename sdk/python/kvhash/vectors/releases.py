"""Which releases a vector is asked at: where the recipe changes, and the last real release before the next change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvhash.contract import CHANGES, NEWEST, OLDEST, Contract, Release

__all__ = ["NEWEST_TEXT", "OLDEST_TEXT", "Range", "hash_boundaries", "ranges", "since_of"]

OLDEST_TEXT = str(OLDEST)
NEWEST_TEXT = str(NEWEST)


def hash_boundaries() -> list[Release]:
    """Return the releases from which hashes differ from those before."""
    return [change.since for change in CHANGES if change.since == OLDEST or change.hashes]


def since_of(field: str, value: Any) -> str:
    """Return the first release whose contract has `value` in `field` (of its hashes or its events)."""
    for change in CHANGES:
        contract = Contract.for_vllm(change.since)
        where = contract if hasattr(contract, field) else contract.events
        if getattr(where, field) == value:
            return str(change.since)
    raise LookupError(f"no release has {field} = {value!r}")


class Range:
    """The releases from ``since`` up to, but without, ``until`` (None: no end yet) that give one answer."""

    def __init__(self, since: Release, until: Release | None, answer: Any) -> None:
        self.since, self.until, self.answer = since, until, answer

    def asked(self, real: Iterable[Release]) -> list[str]:
        """Return the releases to ask: the first, and the last real one before the next change."""
        inside = [r for r in real if self.since <= r and (self.until is None or r < self.until)]
        return [str(r) for r in sorted({self.since, *sorted(inside)[-1:]})]


def ranges(
    answer: Callable[[str], Any], first: Release = OLDEST, boundaries: Iterable[Release] | None = None
) -> list[Range]:
    """Return the ranges of releases over which `answer` (a function of the release) stays the same."""
    starts = sorted({first, *(r for r in (boundaries or hash_boundaries()) if r > first)})
    found: list[Range] = []
    for start in starts:
        value = answer(str(start))
        if found and found[-1].answer == value:
            continue
        if found:
            found[-1].until = start
        found.append(Range(start, None, value))
    return found
