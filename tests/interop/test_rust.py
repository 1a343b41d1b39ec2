"""The Rust crate: its own checks pass, and its program answers request and event lines in Python's very words."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvhash.events.lines import answer_all_lines
from kvhash.request import MAX_LINE_BYTES, answer_lines

from ..data_files import RELEASES
from . import built
from .event_lines import damaged_payloads, recorded_payloads, sglang_payloads
from .event_payloads import random_payloads
from .lines_program import (
    ROOT,
    assert_recorded_answers,
    assert_same_answers,
    awkward_lines,
    random_lines,
    run_lines,
)
from .toolchain import cargo, need

pytestmark = pytest.mark.timeout(900)  # a cold release build takes minutes
WORKSPACE = ROOT / "sdk" / "rust"


@pytest.fixture(scope="session")
def program() -> list[str]:
    """Build the request-line program and return its command."""
    return built.rust()


def test_the_contract_table_is_the_python_one() -> None:
    """`gen_contract_rust.py --check` finds nothing stale: the crate has no other table than the Python SDK."""
    done = subprocess.run(
        [sys.executable, "tools/gen_contract_rust.py", "--check"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_crate_is_formatted() -> None:
    """`cargo fmt --check` finds nothing."""
    need("cargo-fmt")
    cargo(WORKSPACE, "fmt", "--all", "--check")


def test_clippy_finds_nothing() -> None:
    """Clippy has no warning, in the crate, its program, its tests and its binding."""
    need("cargo-clippy")
    cargo(WORKSPACE, "clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings")


def test_unit_and_documentation_tests_pass() -> None:
    """The crate's own tests pass, the examples of its documentation among them."""
    cargo(WORKSPACE, "test", "--package", "kvhash", "--quiet")


@pytest.mark.parametrize("release", RELEASES)
def test_every_recorded_case_is_equal(program: list[str], release: str) -> None:
    """The program's answers are what vLLM's own functions gave."""
    assert_recorded_answers(program, release)


def _assert_same_words(program: list[str], lines: list[bytes]) -> None:
    """Compare answers whole: values, codes and messages."""
    expected = list(answer_lines(lines))
    got = run_lines(program, lines)
    for line, theirs, ours in zip([line for line in lines if line.strip()], expected, got, strict=True):
        assert ours == theirs, line[:300]


@pytest.mark.filterwarnings("ignore::kvhash.NewerReleaseWarning")
def test_random_requests_are_answered_as_python_does(program: list[str]) -> None:
    """All releases, algorithms, keys, look-ahead and parallelism, mixed at random, give equal answers."""
    assert assert_same_answers(program, random_lines(2000, seed=7)) > 1000


@pytest.mark.filterwarnings("ignore::kvhash.NewerReleaseWarning")
def test_awkward_lines_are_refused_in_pythons_words(program: list[str]) -> None:
    """Each bad line gives one error line with Python's code, message and id."""
    _assert_same_words(program, awkward_lines())


#: Lines at which a value's Python form, or Python's own reading of JSON, shows in the message.
SHOWN = [
    b'{"tokens":[1.5]}',
    b'{"tokens":[1e16, 1]}',
    b'{"tokens":[1e-5]}',
    b'{"tokens":[1e999]}',
    b'{"tokens":[-0.0]}',
    b'{"tokens":[123456789.123456789]}',
    b'{"tokens":["a\'b"]}',
    b'{"tokens":["a\'\\"b\\n\\u007f\\u200b\\ue000\\ud800"]}',
    b'{"tokens":[{"a":[null,true,"x"]}]}',
    b'{"tokens":["0123456789012345678901234567890123456789"]}',
    b'{"tokens":[100000000000000000000000000000000000000000000000000000]}',
    b'{"tokens":[],"hash_seed":{"a":1.5}}',
    b'{"tokens":[],"hash_seed":[1e22]}',
    b'{"tokens":[],"vllm":"\\u001f0.33\\u2003"}',
    b'{"tokens":[],"vllm":"\xd9\xa0.33.0"}',
    b'{"tokens":[],"algorithm":"\\udc00"}',
    b'{"tokens":[],"\\ud800":1}',
    b'{"tokens":[],"block_size":1180591620717411303424}',
    b'{"tokens":[],"block_size":1180591620717411303423}',
    b'{"tokens":[],"prompt_embeds":{"shape":[1,1],"dtype":{"a":[]},"data":""}}',
    b'{"id":1e999,"tokens":[]}',
    b'{"id":"a","vllm":"0.33.0aaaaa","tokens":[]}',
    b'{"vllm":"0.33.0rc1rc2rc3rc4+x","tokens":[],"hash_seed":"0"}',
    b'{"id":-0,"tokens":[1}',
    b'{"id":"a","tokens":[1]',
    b'{"id":"a"',
    b'{"id":',
    b"{",
    b'{"a"',
    b'{"a":1',
    b'{"a":1,',
    b"[1",
    b"[1 2]",
    b'"\\u12"',
    b'"\\u123"',
    b'"\\u1234"',
    b'"\\u12g4"',
    b'"\\ud83d\\u12"',
    b'"\\ud83d\\uzzzz  "',
    b'"\\ud83d\\ude00"',
    b'"abc\\',
    b'"abc\\"',
    b'"\x1f"',
    b"-",
    b"-a",
    b"1e",
    b"1e+",
    b"1.e5",
    b"0x1",
    b"nul",
    b"\xc3",
    b"\xe0\x80",
    b"\xed\xa0\x80",
    b"\xf5",
    b"\xf0\x9f",
    '{"é":"ü"} x'.encode(),
]


@pytest.mark.parametrize("ending", [b"", b"\n"])
def test_values_show_as_python_shows_them(program: list[str], ending: bytes) -> None:
    """Messages that show a value, or the place of a fault in the text, are Python's."""
    for line in SHOWN:
        _assert_same_words(program, [line + ending])


def test_the_line_limit_is_the_same(program: list[str]) -> None:
    """A line of the limit is read, one byte more is refused with its length, and the next line is answered."""
    good = b'{"tokens":[1],"hash_seed":"0"}'
    fitting = good + b" " * (MAX_LINE_BYTES - 1 - len(good)) + b"\n"
    lines = [fitting, b" " + fitting, b"  " + fitting, fitting[:-1] * 2 + b"\n", good]
    _assert_same_words(program, lines)


def test_answers_come_line_by_line(program: list[str]) -> None:
    """A line is answered before the next one is sent: the program can be talked to."""
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(3):
            process.stdin.write(json.dumps({"id": number, "tokens": []}).encode() + b"\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["id"] == number
        process.stdin.close()
        assert process.wait(timeout=10) == 0


def test_the_program_is_quiet_on_a_broken_pipe(program: list[str], tmp_path: Path) -> None:
    """`kvhash-lines | head -1` ends without a word."""
    lines = tmp_path / "lines.jsonl"
    lines.write_bytes(b'{"tokens":[1]}\n' * 20_000)
    with lines.open("rb") as file:
        process = subprocess.Popen(
            program, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        assert process.stdout is not None
        assert process.stdout.read(1) == b"{"
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(timeout=20) == 0
        process.stderr.close()


# --- events ---------------------------------------------------------------------------------------------------


def _assert_same_batches(program: list[str], payloads: list[bytes]) -> int:
    """Compare answers whole, messages too; returns how many payloads were batches."""
    lines = [
        json.dumps({"id": i, "decode": payload.hex()}).encode() + b"\n" for i, payload in enumerate(payloads)
    ]
    # Through JSON: what its readers see of both.
    expected = [json.loads(json.dumps(answered)) for answered in answer_all_lines(lines)]
    for payload, ours, theirs in zip(payloads, run_lines(program, lines), expected, strict=True):
        assert ours == theirs, payload.hex()
    return sum("batch" in answered for answered in expected)


def test_every_recorded_batch_decodes_alike(program: list[str]) -> None:
    """Each release's recorded batches, a live server's and SGLang's shapes are read as the Python decoder does."""
    payloads = recorded_payloads()
    assert _assert_same_batches(program, payloads) == len(payloads) > 300
    assert _assert_same_batches(program, sglang_payloads()) > 5


def test_damaged_batches_decode_alike(program: list[str]) -> None:
    """Cut, flipped and spliced payloads give the same events, places, codes and messages."""
    payloads = [payload for payload in [*recorded_payloads(), *sglang_payloads()] if payload]
    assert _assert_same_batches(program, damaged_payloads(payloads, 3000, seed=5)) > 500


def test_random_batches_decode_alike(program: list[str]) -> None:
    """Anything in any place, in every width of msgpack: the same values, places, codes and messages."""
    assert _assert_same_batches(program, random_payloads(4000, seed=11)) > 2000


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(20))
def test_random_batches_decode_alike_at_length(program: list[str], seed: int) -> None:
    """As above, a hundred thousand of each in all."""
    _assert_same_batches(program, random_payloads(5000, seed=1000 + seed))
    payloads = [payload for payload in [*recorded_payloads(), *sglang_payloads()] if payload]
    _assert_same_batches(program, damaged_payloads(payloads, 5000, seed=seed))


@pytest.mark.parametrize(
    "line",
    [
        b'{"decode":5}',
        b'{"decode":null,"id":3}',
        b'{"decode":"zz"}',
        b'{"decode":"9"}',
        b'{"decode":"9 0"}',
        b'{"decode":" 90\\t91 C0\\n"}',
        b'{"decode":"\\ud800"}',
        b'{"decode":"\\u00e9"}',
        b'{"decode":"90","tokens":[]}',
        b'{"x":1,"decode":"90","id":1}',
        b'{"decode":"93cb3ff800000000000090c0","id":[1.5]}',
        b'{"decode":{}}',
    ],
)
def test_event_lines_are_checked_alike(program: list[str], line: bytes) -> None:
    """A bad event line gives Python's error line."""
    assert run_lines(program, [line]) == json.loads(json.dumps(list(answer_all_lines([line]))))


def test_the_program_passes_the_conformance_check(program: list[str]) -> None:
    """`kvhash conformance` passes all of the corpus that a line program can answer, events too."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from kvhash_cli.entry import kvhash_main; kvhash_main()",
            "conformance",
            "--cmd",
            shlex.join(program),
        ],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
