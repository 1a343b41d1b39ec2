"""A conformance report as text, JSON, JUnit XML or TAP."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from xml.etree import ElementTree

from .conformance import Outcome, Report, explain_mistake
from .matching import ProgramFault
from .visible import printable_json, visible

__all__ = ["FORMATS", "as_json", "as_junit", "as_tap", "as_text"]

_SHOWN = 10


def _told(outcome: Outcome) -> str:
    difference = outcome.difference
    told = f"{difference.layer}: {difference.message}" if difference else outcome.reason or outcome.status
    return visible(told)


def _fault_lines(report: Report) -> Iterator[str]:
    by_kind: dict[str, list[ProgramFault]] = {}
    for fault in report.faults:
        by_kind.setdefault(fault.kind, []).append(fault)
    for kind, faults in by_kind.items():
        for fault in faults[:1]:
            at = f" at {visible(fault.id)}" if fault.id else ""
            yield f"\n{kind}{at}: {visible(fault.message)}"
        if len(faults) > 1:
            yield f"    and {len(faults) - 1} more of these"


def _skip_lines(report: Report) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for outcome in report.outcomes:
        if outcome.status == "skipped":
            by_reason.setdefault(outcome.reason, []).append(outcome.case.id)
    if by_reason:
        yield "\nskipped:"
    for reason, ids in by_reason.items():
        more = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
        yield f"    {visible(ids[0])}{more}: {visible(reason)}"


def _last_line(report: Report) -> str:
    total = sum(report.counts().values(), Counter())
    everything = sum(total.values())
    if everything and total["skipped"] == everything:
        return f"NOTHING ASKED: all {everything} cases are skipped"
    said = f"{'PASSED' if report.passed else 'FAILED'}: {total['passed']} of {everything} cases passed"
    said += "".join(
        f", {total[name]} {name.replace('-', ' ')}" for name in ("skipped", "not-run") if total[name]
    )
    faults = Counter(fault.kind for fault in report.faults)
    if not faults:
        return said
    wrong = ", ".join(f"{count} {kind}" for kind, count in faults.items())
    if total["passed"] + total["skipped"] == everything:
        return f"{said}, but the program did more than answer them, or otherwise: {wrong}"
    return f"{said}; the program: {wrong}"


def _text_lines(report: Report) -> Iterator[str]:
    yield f"corpus {visible(report.corpus_version)} against: {visible(report.command)}"
    yield ""
    for capability, counts in report.counts().items():
        failed = counts["failed"]
        line = f"{'FAIL' if failed or counts['not-run'] else 'ok':<5}{capability:<32}{counts['passed']:>6} passed"
        line += f"{failed:>6} failed" if failed else ""
        for name in ("skipped", "not-run"):
            line += f"{counts[name]:>6} {name.replace('-', ' ')}" if counts[name] else ""
        layer = report.first_layer(capability)
        yield line + (f"   first difference: {layer}" if layer else "")
    for kind, count in report.not_asked.items():
        yield f"not asked: {count} vectors of kind {visible(repr(kind))}, which this kvhash does not know"
    yield from _fault_lines(report)
    failures = [outcome for outcome in report.outcomes if outcome.status == "failed"]
    if failures:
        yield ""
    for outcome in failures[:_SHOWN]:
        yield f"{visible(outcome.case.id)}\n    {_told(outcome)}"
    if len(failures) > _SHOWN:
        yield f"... and {len(failures) - _SHOWN} more"
    mistakes = report.mistakes()
    if mistakes:
        yield "\nknown mistakes that give these very values:"
        for name, count, looked_for in mistakes[:5]:
            yield f"    {name}: {explain_mistake(name)} ({count} of the {looked_for} failures that could show it)"
    yield from _skip_lines(report)
    yield f"\n{_last_line(report)}"


def as_text(report: Report) -> str:
    """Return the report for people: a line a capability, the first failures, and the mistakes that explain them."""
    return "\n".join(_text_lines(report)) + "\n"


def as_json(report: Report) -> str:
    """Return the report as one JSON object; of the passed cases only their number."""
    body = {
        "v": 1,
        "command": report.command,
        "corpus": report.corpus_version,
        "passed": report.passed,
        "capabilities": {
            name: {
                **{status: counts[status] for status in ("passed", "failed", "skipped", "not-run")},
                "first_layer": report.first_layer(name),
            }
            for name, counts in report.counts().items()
        },
        "faults": [{"kind": fault.kind, "id": fault.id, "message": fault.message} for fault in report.faults],
        "not_asked": dict(report.not_asked),
        "failures": [
            {
                "id": outcome.case.id,
                "capability": outcome.case.capability,
                "layer": outcome.difference.layer,
                "message": outcome.difference.message,
                "mistakes": list(outcome.difference.mistakes),
            }
            for outcome in report.outcomes
            if outcome.difference
        ],
        "skipped": {o.case.id: o.reason for o in report.outcomes if o.status == "skipped"},
        "mistakes": [
            {"name": name, "explains": count, "of": looked_for, "does": explain_mistake(name)}
            for name, count, looked_for in report.mistakes()
        ],
    }
    return printable_json(body) + "\n"


def as_junit(report: Report) -> str:
    """Return the report as JUnit XML: a suite a capability, and one for the program itself."""
    root = ElementTree.Element("testsuites", name="kvhash conformance")
    for capability, counts in report.counts().items():
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=capability,
            tests=str(sum(counts.values())),
            failures=str(counts["failed"] + counts["not-run"]),
            skipped=str(counts["skipped"]),
        )
        for outcome in report.outcomes:
            if outcome.case.capability != capability:
                continue
            case = ElementTree.SubElement(
                suite, "testcase", classname=capability, name=visible(outcome.case.id)
            )
            if outcome.status != "passed":
                tag = "skipped" if outcome.status == "skipped" else "failure"
                ElementTree.SubElement(case, tag, message=_told(outcome))
    if report.faults:
        suite = ElementTree.SubElement(
            root, "testsuite", name="program", tests=str(len(report.faults)), failures=str(len(report.faults))
        )
        for fault in report.faults:
            case = ElementTree.SubElement(suite, "testcase", classname="program", name=fault.kind)
            ElementTree.SubElement(
                case, "failure", message=visible(f"{fault.id or ''} {fault.message}".strip())
            )
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def as_tap(report: Report) -> str:
    """Return the report in the Test Anything Protocol, version 14; a fault of the program is a line of its own."""
    lines = ["TAP version 14", f"1..{len(report.outcomes) + len(report.faults)}"]
    number = 0
    for number, outcome in enumerate(report.outcomes, 1):
        good = "ok" if outcome.status in ("passed", "skipped") else "not ok"
        skip = f" # SKIP {_told(outcome)}" if outcome.status == "skipped" else ""
        lines.append(f"{good} {number} - {visible(outcome.case.id)}{skip}")
        if good == "not ok":
            lines += ["  ---", f"  message: {json.dumps(_told(outcome))}", "  ..."]
    for i, fault in enumerate(report.faults, number + 1):
        lines += [
            f"not ok {i} - program: {fault.kind}",
            "  ---",
            f"  message: {json.dumps(visible(fault.message))}",
            "  ...",
        ]
    return "\n".join(lines) + "\n"


#: The forms of a report, by the name that ``-o`` takes.
FORMATS: dict[str, Callable[[Report], str]] = {
    "text": as_text,
    "json": as_json,
    "junit": as_junit,
    "tap": as_tap,
}
