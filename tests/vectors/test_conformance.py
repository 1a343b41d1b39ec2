"""The conformance runner: what passes, what fails and why, and programs that behave badly."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from kvhash.vectors import CorpusError, load_corpus
from kvhash.vectors.compare import compare
from kvhash.vectors.conformance import CAPABILITIES, Report, read_skips, run, select
from kvhash.vectors.program import ProgramError
from kvhash.vectors.report import FORMATS
from kvhash_cli.conformance_cmd import conformance
from kvhash_cli.vectors_cmd import vectors

from .programs import CORPUS, python, sdk_program

FEW = "chains/sha256-cbor-count-*"
GOOD = "import sys, json\nfor line in sys.stdin:\n    {}\n"


def check(command: str, pattern: str = FEW, **options: Any) -> Report:
    """Run the runner over some vectors."""
    corpus = load_corpus(CORPUS)
    return run(command, corpus, select(corpus, pattern=pattern), **options)


def test_the_whole_corpus_passes_against_the_sdk_in_a_minute() -> None:
    """The SDK's own line program answers everything rightly, in far less than the minute that is promised."""
    corpus = load_corpus(CORPUS)
    started = time.monotonic()
    report = run(sdk_program(), corpus, select(corpus))
    assert report.passed, FORMATS["text"](report)
    assert set(report.counts()) == set(CAPABILITIES)
    assert time.monotonic() - started < 60


def test_a_program_that_sleeps_is_reported_within_its_deadline() -> None:
    """A program that takes the lines and never answers is ended, and what it was asked first is named."""
    started = time.monotonic()
    report = check(python("import sys, time; sys.stdin.read(); time.sleep(3600)"), idle_seconds=1)
    assert time.monotonic() - started < 20
    assert [fault.kind for fault in report.faults] == ["hang"]
    assert report.faults[0].id == report.outcomes[0].case.id
    assert not report.passed


def test_a_program_that_reads_nothing_is_reported() -> None:
    """A program that does not even read its input blocks nothing, however much there is to write."""
    report = check(python("import time; time.sleep(3600)"), "chains/*frame*", idle_seconds=1)
    assert [fault.kind for fault in report.faults] == ["hang"]


def test_a_program_that_trickles_is_stopped_at_the_total_deadline() -> None:
    """Output that never becomes an answer does not extend the deadline without end."""
    source = "import sys, time\nwhile True:\n    sys.stdout.write('x'); sys.stdout.flush(); time.sleep(0.05)"
    started = time.monotonic()
    report = check(python(source), idle_seconds=1, total_seconds=3)
    assert time.monotonic() - started < 20
    assert not report.passed


def test_what_a_hanging_program_started_is_ended_too(tmp_path: Path) -> None:
    """No process is left behind: the children of the program end with it."""
    pid_file = tmp_path / "pid"
    source = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\ntime.sleep(3600)"
    )
    check(python(source), idle_seconds=2)
    pid = int(pid_file.read_text())
    deadline = time.monotonic() + 10
    while _alive(pid):
        assert time.monotonic() < deadline, "the child still runs"
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, FileNotFoundError):
        return False


def test_a_crash_is_reported_with_what_the_program_said() -> None:
    """The exit status and the end of stderr are told; what was answered before counts."""
    source = GOOD.format(
        "n = json.loads(line)['id']; print(json.dumps({'id': n, 'error': {'code': 'x'}}), flush=True); "
        "sys.exit('out of luck')"
    )
    report = check(python(source))
    (fault,) = report.faults
    assert fault.kind == "crash"
    assert "status 1" in fault.message
    assert "out of luck" in fault.message
    assert fault.id == report.outcomes[1].case.id
    assert report.outcomes[2].status == "not-run"


def test_rubbish_and_floods_are_reported() -> None:
    """Lines that are no answers are faults, and endless ones are not read without end."""
    report = check(python("while True: print('hello')"), total_seconds=20)
    assert {fault.kind for fault in report.faults} == {"rubbish", "flood"}
    report = check(python("print('[' * 200000); print(5); print('{}')"))
    assert [fault.kind for fault in report.faults] == ["rubbish", "rubbish", "rubbish", "crash"]


def test_answers_out_of_order_are_reported() -> None:
    """Answering a later question first is a fault, even when the answer is right."""
    source = (
        "import sys, json\n"
        "for line in reversed(list(sys.stdin)):\n"
        "    print(json.dumps({'id': json.loads(line)['id']}))"
    )
    report = check(python(source))
    assert "out-of-order" in {fault.kind for fault in report.faults}
    assert not report.passed


def test_more_answers_than_questions_are_reported() -> None:
    """An answer after the last is a fault."""
    report = check(sdk_program() + " ", FEW)
    assert report.passed
    extra = python(
        f"import subprocess, sys; subprocess.run({_split(sdk_program())!r}); print('{{\"id\": 1}}')"
    )
    assert [fault.kind for fault in check(extra).faults] == ["extra-answer"]


def _split(command: str) -> list[str]:
    import shlex

    return shlex.split(command)


def test_a_program_that_cannot_be_started_is_a_typed_error() -> None:
    """A wrong command line is said as such, not as a failing vector."""
    for command in ("/nowhere/hasher", "", "'"):
        with pytest.raises(ProgramError):
            check(command)


def test_select_by_release_algorithm_and_capability() -> None:
    """Every case of a release is asked at it, of an algorithm asks only it, and what is not claimed is left out."""
    corpus = load_corpus(CORPUS)
    at = [json.loads(c.question.line) for c in select(corpus, release="0.18.1") if c.capability == "chains"]
    assert at
    assert {line["vllm"] for line in at} == {"0.18.1"}
    only = [json.loads(c.question.line)["algorithm"] for c in select(corpus, algorithm="xxhash")]
    assert set(only) == {"xxhash"}
    assert "events" not in {case.capability for case in select(corpus, without=["events"])}
    with pytest.raises(CorpusError, match="no capability"):
        select(corpus, without=["telepathy"])


@pytest.mark.parametrize("release", ["0.9.2", "0.10.1", "0.18.1", "0.30.0", "0.33.0"])
def test_one_release_passes(release: str) -> None:
    """Asking only one release, also one between two changes, gets right answers."""
    corpus = load_corpus(CORPUS)
    report = run(sdk_program(), corpus, select(corpus, release=release, pattern="*count*"))
    assert report.passed


def test_the_first_differing_layer_is_told() -> None:
    """Each layer is told from the others by what differs."""
    _, vector = load_corpus(CORPUS).get("chains/sha256-cbor-count-9/0.10.2")
    right = vector["expected"]
    other = "ab" * 32
    answers = {
        "serialization": {"none_hash": other},
        "extra keys": {"extra_keys": [["x"], None]},
        "chain": {"block_hashes": [right["block_hashes"][0], other]},
        "external form": {"external": [right["external"][0], "1"]},
        "digest": {"none_hash": bytes.fromhex(right["none_hash"])[::-1].hex()},
        "protocol": {"external": None},
    }
    assert compare(vector, right) is None
    for layer, change in answers.items():
        difference = compare(vector, {**right, **change})
        assert difference is not None
        assert difference.layer == layer
    refused = compare(vector, {"error": {"code": "unknown-root", "message": "m"}})
    assert refused is not None
    assert refused.layer == "refusal"


def test_an_implementation_defined_answer_may_be_any_of_those_accepted() -> None:
    """All accepted answers pass, others do not."""
    vector = next(
        v
        for f, v in load_corpus(CORPUS)
        if f.kind == "extra_keys" and v["result"] == "implementation_defined"
    )
    assert len(vector["accepted"]) == 2
    assert vector["accepted"][0]["block_hashes"] != vector["accepted"][1]["block_hashes"]
    for accepted in vector["accepted"]:
        assert compare(vector, accepted) is None
    assert compare(vector, {**vector["expected"], "block_hashes": ["00" * 32]}) is not None


def test_events_may_leave_out_nil_fields_but_not_set_ones() -> None:
    """Nil fields and messages are free; every set field counts."""
    _, vector = load_corpus(CORPUS).get("events/bad-hash-text/0.33.0")
    batch = vector["expected"]["batch"]
    short = [{k: v for k, v in e.items() if v is not None and k != "message"} for e in batch["events"]]
    assert compare(vector, {"batch": {**batch, "events": short}}) is None
    for i in range(3):
        for name in list(short[i]):
            less = [dict(event) for event in short]
            del less[i][name]
            assert compare(vector, {"batch": {**batch, "events": less}}) is not None, name


def test_skips_need_a_known_id_and_a_reason(tmp_path: Path) -> None:
    """A skip file names vectors and says why; skipped vectors are not asked."""
    corpus = load_corpus(CORPUS)
    identity = "chains/sha256-cbor-count-9/0.10.2"
    path = tmp_path / "skips"
    path.write_text(f"# known\n\n{identity} our hasher has no chains\n")
    skips = read_skips(path, corpus)
    assert skips == {identity: "our hasher has no chains"}
    report = check(sdk_program(), skips=skips)
    assert report.passed
    assert {o.case.vector["id"] for o in report.outcomes if o.status == "skipped"} == {identity}
    for text in (f"{identity}\n", "chains/none/0.33.0 why\n"):
        path.write_text(text)
        with pytest.raises(CorpusError, match="line 1"):
            read_skips(path, corpus)


def _wrong_report() -> Report:
    source = GOOD.format(
        "print(json.dumps({'id': json.loads(line)['id'], 'error': {'code': 'x', 'message': '\\x00<'}}))"
    )
    return check(python(source))


def test_the_reports_say_the_same_in_each_form() -> None:
    """JSON, JUnit and TAP are well-formed and count alike; odd characters do not break them."""
    report = _wrong_report()
    failed = sum(o.status == "failed" for o in report.outcomes)
    assert failed
    body = json.loads(FORMATS["json"](report))
    assert len(body["failures"]) == failed
    assert body["passed"] is False
    tree = ElementTree.fromstring(FORMATS["junit"](report))
    assert len(tree.findall(".//failure")) == failed
    tap = FORMATS["tap"](report).splitlines()
    assert tap[1] == f"1..{len(report.outcomes)}"
    assert sum(line.startswith("not ok") for line in tap) == failed
    assert f"{failed} failed" in " ".join(FORMATS["text"](report).split())


def test_the_command_exits_1_on_a_failure_and_0_when_all_passed() -> None:
    """`kvhash conformance`: data on stdout, 1 for a mismatch, 2 for usage."""
    runner = CliRunner()
    common = ["--corpus", str(CORPUS), "--run", FEW]
    good = runner.invoke(conformance, ["--cmd", sdk_program(), *common])
    assert good.exit_code == 0, good.output
    assert "PASSED" in good.output
    bad = runner.invoke(conformance, ["--cmd", python("pass"), *common, "-o", "json"])
    assert bad.exit_code == 1
    assert json.loads(bad.output)["faults"][0]["kind"] == "crash"
    assert runner.invoke(conformance, [*common]).exit_code == 2


def test_the_vectors_command_lists_shows_covers_and_exports(tmp_path: Path) -> None:
    """`kvhash vectors`: list with filters, show with notes, coverage without gaps, export that verifies."""
    runner = CliRunner()
    here = ["--corpus", str(CORPUS)]
    listed = runner.invoke(vectors, ["list", *here, "--flag", "aliasing", "-o", "jsonl"])
    lines = [json.loads(line) for line in listed.output.splitlines()]
    assert lines
    assert all("aliasing" in line["flags"] for line in lines)
    shown = json.loads(runner.invoke(vectors, ["show", *here, lines[0]["id"]]).output)
    assert set(shown["notes"]) == set(shown["flags"])
    assert runner.invoke(vectors, ["coverage", *here]).exit_code == 0
    target = tmp_path / "vendored"
    assert runner.invoke(vectors, ["export", *here, str(target)]).exit_code == 0
    assert len(load_corpus(target)) == len(load_corpus(CORPUS))
    again = runner.invoke(vectors, ["export", *here, str(target)])
    assert again.exception is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vendored"]


def test_python_runs_here() -> None:
    """The programs of these tests run in the interpreter of the tests."""
    assert sys.executable in python("pass")
