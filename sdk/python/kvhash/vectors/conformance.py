"""Checks any program that answers request lines and event lines against the corpus.

`run` asks and compares; `Report` says per capability what passed, the first layer where a failing answer differs,
and which known mistake explains it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kvhash.contract import ALGORITHMS

from .compare import Difference, compare
from .inputs import expand
from .load import REQUEST_KINDS, Corpus, CorpusError, applies
from .matching import Answer, ProgramFault, Question
from .mistakes import MISTAKES
from .program import Ended, exchange

__all__ = ["CAPABILITIES", "Case", "Outcome", "Report", "read_skips", "run", "select"]

_BY_FLAG = (
    ("mixture", "extra keys: mixtures"),
    ("prompt-embeds", "extra keys: prompt embeddings"),
    ("multimodal", "extra keys: multimodal"),
    ("lora", "extra keys: LoRA"),
    ("salt", "extra keys: cache salt"),
)
_BY_KIND = {
    "none_hash": "NONE_HASH",
    "chains": "chains",
    "lookahead": "look-ahead",
    "context_parallel": "context parallelism",
    "requests": "request lines",
    "recorded": "real servers",
    "events": "events",
}
#: The faults that say of a question that it has no answer.
_UNANSWERED = ("hang", "crash", "missing-answer")
#: What is reported on, in this order. A program may do without ``events`` (see `select`).
CAPABILITIES = (
    "NONE_HASH",
    "chains",
    "extra keys: cache salt",
    "extra keys: LoRA",
    "extra keys: multimodal",
    "extra keys: prompt embeddings",
    "extra keys: mixtures",
    "look-ahead",
    "context parallelism",
    "request lines",
    "real servers",
    "events",
)


@dataclass(frozen=True)
class Case:
    """One vector asked at one release."""

    id: str
    capability: str
    vector: Mapping[str, Any]
    question: Question


@dataclass(frozen=True)
class Outcome:
    """What became of a case. ``status``: ``passed``, ``failed``, ``skipped`` (with its reason) or ``not-run``."""

    case: Case
    status: str
    difference: Difference | None = None
    reason: str = ""


@dataclass
class Report:
    """What a program did with the corpus. ``not_asked``: kinds of vectors that are not known here, and their number.

    ``status``: the program's exit status, which decides nothing; None where it had to be ended or was not started.
    """

    command: str
    corpus_version: str
    outcomes: list[Outcome] = field(default_factory=list)
    faults: list[ProgramFault] = field(default_factory=list)
    not_asked: Mapping[str, int] = field(default_factory=dict)
    status: int | None = None

    @property
    def passed(self) -> bool:
        """Whether something was asked, and everything that was asked was answered rightly, in order."""
        statuses = {outcome.status for outcome in self.outcomes}
        return not self.faults and "passed" in statuses and statuses <= {"passed", "skipped"}

    def counts(self) -> dict[str, Counter[str]]:
        """Return for every capability how many cases have which status."""
        found: dict[str, Counter[str]] = {}
        for outcome in self.outcomes:
            found.setdefault(outcome.case.capability, Counter())[outcome.status] += 1
        return {name: found[name] for name in CAPABILITIES if name in found}

    def first_layer(self, capability: str) -> str | None:
        """Return the layer in which the first failing case of a capability differs."""
        for outcome in self.outcomes:
            if outcome.case.capability == capability and outcome.difference:
                return outcome.difference.layer
        return None

    def mistakes(self) -> list[tuple[str, int, int]]:
        """Return (mistake, failures that it explains, failures in which it was looked for), the best first."""
        explained: Counter[str] = Counter()
        looked_for: Counter[str] = Counter()
        for outcome in self.outcomes:
            if outcome.status == "failed" and outcome.difference:
                explained.update(outcome.difference.mistakes)
                looked_for.update(list(outcome.case.vector.get("wrong", {})))
        return sorted(
            ((name, count, max(count, looked_for[name])) for name, count in explained.items()),
            key=lambda item: (-item[1] / item[2], -item[1], item[0]),
        )


def _capability(kind: str, vector: Mapping[str, Any]) -> str:
    if kind in _BY_KIND:
        return _BY_KIND[kind]
    return next((name for flag, name in _BY_FLAG if flag in vector["flags"]), "extra keys: mixtures")


def _line(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _questions(kind: str, vector: Mapping[str, Any], release: str | None) -> Iterator[Question]:
    identity = vector["id"]
    if kind == "events":
        yield Question(identity, _line({"id": identity, "decode": vector["input"]["payload"]}))
        return
    if "line" in vector["input"]:
        text = vector["input"]["line"].replace("@id", identity)
        yield Question(identity, text.encode("utf-8", "surrogatepass"), loose=True)
        return
    request = expand(vector["input"]["request"])
    releases = vector["input"]["vllm"]
    if release is not None and "release-text" not in vector["flags"]:
        releases = [release]
    for text in releases:
        name = identity if len(releases) == 1 else f"{identity}@{text}"
        yield Question(name, _line({"id": name, "vllm": text, **request}))


def select(
    corpus: Corpus,
    *,
    release: str | None = None,
    algorithm: str | None = None,
    pattern: str | None = None,
    without: Sequence[str] = (),
) -> list[Case]:
    """Return the cases to ask: those of a release, an algorithm, or whose id matches a glob.

    `without`: capabilities that the program does not claim. Raises CorpusError for an unknown one, and for an
    algorithm that no release has.
    """
    for name in without:
        if name not in CAPABILITIES:
            raise CorpusError(f"there is no capability {name!r}; expected one of: {', '.join(CAPABILITIES)}")
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise CorpusError(f"there is no algorithm {algorithm!r}; expected one of: {', '.join(ALGORITHMS)}")
    cases = []
    for file, vector in corpus:
        if file.kind not in (*REQUEST_KINDS, "events"):
            continue
        if pattern is not None and not fnmatchcase(vector["id"], pattern):
            continue
        if release is not None and not applies(vector, release):
            continue
        if algorithm is not None and _algorithm_of(vector) != algorithm:
            continue
        capability = _capability(file.kind, vector)
        if capability not in without:
            cases += [
                Case(question.id, capability, vector, question)
                for question in _questions(file.kind, vector, release)
            ]
    return cases


def _algorithm_of(vector: Mapping[str, Any]) -> str | None:
    value = vector["input"].get("request", {}).get("algorithm")
    return value if isinstance(value, str) else None


def read_skips(path: Path, corpus: Corpus) -> dict[str, str]:
    """Read a file of ids to skip, each with its reason after a space or a tab; ``#`` starts a comment line.

    Raises CorpusError for an id that is not in the corpus or has no reason: a skip says why.
    """
    known = {vector["id"] for _, vector in corpus}
    skips = {}
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} is not UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error.strerror or error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        identity, *reason = line.split(None, 1)
        if identity not in known:
            raise CorpusError(f"{path}, line {number}: the corpus has no vector {identity!r}")
        if not reason:
            raise CorpusError(f"{path}, line {number}: {identity} has no reason; write it after the id")
        skips[identity] = reason[0].strip()
    return skips


def run(
    command: str,
    corpus: Corpus,
    cases: Sequence[Case],
    *,
    skips: Mapping[str, str] | None = None,
    idle_seconds: float = 10.0,
    total_seconds: float = 600.0,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> Report:
    """Ask `command` every case and return the report; ends whatever the program does (see `exchange`).

    Raises ProgramError when it cannot be started.
    """
    report = Report(command, corpus.version, not_asked=corpus.unknown_kinds())
    skipped = skips or {}
    by_id = {case.id: case for case in cases}
    asked = [case for case in cases if case.vector["id"] not in skipped]
    found: dict[str, Outcome] = {
        case.id: Outcome(case, "skipped", reason=skipped[case.vector["id"]])
        for case in cases
        if case.vector["id"] in skipped
    }
    questions = [case.question for case in asked]
    # Without a question there is nothing to start the program for.
    if not questions:
        report.outcomes = list(found.values())
        return report
    # Closed here and not some time later: the program ends with this function, also when an exception leaves it.
    with closing(
        exchange(command, questions, idle_seconds=idle_seconds, total_seconds=total_seconds)
    ) as messages:
        for message in messages:
            if isinstance(message, Ended):
                report.status = message.status
                continue
            outcome = _outcome(by_id, message)
            if isinstance(message, ProgramFault):
                report.faults.append(message)
            if outcome:
                found[outcome.case.id] = outcome
                if on_outcome:
                    on_outcome(outcome)
    report.outcomes = [found.get(case.id, Outcome(case, "not-run")) for case in cases]
    return report


def _outcome(by_id: Mapping[str, Case], message: Answer | ProgramFault) -> Outcome | None:
    """Return what a message says of a case, if it says something."""
    if isinstance(message, Answer):
        case = by_id[message.id]
        try:
            difference = compare(case.vector, message.body)
        except RecursionError:
            difference = Difference("protocol", "the answer is nested too deeply")
        return Outcome(case, "failed" if difference else "passed", difference)
    if message.id is None or message.kind not in _UNANSWERED:
        return None
    return Outcome(by_id[message.id], "failed", Difference("protocol", f"{message.kind}: {message.message}"))


def explain_mistake(name: str) -> str:
    """Return what a known mistake does, in words."""
    return f"the program {MISTAKES[name].said}" if name in MISTAKES else name
