"""A conformance report as text, JSON, JUnit XML or TAP."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from xml.etree import ElementTree

from .conformance import Outcome, Report, explain_mistake

__all__ = ["FORMATS", "as_json", "as_junit", "as_tap", "as_text"]

_SHOWN = 10


def _told(outcome: Outcome) -> str:
    difference = outcome.difference
    return f"{difference.layer}: {difference.message}" if difference else outcome.reason or outcome.status


def _text_lines(report: Report) -> Iterator[str]:
    yield f"corpus {report.corpus_version} against: {report.command}"
    yield ""
    for capability, counts in report.counts().items():
        failed = counts["failed"]
        line = f"{'FAIL' if failed or counts['not-run'] else 'ok':<5}{capability:<32}{counts['passed']:>6} passed"
        line += f"{failed:>6} failed" if failed else ""
        for name in ("skipped", "not-run"):
            line += f"{counts[name]:>6} {name.replace('-', ' ')}" if counts[name] else ""
        layer = report.first_layer(capability)
        yield line + (f"   first difference: {layer}" if layer else "")
    for fault in report.faults:
        yield f"\n{fault.kind}{f' at {fault.id}' if fault.id else ''}: {fault.message}"
    failures = [outcome for outcome in report.outcomes if outcome.status == "failed"]
    if failures:
        yield ""
    for outcome in failures[:_SHOWN]:
        yield f"{outcome.case.id}\n    {_told(outcome)}"
    if len(failures) > _SHOWN:
        yield f"... and {len(failures) - _SHOWN} more"
    mistakes = report.mistakes()
    if mistakes:
        yield "\nknown mistakes that give these very values:"
        for name, count, looked_for in mistakes[:5]:
            yield f"    {name}: {explain_mistake(name)} ({count} of the {looked_for} failures that could show it)"
    total = report.counts().values()
    passed, everything = sum(c["passed"] for c in total), sum(sum(c.values()) for c in total)
    yield f"\n{'PASSED' if report.passed else 'FAILED'}: {passed} of {everything} cases passed"


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
    return json.dumps(body, ensure_ascii=False) + "\n"


_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


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
            case = ElementTree.SubElement(suite, "testcase", classname=capability, name=outcome.case.id)
            if outcome.status != "passed":
                tag = "skipped" if outcome.status == "skipped" else "failure"
                ElementTree.SubElement(case, tag, message=_NOT_XML.sub("?", _told(outcome)))
    if report.faults:
        suite = ElementTree.SubElement(
            root, "testsuite", name="program", tests=str(len(report.faults)), failures=str(len(report.faults))
        )
        for fault in report.faults:
            case = ElementTree.SubElement(suite, "testcase", classname="program", name=fault.kind)
            ElementTree.SubElement(
                case, "failure", message=_NOT_XML.sub("?", f"{fault.id or ''} {fault.message}".strip())
            )
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def as_tap(report: Report) -> str:
    """Return the report in the Test Anything Protocol, version 14; a fault of the program is a line of its own."""
    lines = ["TAP version 14", f"1..{len(report.outcomes) + len(report.faults)}"]
    number = 0
    for number, outcome in enumerate(report.outcomes, 1):
        good = "ok" if outcome.status in ("passed", "skipped") else "not ok"
        skip = f" # SKIP {outcome.reason}" if outcome.status == "skipped" else ""
        lines.append(f"{good} {number} - {outcome.case.id}{skip}")
        if good == "not ok":
            lines += ["  ---", f"  message: {json.dumps(_told(outcome))}", "  ..."]
    for i, fault in enumerate(report.faults, number + 1):
        lines += [
            f"not ok {i} - program: {fault.kind}",
            "  ---",
            f"  message: {json.dumps(fault.message)}",
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
