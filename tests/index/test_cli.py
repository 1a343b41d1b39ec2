"""``kvevents index`` as a user runs it: files, live engines, queries, and bad usage."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvhash.events.publisher import Publisher

from ..data_files import CAPTURES, DATA, capture
from ..waiting import wait_for
from .build import CLEARED, HASHER, SIZE, batch, removed, stored

KVEVENTS = str(Path(sys.executable).with_name("kvevents"))
TOKENS = list(range(40))


def run(*arguments: str, status: int = 0, stdin: bytes = b"") -> tuple[str, str]:
    """Run ``kvevents index``; return stdout and stderr."""
    done = subprocess.run(
        [KVEVENTS, "index", *arguments], input=stdin, capture_output=True, check=False, timeout=60
    )
    out, err = done.stdout.decode(), done.stderr.decode()
    assert "Traceback" not in err
    assert done.returncode == status, (done.returncode, out, err)
    return out, err


def records(out: str) -> dict[str, list[dict[str, Any]]]:
    """Return jsonl records by kind."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in out.splitlines():
        value = json.loads(line)
        assert value["v"] == 1
        found.setdefault(value["record"], []).append(value)
    return found


@pytest.mark.parametrize("name", CAPTURES)
def test_a_recorded_server_is_mapped_and_queried(name: str, tmp_path: Path) -> None:
    """Every recorded stream is EXACT, and its last prompt is found by its tokens under the right settings."""
    recorded = capture(name)
    last = next(r for r in reversed(recorded["requests"]) if "prompt" in r)
    adapted = last.get("model") == "sql"
    fields = {"lora": {"name": "sql", "path": "adapters/sql", "id": 1}} if adapted else {}
    query = tmp_path / "tokens.json"
    query.write_text(json.dumps({"tokens": last["prompt"], "cache_salt": last.get("cache_salt"), **fields}))
    seed = [] if recorded["hash_seed"] is None else ["--hash-seed", recorded["hash_seed"]]
    settings = ["--vllm", "0.32.0", "--algorithm", recorded["algo"], *seed, "--lora-path", "sql=adapters/sql"]
    file = str(DATA / "captures" / f"{name}.json")
    found = records(run(file, "--query", str(query), *settings, "-o", "jsonl")[0])
    assert found["engine"][0]["knowledge"] == "exact"
    assert found["match"][0]["usable_tokens"] >= 32
    assert found["stats"][0]["batches"] == len(recorded["frames"])
    text, _ = run(file)
    assert "EXACT" in text
    assert f"{sum(found['engine'][0]['blocks'].values())} blocks: GPU" in text


def test_wrong_settings_make_the_engine_unknown() -> None:
    """A query under another algorithm says UNKNOWN (hash-mismatch) instead of a silent miss."""
    file = str(DATA / "captures" / "vllm-0.32.0-sha256_cbor.json")
    out, _ = run(file, "--query", "[1,2,3]", "--vllm", "0.32.0", "--algorithm", "sha256")
    assert "UNKNOWN (hash-mismatch)" in out
    assert "match" in out


def test_a_query_of_another_block_size_is_said() -> None:
    """A query that brings a block size which is not the engine's says so, not only that nothing matches."""
    file = str(DATA / "captures" / "vllm-0.32.0-sha256_cbor.json")
    settings = ["--vllm", "0.32.0", "--algorithm", "sha256_cbor"]
    said = f"{file}: the query's block_size is 4, the engine's is 32"
    assert said in run(file, "--query", '{"tokens":[1,2,3,4,5],"block_size":4}', *settings)[1]
    for same in ('{"tokens":[1,2,3,4,5],"block_size":32}', "[1,2,3,4,5]"):
        assert "block_size" not in run(file, "--query", same, *settings)[1]


def test_settings_of_a_query_that_are_not_the_engines_are_said() -> None:
    """A query's own settings are judged by the engine's events; what counts for nothing is said."""
    capture = json.loads((DATA / "captures" / "vllm-0.32.0-sha256_cbor.json").read_text())
    file = str(DATA / "captures" / "vllm-0.32.0-sha256_cbor.json")
    right = ["--vllm", "0.32.0", "--algorithm", "sha256_cbor"]
    assert capture["hash_seed"] is None
    for wrong, flag in (({"algorithm": "sha256"}, "--algorithm sha256_cbor"), ({"hash_seed": "7"}, None)):
        out, err = run(file, "--query", json.dumps({"tokens": [1, 2, 3], **wrong}), *right)
        assert "UNKNOWN (hash-mismatch)" in out
        merged = {"vllm": "0.32.0", "algorithm": "sha256_cbor", "hash_seed": None} | wrong
        said = ", ".join(f"{name} {value!r}" for name, value in merged.items())
        assert f"{file}: it does not hash by {said}: nothing can match" in err
        overridden = [line for line in err.splitlines() if "counts, not" in line]
        assert overridden == ([f"the query's algorithm, 'sha256', counts, not {flag}"] if flag else [])
    # What the query alone says is enough, and what agrees needs no word.
    own = {"tokens": [1], "vllm": "0.32.0", "algorithm": "sha256_cbor", "hash_seed": None}
    for settings in ([], right):
        out, err = run(file, "--query", json.dumps(own), *settings)
        assert "EXACT" in out
        assert "hash by" not in err + out
        assert "counts" not in err


def test_a_live_engine() -> None:
    """Followed over sockets from its first batch: tiers apart, the hottest prefix, the prompt found."""
    hashes = HASHER.hash_tokens(TOKENS)
    numbers = HASHER.chain(TOKENS).external()
    assert len(hashes) == 10
    with Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", bind=True) as publisher:
        publisher.publish(batch(stored(numbers[:6], token_ids=tuple(TOKENS[: 6 * SIZE])), rank=0))
        publisher.publish(
            batch(stored(numbers[:8], medium="CPU"), stored(numbers[:1], medium="TAPE"), rank=0)
        )
        publisher.publish(batch(removed(numbers[5:6]), rank=0, ts=2.0))
        query = json.dumps({"tokens": TOKENS})
        assert publisher.replay_endpoint is not None
        out, err = run(
            publisher.endpoint, "--replay", publisher.replay_endpoint, "--from-seq", "start", "--idle-timeout", "2",
            "--query", query, "--vllm", "0.33.0", "--algorithm", "sha256_cbor", "-o", "jsonl",
        )  # fmt: skip
    del err
    found = records(out)
    assert found["engine"][0]["engine"] == publisher.endpoint
    assert found["engine"][0]["blocks"] == {"GPU": 5, "CPU": 8}
    assert found["match"][0]["by_tier"] == {"GPU": 5, "CPU": 3}
    assert found["prefix"][0]["hash"] == str(numbers[4])
    assert found["stats"][0]["unknown_media"] == {"TAPE": 1}


def test_a_live_map_in_a_terminal() -> None:
    """In a terminal the map is drawn as events come: engine, state, tiers, and the hottest prefix; Ctrl-C ends it."""
    numbers = HASHER.chain(TOKENS).external()
    terminal, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    with Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", bind=True) as publisher:
        assert publisher.replay_endpoint is not None
        publisher.publish(batch(stored(numbers[:6], token_ids=tuple(TOKENS[: 6 * SIZE])), rank=0))
        running = subprocess.Popen(
            [KVEVENTS, "index", publisher.endpoint, "--replay", publisher.replay_endpoint, "--from-seq", "start"],
            stdin=subprocess.DEVNULL, stdout=inner, stderr=subprocess.DEVNULL,
            env={**os.environ, "TERM": "xterm", "NO_COLOR": "1"},
        )  # fmt: skip
        os.close(inner)
        shown = b""

        def has(*words: str) -> bool:
            nonlocal shown
            if select.select([terminal], [], [], 0.05)[0]:
                shown += os.read(terminal, 1 << 16)
            return all(word.encode() in shown for word in words)

        try:
            wait_for(
                lambda: has(publisher.endpoint, "EXACT", "GPU 6", f"{numbers[5]:016x}"), "the map", seconds=20
            )
            publisher.publish(batch(removed(numbers[5:6]), stored(numbers[:2], medium="CPU"), rank=0, ts=2.0))
            wait_for(lambda: has("GPU 5, CPU 2", f"{numbers[4]:016x}"), "the change", seconds=20)
        finally:
            running.send_signal(signal.SIGINT)
            drained = b""
            while select.select([terminal], [], [], 5)[0]:
                try:
                    drained += os.read(terminal, 1 << 16)
                except OSError:  # it closed the terminal
                    break
            status = running.wait(10)
            os.close(terminal)
    assert status in (0, 130)
    assert b"Traceback" not in shown + drained


def test_a_block_size_that_none_has_ends_nothing(tmp_path: Path) -> None:
    """An event that names 2^62 tokens a block is refused and shows; the others are mapped and queried."""
    from kvhash.events.encode import encode_batch
    from kvhash.events.recording import RecordingWriter

    hashes = HASHER.hash_tokens(TOKENS)
    odd = stored([5], token_ids=(1,))
    path = tmp_path / "odd.kvrec"
    with RecordingWriter(path) as writer:
        for seq, event in enumerate(
            (msgspec.structs.replace(odd, block_size=1 << 62), stored([h[-8:] for h in hashes]))
        ):
            payload = encode_batch(batch(event, ts=float(seq)), "0.33.0")
            frames = [b"", seq.to_bytes(8, "big"), payload]
            writer.write(frames, endpoint="tcp://e:1", rank=0, received_ns=seq * 10**9)
    query = ["--query", json.dumps(TOKENS), "--vllm", "0.33.0", "--algorithm", "sha256_cbor", "-o", "jsonl"]
    found = records(run(str(path), *query)[0])
    assert found["match"][0]["blocks"] == 10
    assert found["engine"][0]["reasons"][0] in ("refused", "hash-mismatch")
    assert found["stats"][0]["refused"] == 1


def test_recorded_losses_show(tmp_path: Path) -> None:
    """A recording with a hole is DEGRADED, and a clear in it heals."""
    from kvhash.events.encode import encode_batch
    from kvhash.events.recording import RecordingWriter

    def write(name: str, *numbered: tuple[int, Any]) -> str:
        path = tmp_path / name
        with RecordingWriter(path) as writer:
            for seq, events in numbered:
                payload = encode_batch(batch(*events, ts=float(seq)), "0.33.0")
                writer.write(
                    [b"", seq.to_bytes(8, "big"), payload],
                    endpoint="tcp://e:1",
                    rank=0,
                    received_ns=seq * 10**9,
                )
        return str(path)

    holes = write("hole.kvrec", (0, [stored([1])]), (2, [stored([2], 1)]))
    out, err = run(holes)
    assert "DEGRADED (lost) since" in out
    assert "lost: 1" in err
    healed = write("healed.kvrec", (0, [stored([1])]), (2, [CLEARED]), (3, [stored([5])]))
    assert "EXACT  1 blocks" in run(healed)[0]
    late = write("late.kvrec", (7, [stored([1])]))
    assert "joined-late" in run(late)[0]


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        (["/nowhere/at/all"], 2, "no-such-file"),
        (["tcp://127.0.0.1:1", "file"], 2, "invalid-endpoint"),
        (["tcp://127.0.0.1:1", "--idle-timeout", "0.2"], 3, "no batch came"),
        (["-", "--query", "{"], 2, "invalid-json"),
        (["-", "--query", "/nope.json"], 2, "there is no file '/nope.json'"),
        (["-", "--query", "tokens"], 2, "expected a file, - for standard input, or JSON"),
        (["-", "--query", "{}"], 2, "invalid-request"),
        (["-", "--query", "[-1]"], 2, "invalid-token"),
        (["-", "--query", "[1]", "--algorithm", "md5"], 2, "unknown-algorithm"),
        (["-", "--block-size", "0"], 2, "invalid-block-size"),
        (["-", "--max-blocks", "0"], 2, "bound"),
        (["-", "--prefixes", "-1"], 2, "--prefixes: expected 0 or more, got -1"),
        (["-", "--query", "[1]", "--algorithm", "sha256", "--vllm", "0.28.0"], 2, "unknown-root"),
    ],
)
def test_bad_usage(arguments: list[str], status: int, word: str) -> None:
    """One line that says what was wrong, and the exit status of its kind."""
    _, err = run(*arguments, status=status, stdin=b"\x93\xcb@")
    assert word in err
