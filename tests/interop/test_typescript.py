"""The TypeScript SDK answers request lines and event lines exactly as Python does."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from ..data_files import RELEASES
from . import built
from .event_lines import damaged_payloads, python_answer, recorded_payloads, sglang_payloads
from .lines_program import (
    ROOT,
    assert_recorded_answers,
    assert_same_answers,
    oracle_lines,
    random_lines,
    run_lines,
)
from .toolchain import need

pytestmark = [
    pytest.mark.filterwarnings("ignore::kvhash.contract.NewerReleaseWarning"),
    pytest.mark.timeout(900),  # the program is built first
]

PACKAGE = ROOT / "sdk" / "typescript"


@pytest.fixture(scope="module")
def program() -> list[str]:
    """Return the request-line program, built from the checked-in sources and lock file."""
    return built.typescript()


def test_the_contract_table_is_the_python_one() -> None:
    """The generated tables of TypeScript and Java are those of contract.py."""
    command = [sys.executable, "tools/gen_contract_ts_java.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_the_lock_file_names_no_registry() -> None:
    """The lock file pins contents by digest and holds no download address, so any mirror serves it."""
    lock = json.loads((PACKAGE / "package-lock.json").read_text())
    packages = {name: entry for name, entry in lock["packages"].items() if name}
    assert packages
    assert all("resolved" not in entry and entry["integrity"] for entry in packages.values())


def test_unit_tests_pass(program: list[str]) -> None:
    """The package's own tests pass."""
    done = subprocess.run([need("npm"), "test"], cwd=PACKAGE, capture_output=True, timeout=240, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()[-5000:]
    assert program


@pytest.mark.parametrize("release", RELEASES)
def test_every_recorded_case_is_equal(program: list[str], release: str) -> None:
    """NONE_HASH, hashes, published values and extra keys equal vLLM's; what it cannot hash is refused."""
    assert_recorded_answers(program, release)


def _decoded(program: list[str], payloads: list[bytes]) -> list[dict[str, Any]]:
    lines = [json.dumps({"id": i, "decode": data.hex()}).encode() + b"\n" for i, data in enumerate(payloads)]
    answers = run_lines(program, lines)
    assert [answered.pop("id") for answered in answers] == list(range(len(payloads)))
    for answered in answers:
        if "error" in answered:
            answered["error"] = answered["error"]["code"]
            continue
        for event in answered["batch"]["events"]:
            if "undecodable" in event:
                assert event.pop("message")
    return answers


@pytest.mark.parametrize("source", [recorded_payloads, sglang_payloads])
def test_batches_are_decoded_as_python_does(program: list[str], source: Any) -> None:
    """Every release's batches and SGLang's decode to the same events; a bad event stays in its place."""
    payloads = source()
    for payload, got in zip(payloads, _decoded(program, payloads), strict=True):
        assert got == python_answer(payload), payload.hex()


def test_damaged_batches_are_decoded_as_python_does(program: list[str]) -> None:
    """A damaged payload gives the same error code, or the same batch with the same events undecodable."""
    whole = [payload for payload in recorded_payloads() + sglang_payloads() if 0 < len(payload) < 2000]
    payloads = damaged_payloads(whole, 2000, seed=2)
    for payload, got in zip(payloads, _decoded(program, payloads), strict=True):
        assert got == json.loads(json.dumps(python_answer(payload), default=str)), payload.hex()


def test_a_nested_event_never_loses_its_batch(program: list[str]) -> None:
    """An event nested past any limit becomes undecodable; its neighbours are read."""
    deep = b"\x91" * 200_000 + b"\xc0"
    payload = b"\x93\xcb" + bytes(8) + b"\x92" + deep + b"\x91\xb0AllBlocksCleared" + b"\xc0"
    (got,) = _decoded(program, [payload])
    broken, cleared = got["batch"]["events"]
    assert broken["undecodable"] == "$.events[0]"
    assert cleared == {"type": "AllBlocksCleared"}


def test_answers_come_line_by_line(program: list[str]) -> None:
    """A line is answered before the next one is sent: the program can be used in dialogue."""
    with subprocess.Popen(program, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for i in range(3):
            process.stdin.write(b'{"id":%d,"tokens":[1]}\n' % i)
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["id"] == i
        process.stdin.close()
        assert process.wait(timeout=20) == 0


def test_a_browser_answers_as_python_does(program: list[str]) -> None:
    """Bundled for and run inside a headless Chromium, hashes and events are the same as Python's."""
    chromium = need("chromium", "chromium-browser", "google-chrome")
    browser = [program[0], "sdk/typescript/test/browser.mjs", chromium]
    lines, _rows = oracle_lines("0.33.0")
    assert assert_same_answers(browser, [*lines, *random_lines(200, seed=4)]) > 200
    payloads = recorded_payloads()[::20] + sglang_payloads()
    for payload, got in zip(payloads, _decoded(browser, payloads), strict=True):
        assert got == python_answer(payload), payload.hex()
