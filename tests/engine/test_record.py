"""`engine_ref record` writes captures that every tool for captures reads, and refuses what it would record wrongly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvhash import BlockHasher
from kvhash.events.decode import decode_batch
from kvhash.events.schema import AllBlocksCleared, BlockRemoved, BlockStored

from .running import DEADLINE_S, run_here

KVEVENTS = "from kvhash_cli.entry import kvevents_main; kvevents_main()"
SETTINGS: dict[str, Any] = {
    "vllm": "0.32.0",
    "algorithm": "sha256_cbor",
    "hash_seed": "0",
    "block_size": 4,
}


def record(lines: list[dict[str, Any]], *arguments: str) -> dict[str, Any]:
    """Record request lines and return the capture."""
    data = "\n".join(map(json.dumps, lines))
    done = run_here("record", "-", *arguments, "--num-gpu-blocks-override", "20", data=data)
    assert done.returncode == 0, done.stderr
    capture: dict[str, Any] = json.loads(done.stdout)
    return capture


def workload() -> list[dict[str, Any]]:
    """Return lines that hit, evict, separate and reset."""
    long = list(range(100, 150))
    lora = {"name": "sql", "path": "adapters/sql", "id": 1}
    return [
        {**SETTINGS, "tokens": list(range(18)), "max_tokens": 8},
        {"tokens": list(range(18)), "max_tokens": 8},
        {"tokens": list(range(18)), "cache_salt": "a", "max_tokens": 1},
        {"tokens": list(range(18)), "lora": lora, "max_tokens": 1},
        {"tokens": long, "max_tokens": 20},
        {"reset": True},
        {"tokens": list(range(18)), "multimodal": [{"identifier": "i", "offset": 3, "length": 4}]},
    ]


def test_capture_verifies_and_tells_what_happened(tmp_path: Path) -> None:
    """Every published hash is the SDK's by `kvevents verify`; outputs, hits and the reset are in the requests."""
    capture = record(workload())
    path = tmp_path / "capture.json"
    path.write_text(json.dumps(capture))
    settings = ("--vllm", "0.32.0", "--algorithm", "sha256_cbor", "--hash-seed", "0", "--lora-path")
    verify = [sys.executable, "-c", KVEVENTS, "verify", str(path), *settings, "sql=adapters/sql"]
    done = subprocess.run(verify, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(100.0 %)" in done.stdout
    requests = capture["requests"]
    assert requests[5] == {"reset": {"success": True}}
    hits = [r["usage"]["prompt_tokens_details"]["cached_tokens"] for r in requests if "prompt" in r]
    assert hits == [0, 16, 0, 0, 0, 0]
    assert requests[0]["out"] == requests[1]["out"]
    assert len(requests[0]["out"]) == 8
    assert capture["lora"] == {"name": "sql", "path": "adapters/sql", "id": 1}
    events = [e for frame in capture["frames"] for e in decode_batch(bytes.fromhex(frame[2])).events]
    assert {type(event) for event in events} == {BlockStored, BlockRemoved, AllBlocksCleared}
    assert capture["replay"][0] == ["", *capture["frames"][0]]
    assert capture["replay"][-1] == ["", "", "ff" * 8, ""]


def test_recording_again_gives_the_same_events() -> None:
    """Made-up tokens are a function of the prompt: two recordings differ in their times only."""
    first, second = record(workload()), record(workload())

    def events(capture: dict[str, Any]) -> list[Any]:
        return [decode_batch(bytes.fromhex(frame[2])).events for frame in capture["frames"]]

    assert first["requests"] == second["requests"]
    assert events(first) == events(second)


def test_older_releases_are_recorded_in_their_shape() -> None:
    """The first line's release decides the wire shape and the replay's framing."""
    capture = record([{**SETTINGS, "vllm": "0.11.0", "tokens": list(range(9))}])
    (frame,) = capture["frames"][:1]
    assert b"group_idx" not in bytes.fromhex(frame[2])
    assert capture["replay"][0] == ["", *frame[1:]]
    assert len(capture["replay"][-1]) == 3


def test_integer_hashes_of_old_releases() -> None:
    """A release that chains 64-bit integers is emulated too: its hits, its evictions and its published integers."""
    settings = {**SETTINGS, "vllm": "0.10.1", "algorithm": "sha256_cbor_64bit"}
    lines = [{**line, **settings} for line in workload()[:2] + workload()[4:5] * 2 if "reset" not in line]
    lines.append({**settings, "tokens": list(range(500, 560))})
    capture = record(lines)
    hits = [r["usage"]["prompt_tokens_details"]["cached_tokens"] for r in capture["requests"]]
    assert hits == [0, 16, 0, 48, 0]
    hasher = BlockHasher(vllm="0.10.1", algorithm="sha256_cbor_64bit", hash_seed="0", block_size=4)
    ours = {value for r in capture["requests"] for value in hasher.chain(r["prompt"] + r["out"]).external()}
    events = [e for frame in capture["frames"] for e in decode_batch(bytes.fromhex(frame[2])).events]
    stored = {value for event in events if isinstance(event, BlockStored) for value in event.block_hashes}
    removed = {value for event in events if isinstance(event, BlockRemoved) for value in event.block_hashes}
    assert stored
    assert stored <= ours
    assert removed
    assert removed <= stored


def test_together_shares_steps() -> None:
    """Requests at once hit nothing of each other's first step, one after the other they do."""
    lines = [{**SETTINGS, "tokens": list(range(18)), "max_tokens": 2}] * 2
    hits = [
        [r["usage"]["prompt_tokens_details"]["cached_tokens"] for r in record(lines, *flags)["requests"]]
        for flags in ((), ("--together",))
    ]
    assert hits[0] == [0, 16]
    assert hits[1][0] == 0


def test_output_file_is_whole_or_absent(tmp_path: Path) -> None:
    """A file is written as a whole; a recording that fails leaves none."""
    path = tmp_path / "capture.json"
    done = run_here("record", "-", "-o", str(path), data='{"tokens":[1]}\n{"tokens":[-1]}')
    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []
    done = run_here("record", "-", "-o", str(path), data='{"tokens":[1]}')
    assert (done.returncode, done.stdout) == (0, "")
    assert list(tmp_path.iterdir()) == [path]
    assert json.loads(path.read_text())["requests"][0]["prompt"] == [1]


@pytest.mark.parametrize("data", ["", "\n", " \n\n"])
def test_nothing_to_record_is_said(tmp_path: Path, data: str) -> None:
    """A file without a line ends with exit code 2 and leaves no capture, from a file as from stdin."""
    path, output = tmp_path / "requests.jsonl", tmp_path / "capture.json"
    path.write_text(data)
    for done in (run_here("record", str(path), "-o", str(output)), run_here("record", "-", data=data)):
        assert (done.returncode, done.stdout) == (2, "")
        assert "no request" in done.stderr
    assert not output.exists()


def test_an_output_that_is_a_pipe_stays_one(tmp_path: Path) -> None:
    """It is written to, not replaced, and gets what standard output would."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert run_here("record", "-", "-o", str(pipe), data='{"tokens":[1]}').returncode == 0
        assert json.loads(os.read(reader, 1 << 16))
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file that was asked for, not the temporary one, and nothing is left behind."""
    path = tmp_path / "nowhere" / "x.json"
    done = run_here("record", "-", "-o", str(path), data='{"tokens":[1]}')
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{path}: its folder does not exist" in done.stderr

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device", "/some/.temporary")

    monkeypatch.setattr("engine_ref.record_cmd.os.replace", refuse)
    done = run_here("record", "-", "-o", str(tmp_path / "y.json"), data='{"tokens":[1]}')
    assert done.returncode == 2
    assert f"cannot write {tmp_path / 'y.json'}: No space left" in done.stderr
    assert "temporary" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["block_size", "decode_context_parallel_size"])
@pytest.mark.parametrize("value", [0, -4, "x", True, 1.5, None])
def test_sizes_of_the_first_line_are_checked(name: str, value: object) -> None:
    """The engine is built from the first line, so its sizes are checked before all else."""
    done = run_here("record", "-", data=json.dumps({"tokens": [1], name: value}))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"$.{name}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("{", 4, "line 2"),
        ("[]", 2, "line 2"),
        ('{"tokens":"x"}', 2, "line 2"),
        ('{"tokens":[]}', 2, "at least one token"),
        ('{"reset":5}', 2, "line 2"),
        ('{"reset":1}', 2, "$.reset"),
        ('{"reset":false}', 2, "$.reset"),
        ('{"reset":true,"tokens":[1]}', 2, "$.reset"),
        ('{"tokens":[1],"max_tokens":0}', 2, "$.max_tokens"),
        ('{"tokens":[1],"max_token":1}', 2, "max_token"),
        ('{"tokens":[1],"block_size":8}', 2, "$.block_size"),
        ('{"tokens":[1],"vllm":"0.30.0"}', 2, "$.vllm"),
        ('{"tokens":[1],"lookahead":1}', 2, "lookahead"),
        ('{"tokens":[40000]}', 2, "vocabulary"),
        ('{"tokens":[1],"max_tokens":99999}', 2, "$.tokens"),
    ],
)
def test_bad_lines_are_refused_before_anything_runs(line: str, code: int, says: str) -> None:
    """What the engine cannot run, or would hash otherwise than the line says, ends the recording with one line."""
    first = json.dumps({**SETTINGS, "tokens": [1]})
    done = run_here("record", "-", data=f"{first}\n{line}\n")
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr
