"""The ``kvevents`` command as a user runs it, against real sockets and files."""
# ruff: noqa: E501 - the table of bad usage keeps its lines

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from kvhash.events.decode import decode_batch
from kvhash.events.publisher import Publisher
from kvhash.events.recording import Recording, RecordingWriter
from kvhash.events.schema import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch

from ..data_files import CAPTURES, capture
from ..ports import free_base

KVEVENTS = str(Path(sys.executable).with_name("kvevents"))
ANY = "tcp://127.0.0.1:*"
SETTINGS = {
    name: ["--vllm", "0.32.0", "--algorithm", capture(name)["algo"]]
    + ([] if capture(name)["hash_seed"] is None else ["--hash-seed", capture(name)["hash_seed"]])
    for name in CAPTURES
}


def run(*arguments: str, stdin: bytes = b"", status: int | None = 0, timeout: float = 60) -> tuple[str, str]:
    """Run the command; return (stdout, stderr) and check the exit status."""
    done = subprocess.run(
        [KVEVENTS, *arguments], input=stdin, capture_output=True, check=False, timeout=timeout
    )
    out, err = done.stdout.decode(), done.stderr.decode()
    assert "Traceback" not in err, err
    if status is not None:
        assert done.returncode == status, (done.returncode, out, err)
    return out, err


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return each recorded server's stream as a recording."""
    folder = tmp_path_factory.mktemp("recordings")
    result = {}
    for name in CAPTURES:
        result[name] = folder / f"{name}.kvrec"
        with RecordingWriter(result[name]) as writer:
            for i, frames in enumerate(capture(name)["frames"]):
                writer.write(
                    [bytes.fromhex(frame) for frame in frames],
                    endpoint="tcp://engine:5557",
                    received_ns=1_700_000_000_000_000_000 + i * 10_000_000,
                )
    return result


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the command in the background; end it afterwards."""
    with subprocess.Popen([KVEVENTS, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def _publish_until(publisher: Publisher, done: Callable[[], bool], timeout: float = 30) -> None:
    """Publish batches until `done`, or fail at the deadline."""
    deadline = time.monotonic() + timeout
    number = 0
    while not done():
        assert time.monotonic() < deadline
        number += 1
        event = BlockStored((number,), None, tuple(range(20)), 20, medium="GPU", group_idx=0)
        publisher.publish(EventBatch(time.time(), (event, BlockRemoved((number,), medium="GPU"))))
        time.sleep(0.02)


def _tail(publisher: Publisher, *arguments: str) -> tuple[str, str]:
    with started("tail", publisher.endpoint, *arguments) as process:
        _publish_until(publisher, lambda: process.poll() is not None)
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.returncode == 0
        return process.stdout.read().decode(), process.stderr.read().decode()


# --- tail -----------------------------------------------------------------------------------------------------


def test_tail_prints_events_of_a_running_engine() -> None:
    """Only data on stdout, one line an event, and it ends after the count."""
    with Publisher(ANY, release="0.33.0") as publisher:
        out, err = _tail(publisher, "--count", "4")
        assert [line.split()[4] for line in out.splitlines()] == ["stored", "removed"] * 2
        assert err == ""
        out, _ = _tail(publisher, "--count", "2", "-o", "jsonl", "--type", "removed", "--medium", "gpu")
    assert [json.loads(line)["event"]["type"] for line in out.splitlines()] == ["BlockRemoved"] * 2


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        (["--tokens", "none"], []),
        ([], list(range(8))),
        (["--tokens", "all"], list(range(20))),
        (["--redact"], []),
    ],
)
def test_tail_shows_tokens_as_asked(options: list[str], tokens: list[int]) -> None:
    """None, a few, all, or hidden; how many there were is told in any case."""
    with Publisher(ANY, release="0.33.0") as publisher:
        out, _ = _tail(publisher, "--count", "1", "-o", "jsonl", "--type", "stored", *options)
    record = json.loads(out)
    assert record["v"] == 1
    assert record["event"]["token_ids"] == tokens
    assert record["event"]["num_tokens"] == 20


def test_tail_fetches_what_came_before_and_pipes_into_decode() -> None:
    """--from-seq start with the replay socket; raw lines decode to the same events."""
    with Publisher(ANY, ANY, release="0.33.0") as publisher:
        for number in range(10):
            publisher.publish(EventBatch(1.0 + number, (BlockRemoved((number,)), AllBlocksCleared())))
        assert publisher.replay_endpoint is not None
        arguments = ["tail", publisher.endpoint, "--replay", publisher.replay_endpoint, "--from-seq", "start"]
        out, _ = run(*arguments, "--count", "20", "-o", "jsonl")
        assert [json.loads(line)["seq"] for line in out.splitlines()] == [str(i // 2) for i in range(20)]
        raw, _ = run(*arguments, "--count", "20", "-o", "raw")
        decoded, _ = run("decode", "-", "-o", "jsonl", stdin=raw.encode())
        assert [json.loads(line)["event"] for line in decoded.splitlines()] == [
            json.loads(line)["event"] for line in out.splitlines()
        ]
        out, _ = run(*arguments, "--count", "1", "-o", "jsonl", "--hash", "7", "--type", "removed")
        assert json.loads(out)["event"]["block_hashes"] == ["7"]


def test_gaps_stand_in_band() -> None:
    """A hole in the numbers is a gap and then a loss among the records of jsonl, and on stderr for text."""
    for output in ("jsonl", "text"):
        with Publisher(ANY, ANY, release="0.33.0") as publisher:
            assert publisher.replay_endpoint is not None
            for seq in (0, 1, 5):
                publisher.publish_payload(_payload(seq), seq=seq)
            out, err = run(
                "tail", publisher.endpoint, "--replay", publisher.replay_endpoint, "--from-seq", "start",
                "--count", "3", "-o", output,
            )  # fmt: skip
        if output == "jsonl":
            kinds = [json.loads(line)["record"] for line in out.splitlines()]
            assert kinds == ["event", "event", "gap", "lost", "event"]
            lost = json.loads(out.splitlines()[3])
            assert (lost["first"], lost["last"], lost["reason"]) == ("2", "4", "not-in-buffer")
        else:
            assert "lost: 2 to 4 (3 batches)" in err
            assert len(out.splitlines()) == 3


def _payload(seq: int) -> bytes:
    from kvhash.events.encode import encode_batch

    return encode_batch(EventBatch(100.0 + seq, (BlockRemoved((seq,)),), 0), "0.33.0")


def test_nothing_in_time_is_status_3() -> None:
    """An engine that says nothing: a hint on stderr, nothing on stdout."""
    with Publisher(ANY, release="0.33.0") as publisher:
        out, err = run("tail", publisher.endpoint, "--idle-timeout", "0.3", status=3)
        assert out == ""
        assert "kvevents doctor" in err


def test_ctrl_c_and_a_closed_pipe_end_at_once() -> None:
    """Ctrl-C is status 130 without a traceback; a reader that goes away ends tail quietly, events or not."""
    with Publisher(ANY, release="0.33.0") as publisher:
        with started("tail", publisher.endpoint) as process:
            assert process.stdout is not None
            line: list[bytes] = []
            reader = Thread(target=lambda: line.append(process.stdout.readline()), daemon=True)  # type: ignore[union-attr]
            reader.start()
            _publish_until(publisher, lambda: bool(line))
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 130
            assert process.stderr is not None
            assert b"Traceback" not in process.stderr.read()
        with started("tail", publisher.endpoint) as process:
            assert process.stdout is not None
            process.stdout.close()
            assert process.wait(10) == 0
            assert process.stderr is not None
            assert process.stderr.read() == b""


# --- files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CAPTURES)
def test_decode_reads_every_recorded_frame(name: str, recordings: dict[str, Path], tmp_path: Path) -> None:
    """A recording, hex lines, a JSON object of frames and raw bytes give the same events."""
    run_ = capture(name)
    expected = sum(len(decode_batch(bytes.fromhex(f[2])).events) for f in run_["frames"])
    out, err = run("decode", str(recordings[name]), "-o", "jsonl", "--strict", "--tokens", "all")
    assert len(out.splitlines()) == expected
    assert err == ""
    hex_lines = "\n".join(" ".join(frame) for frame in run_["frames"]).encode()
    from_hex, _ = run("decode", "-", "-o", "jsonl", "--tokens", "all", stdin=hex_lines)
    (tmp_path / "frames.json").write_text(json.dumps({"frames": run_["frames"]}))
    from_json, _ = run("decode", str(tmp_path / "frames.json"), "-o", "jsonl", "--tokens", "all")

    def events(text: str) -> list[Any]:
        return [json.loads(line)["event"] for line in text.splitlines()]

    assert events(from_hex) == events(from_json) == events(out)
    (tmp_path / "one.bin").write_bytes(bytes.fromhex(run_["frames"][0][2]))
    one, _ = run("decode", str(tmp_path / "one.bin"), "-o", "jsonl", "--tokens", "all")
    assert events(one) == events(out)[: len(events(one))]


def test_decode_reports_what_it_cannot_read(tmp_path: Path, recordings: dict[str, Path]) -> None:
    """Broken lines and cut recordings are counted, the rest is printed; --strict makes it status 4."""
    good = capture(CAPTURES[0])["frames"][0][2]
    out, err = run("decode", "-", stdin=f"{good}\nc1\n{good}\n".encode())
    assert out.count("stored") == 2
    assert "1 messages or events could not be decoded" in err
    run("decode", "-", "--strict", stdin=b"c1\n", status=4)
    cut = tmp_path / "cut.kvrec"
    cut.write_bytes(recordings[CAPTURES[0]].read_bytes()[:-5])
    out, err = run("decode", str(cut))
    assert out
    assert "could not be decoded" in err
    _, err = run("decode", str(tmp_path / "none"), "-", stdin=b"", status=2)
    assert err.count("kvevents: ") == 2


@pytest.mark.parametrize("name", CAPTURES)
def test_verify_recomputes_every_published_hash(name: str, recordings: dict[str, Path]) -> None:
    """Each recorded server's stream matches to the last block, the adapter's once its path is given."""
    arguments = ["verify", str(recordings[name]), *SETTINGS[name]]
    out, _ = run(*arguments, "--lora-path", "sql=adapters/sql")
    assert "(100.0 %)" in out.splitlines()[0]
    assert len(out.splitlines()) == 1
    if "lora" in name:
        out, _ = run(*arguments)
        assert "not derivable: lora-path-unknown" in out
    record = json.loads(run(*arguments, "-o", "jsonl")[0].splitlines()[-1])
    assert record["mismatch"] == 0
    assert record["match"] > 0


def test_verify_with_wrong_settings_is_status_1(recordings: dict[str, Path]) -> None:
    """Another algorithm matches nothing, and that is said."""
    name = next(name for name in CAPTURES if "cbor" in name)
    out, _ = run("verify", str(recordings[name]), "--vllm", "0.32.0", "--algorithm", "sha256", status=1)
    assert out.splitlines()[-2].startswith("0 of ") or "mismatch" in out
    run("verify", "no-such-file", status=2)
    run("verify", str(recordings[name]), "tcp://127.0.0.1:1", status=2)


def test_export(recordings: dict[str, Path], tmp_path: Path) -> None:
    """JSON lines and Parquet, by the name of the target; anything else needs --format."""
    name = CAPTURES[1]
    target = tmp_path / "events.jsonl"
    _, err = run("export", str(recordings[name]), str(target))
    assert len(target.read_text().splitlines()) == len(capture(name)["frames"])
    assert "written" in err
    parquet = tmp_path / "events.parquet"
    run("export", str(recordings[name]), str(parquet))
    assert parquet.read_bytes()[:4] == b"PAR1"
    run("export", str(recordings[name]), str(tmp_path / "x.txt"), status=2)


def test_record_then_replay_then_record_again(recordings: dict[str, Path], tmp_path: Path) -> None:
    """A recording served at full speed is recorded again frame by frame."""
    name = CAPTURES[0]
    port = free_base(1)
    endpoint, replay = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"
    copy = tmp_path / "copy.kvrec"
    count = len(capture(name)["frames"])
    arguments = ["--speed", "full", "--endpoint", endpoint, "--replay-endpoint", replay, "--linger", "60"]
    with started("replay", str(recordings[name]), *arguments):
        _, err = run(
            "record", "-w", str(copy), endpoint, "--replay", replay, "--from-seq", "start", "--count", str(count)
        )  # fmt: skip
    assert f"{count} messages recorded" in err
    assert [r.frames[1:] for r in Recording(copy)] == [r.frames[1:] for r in Recording(recordings[name])]


def test_stats_summary(recordings: dict[str, Path]) -> None:
    """Counts by engine and rank, printed once where stdout is no terminal."""
    port = free_base(1)
    endpoint = f"tcp://127.0.0.1:{port}"
    name = CAPTURES[1]
    with started(
        "replay",
        str(recordings[name]),
        "--speed",
        "full",
        "--endpoint",
        endpoint,
        "--delay",
        "2",
        "--linger",
        "9",
    ):
        out, _ = run("stats", endpoint, "--idle-timeout", "4", "-o", "jsonl")
    record = json.loads(out)
    events = [e for f in capture(name)["frames"] for e in decode_batch(bytes.fromhex(f[2])).events]
    assert record["stored"] == sum(len(e.block_hashes) for e in events if isinstance(e, BlockStored))
    assert record["removed"] == sum(len(e.block_hashes) for e in events if isinstance(e, BlockRemoved))
    assert record["batches"] == len(capture(name)["frames"])


def test_publish_in_another_releases_shape() -> None:
    """JSON lines become that release's wire shape; a line that it cannot carry is refused, the others go out."""
    port = free_base(1)
    lines = [
        {"ts": 1.0, "events": [{"type": "AllBlocksCleared"}]},
        {"ts": 2.0, "events": [{"type": "BlockRemoved", "block_hashes": ["5"], "locality": "LOCAL"}]},
        {"ts": 3.0, "events": [{"type": "BlockRemoved", "block_hashes": ["6"], "medium": "GPU"}]},
    ]
    arguments = ["--endpoint", f"tcp://127.0.0.1:{port}", "--replay-endpoint", f"tcp://127.0.0.1:{port + 1}"]
    with subprocess.Popen(
        [KVEVENTS, "publish", "-", "--vllm", "0.20.0", *arguments, "--delay", "0", "--linger", "20"],
        stdin=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            assert process.stdin is not None
            process.stdin.write("\n".join(map(json.dumps, lines)).encode())
            process.stdin.close()
            out, _ = run(
                "tail", f"tcp://127.0.0.1:{port}", "--replay", f"tcp://127.0.0.1:{port + 1}", "--from-seq", "start",
                "--count", "2", "-o", "raw",
            )  # fmt: skip
        finally:
            process.kill()
    batches = [decode_batch(bytes.fromhex(line)) for line in out.splitlines()]
    assert [batch.layout for batch in batches] == ["array", "array"]
    assert [batch.ts for batch in batches] == [1.0, 3.0]


# --- doctor ---------------------------------------------------------------------------------------------------


@contextmanager
def _http(routes: dict[str, str]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = routes.get(self.path)
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write((body or "").encode())

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_doctor_of_a_healthy_stream_and_of_wrong_expectations(recordings: dict[str, Path]) -> None:
    """The settings of a recorded server are found; each that a router has otherwise is named, with status 1."""
    name = next(name for name in CAPTURES if "cbor" in name)
    port = free_base(1)
    endpoint, replay = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"
    serve = ["--speed", "full", "--endpoint", endpoint, "--replay-endpoint", replay, "--linger", "60"]
    routes = {
        "/health": "",
        "/version": '{"version":"0.32.0"}',
        "/v1/models": '{"data":[{"id":"tiny"}]}',
        "/metrics": 'vllm:prefix_cache_queries_total{engine="0"} 10.0\nvllm:prefix_cache_hits_total{engine="0"} 4.0\n',
    }
    follow = [endpoint, "--replay", replay, "--from-seq", "start", "--duration", "3", "-o", "jsonl"]
    with started("replay", str(recordings[name]), *serve), _http(routes) as http:
        out, _ = run("doctor", *follow, "--http", http)
        found = {json.loads(line)["code"]: json.loads(line) for line in out.splitlines()}
        assert "algorithm sha256_cbor, PYTHONHASHSEED unset, 32 tokens a block" in found["settings"]["seen"]
        assert "vLLM 0.32.0, models tiny" in found["http"]["seen"]
        assert "4 of 10" in found["prefix-cache"]["seen"]
        expect = '{"algorithm":"sha256","block_size":16,"hash_seed":"0","ranks":[0,1]}'
        out, _ = run("doctor", *follow, "--expect", expect, status=1)
        problems = {
            json.loads(line)["code"] for line in out.splitlines() if json.loads(line)["level"] == "problem"
        }
        assert problems == {
            "expected-algorithm",
            "expected-block_size",
            "expected-hash_seed",
            "expected-ranks",
        }


def test_doctor_of_silence() -> None:
    """Nothing arrives: status 3 and the causes in order; an engine that does not answer is said first."""
    with Publisher(ANY, release="0.33.0") as publisher:
        http = f"http://127.0.0.1:{free_base(1)}"
        out, _ = run("doctor", publisher.endpoint, "--duration", "0.5", "--http", http, status=3)
    assert [line.split()[1] for line in out.splitlines() if line.startswith("problem")] == [
        "http-unreachable:",
        "silence:",
    ]
    assert out.index("kv-events-config") < out.index("both sides connect")


# --- bad usage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["tail", "tcp://*:5557"], "invalid-endpoint"),
        (["tail", "tcp://0.0.0.0:5557"], "invalid-endpoint"),
        (["tail", "engine:5557"], "invalid-endpoint"),
        (["tail", "tcp://127.0.0.1:5557", "--from-seq", "x"], "invalid-from-seq"),
        (["tail", "tcp://127.0.0.1:5557", "--from-seq", "start"], "invalid-from-seq"),
        (["tail", "tcp://127.0.0.1:5557", "--dp-ranks", "7-0"], "invalid-ranks"),
        (["tail", "tcp://127.0.0.1:5557", "--count", "0"], "invalid-count"),
        (["tail", "tcp://127.0.0.1:5557", "-o", "raw", "--redact"], "invalid-output"),
        (["verify", "tcp://127.0.0.1:5557", "--lora-path", "x", "--block-size", "4", "--duration", "0"], "invalid-lora"),
        (["doctor", "tcp://127.0.0.1:5557", "--expect", '{"algo":1}'], "invalid-request"),
        (["doctor", "tcp://127.0.0.1:5557", "--expect", "{"], "invalid-json"),
        (["doctor", "tcp://127.0.0.1:5557", "--http", "ftp://x"], "invalid-address"),
        (["doctor", "tcp://127.0.0.1:5557", "--lora-path", "x"], "invalid-lora"),
        (["replay", "no-such-file"], "io"),
        (["export", "no-such-file", "x.jsonl"], "io"),
        (["record", "-w", "/no/such/folder/x", "tcp://127.0.0.1:5557"], "io"),
        (["publish", "no-such-file", "--delay", "0", "--endpoint", "ipc:///tmp/kvhash-no-such/sock"], "invalid-endpoint"),
    ],
)  # fmt: skip
def test_bad_usage_is_one_coded_line(arguments: list[str], code: str) -> None:
    """Each fault has its code and exit status 2; nothing on stdout."""
    out, err = run(*arguments, status=2)
    assert out == ""
    assert f"error [{code}]: " in err


def test_a_remote_engine_is_warned_about() -> None:
    """Following another machine says once that token ids travel in clear."""
    _, err = run("tail", "tcp://192.0.2.1:5557", "--duration", "0.1", status=3)
    assert err.count("in clear") == 1


def test_version() -> None:
    """The same two lines as `kvhash --version`."""
    out, _ = run("--version")
    assert out.startswith("kvevents ")
    assert os.linesep in out


def test_decode_into_head_is_quiet(recordings: dict[str, Path]) -> None:
    """`kvevents decode ... | head -1` ends without a word."""
    done = subprocess.run(
        ["sh", "-c", f"{KVEVENTS} decode {recordings[CAPTURES[1]]} --tokens all | head -1"],
        capture_output=True,
        check=False,
    )
    assert done.stdout.count(b"\n") == 1
    assert done.stderr == b""
