"""Says which question each line of a program answers, and what is wrong with the order of the answers.

Answers are found by their id wherever they stand, so one that is lost costs one case and not all that follow.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Answer", "Matcher", "ProgramFault", "Question"]

_SHOWN = 80


@dataclass(frozen=True)
class Question:
    """One line to send. ``loose``: its answer may carry null as id, since the line itself may be unreadable."""

    id: str
    line: bytes
    loose: bool = False


@dataclass(frozen=True)
class Answer:
    """What came for a question: the answer's object without ``id``."""

    id: str
    body: dict[str, Any]


@dataclass(frozen=True)
class ProgramFault:
    """What the program did wrong; ``id``: the question that it is about, where there is one.

    ``kind``: ``hang``, ``crash``, ``missing-answer``, ``out-of-order``, ``duplicate-answer``, ``extra-answer``,
    ``rubbish`` or ``flood``. After ``hang``, ``crash`` and ``flood`` nothing more comes.
    """

    kind: str
    message: str
    id: str | None = None


class Matcher:
    """Takes the lines of a program one by one and knows which questions are open."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self._questions = questions
        self._places = {question.id: i for i, question in enumerate(questions)}
        #: The places of the questions in the order of their answers.
        self._arrived: list[int] = []
        self._answered: set[int] = set()
        self._expected = 0
        self._behind = 0

    @property
    def next(self) -> str | None:
        """The first question behind all that were answered: what the program was at when nothing more came."""
        return self._questions[self._behind].id if self._behind < len(self._questions) else None

    def match(self, line: bytes) -> Answer | ProgramFault:
        """Return what a line is."""
        shown = line[:_SHOWN].decode("utf-8", "replace").strip()
        try:
            body = _strict_json(line)
        except (ValueError, RecursionError) as error:
            return ProgramFault("rubbish", f"a line that is no JSON{_why(error)}: {shown!r}", self.next)
        if not isinstance(body, dict) or "id" not in body:
            return ProgramFault(
                "rubbish", f"a line that is no answer (an object with an id): {shown!r}", self.next
            )
        identity = body.pop("id")
        place = self._place(identity)
        if place is None:
            if len(self._answered) == len(self._questions):
                return ProgramFault("extra-answer", f"an answer after the last question: {shown!r}")
            return ProgramFault("rubbish", f"an answer to no question: id {str(identity)[:60]!r}", self.next)
        if place in self._answered:
            return ProgramFault("duplicate-answer", f"answered again: {shown!r}", self._questions[place].id)
        self._answered.add(place)
        self._arrived.append(place)
        self._expected = place + 1
        self._behind = max(self._behind, place + 1)
        return Answer(self._questions[place].id, body)

    def _place(self, identity: Any) -> int | None:
        if identity is not None:
            return self._places.get(identity) if isinstance(identity, str) else None
        # Without an id it is the answer to the next line that may have none, also where one answer was lost.
        for place in (self._expected, self._expected + 1):
            if place < len(self._questions) and self._questions[place].loose and place not in self._answered:
                return place
        return None

    def missing(self) -> Iterator[ProgramFault]:
        """Yield the questions before the last that was answered which have no answer."""
        for place in range(self._behind):
            if place not in self._answered:
                identity = self._questions[place].id
                yield ProgramFault("missing-answer", "no answer, though later ones were answered", identity)

    def order_faults(self) -> Iterator[ProgramFault]:
        """Yield the fewest answers of which it must be said that they came out of order."""
        kept = _longest_increasing(self._arrived)
        for i, place in enumerate(self._arrived):
            if i not in kept:
                where = f"after that of {self._questions[self._arrived[i - 1]].id}" if i else "first"
                yield ProgramFault(
                    "out-of-order", f"its answer came out of order, {where}", self._questions[place].id
                )


def _longest_increasing(places: Sequence[int]) -> set[int]:
    """Return the positions of a longest increasing run of values, not necessarily side by side."""
    ends: list[int] = []  # by length, the smallest last value of a run; and where it stands
    positions: list[int] = []
    before: list[int] = []
    for i, place in enumerate(places):
        length = bisect_left(ends, place)
        before.append(positions[length - 1] if length else -1)
        if length == len(ends):
            ends.append(place)
            positions.append(i)
        else:
            ends[length], positions[length] = place, i
    kept: set[int] = set()
    at = positions[-1] if positions else -1
    while at >= 0:
        kept.add(at)
        at = before[at]
    return kept


class _DoubledField(ValueError):
    """A field stands twice in an object."""


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        # Each name that is kept is taken off once; what is left stands twice.
        left = Counter(name for name, _ in pairs) - Counter(fields.keys())
        raise _DoubledField(next(iter(left)))
    return fields


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _strict_json(line: bytes) -> Any:
    # json.loads would take bytes in UTF-16 and with a byte order mark too; a line is UTF-8.
    return json.loads(line.decode("utf-8"), object_pairs_hook=_fields, parse_constant=_no_constant)


def _why(error: Exception) -> str:
    if isinstance(error, _DoubledField):
        return f" (the field {str(error)[:60]!r} stands twice)"
    if isinstance(error, UnicodeDecodeError):
        return " (it is not UTF-8)"
    if "BOM" in str(error):
        return " (it begins with a byte order mark)"
    return ""
