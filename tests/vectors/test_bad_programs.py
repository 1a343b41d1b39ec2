"""The runner against programs that do everything wrong: it ends, loses no case, and says what happened once."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvhash.events.lines import answer_all_lines
from kvhash.vectors import load_corpus
from kvhash.vectors.conformance import Case, Report, run, select
from kvhash.vectors.report import FORMATS
from kvhash_cli.conformance_cmd import conformance

from .programs import CORPUS, python

FEW = "chains/sha256-cbor-count-*"
#: Has the right answers; what `check` puts in changes them, and is done after they are written.
_ALL = """
import json, os, sys, time
answers = {answers!r}
sys.stdin.read()
{then}
print("\\n".join(answers), flush=True)
{last}
"""


@cache
def cases() -> tuple[Case, ...]:
    """Return the cases that are asked here."""
    return tuple(select(load_corpus(CORPUS), pattern=FEW))


@cache
def answers() -> list[str]:
    """Return the right answers to them, as lines."""
    given = answer_all_lines([case.question.line for case in cases()])
    return [json.dumps(answer, separators=(",", ":")) for answer in given]


def program(then: str = "", last: str = "") -> str:
    """Return a program that changes right answers and writes them."""
    return python(_ALL.format(answers=answers(), then=then, last=last))


def check(then: str = "", last: str = "", **options: Any) -> Report:
    """Run the runner over some vectors against a program that changes right answers."""
    return run(program(then, last), load_corpus(CORPUS), cases(), **options)


def statuses(report: Report) -> set[str]:
    """Return the statuses that the outcomes have."""
    return {outcome.status for outcome in report.outcomes}


@pytest.mark.parametrize("ending", ["", "sys.exit(3)"])
def test_a_child_in_another_session_is_not_waited_for(tmp_path: Path, ending: str) -> None:
    """What the program left behind holds the pipes open for a minute; the runner ends long before, all answers read."""
    pid_file = tmp_path / "pid"
    source = (
        "child = os.fork()\n"
        "if child == 0:\n    os.setsid(); time.sleep(79); os._exit(0)\n"
        f"open({str(pid_file)!r}, 'w').write(str(child))"
    )
    started = time.monotonic()
    report = check(source, ending, idle_seconds=20, total_seconds=60)
    took = time.monotonic() - started
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    assert took < 40
    assert report.passed, FORMATS["text"](report)


def test_a_child_in_another_session_of_a_hanging_program_is_not_waited_for(tmp_path: Path) -> None:
    """After the program was ended for hanging nothing is read to its end either."""
    pid_file = tmp_path / "pid"
    source = (
        "import os, time\nchild = os.fork()\n"
        "if child == 0:\n    os.setsid()\nelse:\n"
        f"    open({str(pid_file)!r}, 'w').write(str(child))\ntime.sleep(79)"
    )
    corpus = load_corpus(CORPUS)
    started = time.monotonic()
    report = run(python(source), corpus, cases(), idle_seconds=2, total_seconds=15)
    took = time.monotonic() - started
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    assert took < 40
    assert [fault.kind for fault in report.faults] == ["hang"]


def test_an_exception_while_answers_are_taken_ends_the_program(tmp_path: Path) -> None:
    """The program does not outlive the call that an exception left, and the exception is the one that was raised."""
    pid_file = tmp_path / "pid"
    command = program(f"open({str(pid_file)!r}, 'w').write(str(os.getpid()))", "time.sleep(79)")

    def fail(_: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(command, load_corpus(CORPUS), cases(), on_outcome=fail)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 11)", "os.close(1); os.kill(os.getpid(), 11)"])
@pytest.mark.parametrize("shell", [False, True])
def test_a_death_by_a_signal_after_the_last_answer_is_a_crash(end: str, shell: bool) -> None:
    """All answers are right and the program, or what a shell ran for it, dies: that is a fault, named by its signal."""
    command = program(last=f"sys.stdout.flush(); {end}")
    if shell:
        command = shlex.join(["sh", "-c", f"{command}; exit $?"])
    report = run(command, load_corpus(CORPUS), cases())
    assert statuses(report) == {"passed"}
    assert not report.passed
    (fault,) = report.faults
    assert (fault.kind, fault.id) == ("crash", None)
    assert "SIGSEGV" in fault.message
    assert "1 crash" in FORMATS["text"](report).splitlines()[-1]


@pytest.mark.parametrize("status", [0, 2, 3, 200])
def test_an_exit_status_decides_nothing_and_is_kept(status: int) -> None:
    """Right answers pass whatever the status; the report has it, for the command to tell."""
    report = check(last=f"sys.exit({status})")
    assert report.passed, FORMATS["text"](report)
    assert report.status == status


def test_an_exit_status_that_is_not_zero_is_told_on_stderr() -> None:
    """stdout is the report alone; the command's own status stays 0."""
    told = CliRunner().invoke(conformance, ["--cmd", program(last="sys.exit(3)"), "--run", FEW])
    assert told.exit_code == 0, told.output
    assert "status was 3" in told.stderr
    assert "status was" not in told.stdout
    quiet = CliRunner().invoke(conformance, ["--cmd", program(), "--run", FEW])
    assert quiet.stderr == ""


def test_a_lost_answer_costs_one_case() -> None:
    """The others count as answered, and one fault names the one that has none."""
    report = check("del answers[3]")
    failed = [outcome.case.id for outcome in report.outcomes if outcome.status == "failed"]
    assert failed == [report.outcomes[3].case.id]
    assert [(fault.kind, fault.id) for fault in report.faults] == [("missing-answer", failed[0])]
    assert statuses(report) == {"passed", "failed"}


@pytest.mark.parametrize(
    ("then", "faults"),
    [
        ("answers[2], answers[3] = answers[3], answers[2]", 1),
        ("answers.insert(0, answers.pop())", 1),
        ("answers.append(answers.pop(0))", 1),
        ("answers.reverse()", None),
    ],
)
def test_answers_out_of_order_are_all_counted_and_as_few_as_can_be_are_blamed(
    then: str, faults: int | None
) -> None:
    """Each answer is compared by its id; one that is moved is one fault, wherever it went."""
    report = check(then)
    assert statuses(report) == {"passed"}
    assert [fault.kind for fault in report.faults] == ["out-of-order"] * (
        len(report.outcomes) - 1 if faults is None else faults
    )
    assert not report.passed


@pytest.mark.parametrize(
    ("then", "kinds"),
    [
        ("answers = [line for line in answers for _ in '12']", {"duplicate-answer"}),
        ("answers = [text for line in answers for text in ('log', line)]", {"rubbish"}),
        ('answers.append(\'{"id":"nobody"}\')', {"extra-answer"}),
    ],
)
def test_noise_beside_right_answers_loses_none_of_them(then: str, kinds: set[str]) -> None:
    """Every case is answered; the noise is a fault, said once with its number, and the last line says what failed."""
    report = check(then)
    assert statuses(report) == {"passed"}
    assert {fault.kind for fault in report.faults} == kinds
    text = FORMATS["text"](report)
    kind = kinds.pop()
    assert text.count(f"\n{kind}") == 1
    if len(report.faults) > 1:
        assert f"and {len(report.faults) - 1} more" in text
    last = text.splitlines()[-1]
    assert last.startswith("FAILED")
    assert f"{len(report.faults)} {kind}" in last


def test_a_program_that_does_not_end_is_said_to_be_what_failed() -> None:
    """All answers are right and the program lingers: the last line says that this is the fault."""
    report = check(last="time.sleep(79)", idle_seconds=5)
    assert statuses(report) == {"passed"}
    (fault,) = report.faults
    assert fault.message.startswith("it did not end")
    assert "1 hang" in FORMATS["text"](report).splitlines()[-1]


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("answers[0] = chr(0xFEFF) + answers[0]", "byte order mark"),
        ('answers[0] = \'{"id":"x",\' + answers[0][1:]', "'id' stands twice"),
        ("answers[0] = answers[0][:-1] + ',\"x\":NaN}'", "no JSON"),
        ("answers[0] = '[' * 100000", "no JSON"),
        ("answers[0] = answers[0][:-1] + ',\"x\":' + '9' * 9000 + '}'", "no JSON"),
    ],
)
def test_what_a_strict_reader_refuses_is_rubbish(then: str, said: str) -> None:
    """A line that another JSON reader would refuse, or read otherwise, does not pass for an answer."""
    report = check(then)
    kinds = [fault.kind for fault in report.faults]
    assert kinds == ["rubbish", "missing-answer"]
    assert said in report.faults[0].message


def test_nothing_a_program_writes_reaches_the_terminal_as_a_command() -> None:
    """Control characters, line ends and lone surrogates of answers and of stderr are written out in every report."""
    evil = "\\u001b]0;owned\\u0007\\u009b2J\\u202e\\nPASSED: all\\ud800"
    report = check(
        f"""answers[0] = '{{"id":' + json.dumps(json.loads(answers[0])["id"]) + ',"error":{{"code":"{evil}"}}}}'
answers[0] = answers[0].replace(chr(10), "\\\\n").replace(chr(27), "\\\\u001b").replace(chr(7), "\\\\u0007")
answers[1] = chr(27) + chr(0x9b) + "rubbish"
sys.stdout.reconfigure(errors="surrogatepass")
del answers[4:]""",
        "sys.exit(chr(27) + '[31mstderr' + chr(13) + 'again')",
    )
    kinds = {fault.kind for fault in report.faults}
    assert {"rubbish", "crash"} <= kinds
    for name, form in FORMATS.items():
        text = form(report)
        text.encode()  # no lone surrogate
        assert all(c.isprintable() or c in "\n" for c in text), name
        assert not any(line.startswith("PASSED") for line in text.splitlines())


def test_a_line_without_end_is_not_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line longer than any answer is a flood at once, not one fault among many."""
    monkeypatch.setattr("kvhash.vectors.program._MAX_ANSWER_BYTES", 1 << 20)
    source = "import sys\nwhile True: sys.stdout.write('x' * 65536)"
    report = run(python(source), load_corpus(CORPUS), cases(), idle_seconds=20)
    assert [fault.kind for fault in report.faults] == ["rubbish", "flood"]
