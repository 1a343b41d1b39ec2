"""What the corpus covers: each change of the contract from both sides, each flag, each algorithm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kvhash.contract import ALGORITHMS, CHANGES, Change, Release

from .load import REQUEST_KINDS, Corpus, applies

__all__ = ["RowCoverage", "algorithms", "flags", "gaps", "rows"]


@dataclass(frozen=True)
class RowCoverage:
    """One row of the contract's table: how many vectors hold up to it, and how many from it on."""

    change: Change
    before: int
    after: int

    @property
    def complete(self) -> bool:
        """Whether there are vectors on both sides (the oldest row has only one)."""
        return self.after > 0 and (self.before > 0 or self.change is CHANGES[0])


def rows(corpus: Corpus) -> Iterator[RowCoverage]:
    """Yield for each change the vectors that end at it and those that begin with it.

    Where only events or only replay changed, recorded batches of the releases on both sides count.
    """
    for change in CHANGES:
        kinds = REQUEST_KINDS if change.hashes or change is CHANGES[0] else ("events", "streams")
        chosen = [vector for file, vector in corpus if file.kind in kinds]
        before = sum(vector["until"] == str(change.since) for vector in chosen)
        after = sum(vector["since"] == str(change.since) for vector in chosen)
        if not change.hashes and change is not CHANGES[0]:
            # A release line is recorded at one of its patch releases; the next change ends its range.
            later = [
                c.since for c in CHANGES if c.since > change.since and (c.events or c.stored or c.removed)
            ]
            end = later[0] if later else None
            after = sum(
                Release.parse(vector["since"]) >= change.since
                and (end is None or Release.parse(vector["since"]) < end)
                for vector in chosen
            )
        yield RowCoverage(change, before, after)


def flags(corpus: Corpus) -> Counter[str]:
    """Return how many vectors have each flag; a flag that is explained and has none counts 0."""
    found: Counter[str] = Counter()
    for file in corpus.files:
        found.update(dict.fromkeys(file.notes, 0))
        for vector in file.vectors:
            found.update(vector["flags"])
    return found


def algorithms(corpus: Corpus) -> Counter[str]:
    """Return how many request vectors ask each algorithm."""
    found: Counter[str] = Counter(dict.fromkeys(ALGORITHMS, 0))
    for file, vector in corpus:
        if file.kind in REQUEST_KINDS and vector["result"] != "invalid":
            name = vector["input"].get("request", {}).get("algorithm")
            found[name if isinstance(name, str) else "(in the line)"] += 1
    return found


def gaps(corpus: Corpus) -> list[str]:
    """Return what is not covered, in words; empty when all is."""
    found = [
        f"vLLM {row.change.since} ({row.change.summary}): {row.before} vectors before it, {row.after} from it on"
        for row in rows(corpus)
        if not row.complete
    ]
    for file in corpus.files:
        used = {flag for vector in file.vectors for flag in vector["flags"]}
        found += [
            f"{file.kind}: flag {flag!r} is explained and not used" for flag in sorted(set(file.notes) - used)
        ]
        found += [f"{file.kind}: flag {flag!r} is not explained" for flag in sorted(used - set(file.notes))]
    found += [
        f"no valid vector of algorithm {name}" for name, count in algorithms(corpus).items() if not count
    ]
    return found


def holding_at(corpus: Corpus, release: str) -> int:
    """Return how many vectors hold at a release."""
    return sum(applies(vector, release) for _, vector in corpus)
