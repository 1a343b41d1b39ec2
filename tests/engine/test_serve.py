"""The engine as a process: ready, killed and restarted, ended gracefully, under many clients."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from kvhash import BlockHasher
from kvhash.events.records import Batch, Gap, Lost, Record, Restart
from kvhash.events.schema import AllBlocksCleared, BlockStored
from kvhash.events.subscriber import Source, Subscriber
from kvhash.events.verify import Verifier

from ..ports import free_base
from .clients import run_clients
from .running import DEADLINE_S, ROOT, Served, process, run_here, wait_for

SMALL = (
    "--block-size",
    "4",
    "--num-gpu-blocks-override",
    "3000",
    "--prefix-caching-hash-algo",
    "sha256_cbor",
)
QUIET = ("--uvicorn-log-level", "warning")


def events_on(port: int, *, apart: int = 1) -> tuple[str, ...]:
    """Return the flags that publish on a port and replay on one `apart` from it."""
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://*:{port + apart}",
    }
    return ("--kv-events-config", json.dumps(config))


def complete(url: str, prompt: list[int], rank: int = 0) -> None:
    """Run one request on a rank."""
    body, headers = {"prompt": prompt, "max_tokens": 1}, {"X-data-parallel-rank": str(rank)}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text


def next_record(subscriber: Subscriber, kind: type[Record] = Batch) -> Record:  # type: ignore[assignment]
    """Return the next record of a kind; fail when none comes."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        record = subscriber.poll(1)
        if isinstance(record, kind):
            return record
    raise AssertionError(f"no {kind.__name__} came")


def stored(record: Record) -> list[tuple[int | bytes, ...]]:
    """Return the hashes that a batch stores."""
    assert isinstance(record, Batch)
    return [event.block_hashes for event in record.batch.events if isinstance(event, BlockStored)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_kill_and_restart_shows_as_a_restart(tmp_path: Path, ranks: int) -> None:
    """After kill -9 a subscriber that stays connected sees Restart, then the new life's batches; no one needs help."""
    port = free_base(1, 2, 3)
    hasher = BlockHasher(block_size=4, algorithm="sha256_cbor", hash_seed="0")
    arguments = (*SMALL, *QUIET, "-dp", str(ranks), *events_on(port, apart=ranks))
    rank = ranks - 1
    source = Source(f"tcp://127.0.0.1:{port + rank}", f"tcp://127.0.0.1:{port + ranks + rank}")
    with Subscriber(source, from_seq="start", probe_idle_s=0.5) as subscriber:
        with process(tmp_path / "log", *arguments) as first:
            for start in (0, 100, 200):
                complete(first.url, list(range(start, start + 9)), rank)
            for start in (0, 100, 200):
                expected = tuple(hasher.chain(list(range(start, start + 9))).external())
                assert stored(next_record(subscriber)) == [expected]
            first.process.kill()
            first.process.wait(DEADLINE_S)
        with process(tmp_path / "log", *arguments) as second:
            complete(second.url, list(range(300, 309)), rank)
            restart = next_record(subscriber, Restart)
            assert isinstance(restart, Restart)
            assert restart.last_seq == 2
            batch = next_record(subscriber)
            assert isinstance(batch, Batch)
            assert (batch.seq, batch.batch.data_parallel_rank) == (0, rank)
            assert stored(batch) == [tuple(hasher.chain(list(range(300, 309))).external())]


@pytest.mark.parametrize("ranks", [1, 2])
def test_being_told_to_end_loses_no_event(tmp_path: Path, ranks: int) -> None:
    """SIGTERM under load: requests are ended, every queued batch goes out, and the exit code is 0."""
    port = free_base(1, 2, 3)
    log = tmp_path / "log"
    config = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"}
    arguments = (*SMALL, *QUIET, "--kv-events-config", json.dumps(config), "-dp", str(ranks))
    sources = [Source(f"tcp://127.0.0.1:{port + rank}") for rank in range(ranks)]
    records: list[Record] = []
    ended = threading.Event()

    def read(subscriber: Subscriber) -> None:
        """Keep what comes; once the engine has ended, until nothing more comes."""
        while (record := subscriber.poll(1)) is not None or not ended.is_set():
            records.extend(() if record is None else (record,))

    with process(log, *arguments) as served, Subscriber(sources, from_seq="start") as subscriber:
        reading = threading.Thread(target=read, args=(subscriber,), daemon=True)
        reading.start()
        numbers = itertools.count()

        def seen() -> bool:
            """Publish something new on each rank; whether each was heard of."""
            for rank in range(ranks):
                body = {"prompt": [next(numbers) % 30_000] * 9, "max_tokens": 1}
                headers = {"X-data-parallel-rank": str(rank)}
                httpx.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=DEADLINE_S)
            return {r.rank for r in records if isinstance(r, Batch)} == set(range(ranks))

        wait_for(seen, "the first batches")
        clients = threading.Thread(target=_run_until_refused, args=(served,), daemon=True)
        clients.start()
        wait_for(lambda: len(records) > 50, "some load")
        assert served.terminate() == 0
        ended.set()
        clients.join(DEADLINE_S)
        reading.join(DEADLINE_S)
    first_seen = {r.rank: r.seq for r in reversed(records) if isinstance(r, Batch)}
    for rank in range(ranks):
        seqs = [r.seq for r in records if isinstance(r, Batch) and r.rank == rank]
        assert seqs == list(range(first_seen[rank], first_seen[rank] + len(seqs)))
    assert not [r for r in records if isinstance(r, (Gap, Lost)) and r.first > max(first_seen.values())]
    assert "not published" not in log.read_text()
    assert "Traceback" not in log.read_text()


def _run_until_refused(served: Served) -> None:
    with httpx.Client(timeout=DEADLINE_S) as client:
        for number in range(100_000):
            try:
                client.post(
                    f"{served.url}/v1/completions",
                    json={"prompt": [1 + number % 30_000] * 9, "max_tokens": 1},
                )
            except httpx.HTTPError:
                return


def test_every_published_hash_is_the_sdks(tmp_path: Path) -> None:
    """A workload with evictions, checked by the verifier as `kvevents verify` does: all match, none is left open."""
    port = free_base(1)
    arguments = ("--block-size", "4", "--num-gpu-blocks-override", "60", "--emulate-vllm", "0.32.0")
    with process(tmp_path / "log", *arguments, *QUIET, *events_on(port)) as served:
        tally = run_clients(served.url, clients=8, seconds=1)
        assert tally.answered
        assert not tally.wrong
        verifier = Verifier(vllm="0.32.0", algorithm="sha256", block_size=4, hash_seed="0")
        source = Source(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}")
        reset = httpx.post(f"{served.url}/reset_prefix_cache", timeout=DEADLINE_S)
        assert reset.json() == {"success": True}
        with Subscriber(source, from_seq="start") as subscriber:
            while True:
                record = next_record(subscriber)
                assert isinstance(record, Batch)
                verifier.feed(record.batch)
                if AllBlocksCleared() in record.batch.events:
                    break
    assert verifier.verdicts["match"] > 50
    assert set(verifier.verdicts) == {"match"}


def resident_kib(served: Served) -> int:
    """Return the memory of a process in KiB."""
    status = Path(f"/proc/{served.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def serve_many(tmp_path: Path, *, seconds: float) -> None:
    """Run 200 clients; every request is answered rightly, and nothing stays behind."""
    arguments = (*SMALL, *QUIET, "--disable-uvicorn-access-log", "--max-num-seqs", "64")
    with process(tmp_path / "log", *arguments) as served:
        run_clients(served.url, clients=200, seconds=seconds / 5)
        before = resident_kib(served)
        tally = run_clients(served.url, clients=200, seconds=seconds * 4 / 5, seed=1)
        assert not tally.wrong, tally.wrong[:3]
        assert tally.answered > 200
        assert tally.cached_tokens > 0
        assert resident_kib(served) < before * 1.2 + 16_384
        text = wait_for(lambda: idle_metrics(served), "the end of every request")
        assert 'finished_reason="error",model_name="null"} 0.0' in text
        reset = httpx.post(f"{served.url}/reset_prefix_cache", timeout=DEADLINE_S)
        assert reset.json() == {"success": True}
        assert served.terminate() == 0
        assert "Traceback" not in served.log.read_text()


def idle_metrics(served: Served) -> str:
    """Return the metrics once nothing runs, waits or holds a block; else the empty text."""
    text = httpx.get(f"{served.url}/metrics", timeout=DEADLINE_S).text
    labels = '{engine="0",model_name="null"} 0.0'
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return text if all(f"{name}{labels}" in text for name in gauges) else ""


def test_two_hundred_clients(tmp_path: Path) -> None:
    """200 clients at once for some seconds: no request is lost or answered wrongly, no block and no memory stays."""
    serve_many(tmp_path, seconds=8)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_hundred_clients_for_five_minutes(tmp_path: Path) -> None:
    """The same for five minutes."""
    serve_many(tmp_path, seconds=300)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("serve",), "MODEL"),
        (("serve", "m", "--no-such-flag"), "--no-such-flag"),
        (("serve", "m", "--kv-events-config", "{"), "--kv-events-config"),
        (("serve", "m", "--kv-transfer-config", "[]"), "--kv-transfer-config"),
        (("serve", "m", "--emulate-vllm", "0.1.0"), "older"),
        (
            (
                "serve",
                "m",
                "--emulate-vllm",
                "0.9.2",
                "--kv-events-config",
                '{"enable_kv_cache_events":true}',
            ),
            "cannot publish the hashes of sha256",
        ),
        (
            ("serve", "m", "--emulate-vllm", "0.10.2", "--prefix-caching-hash-algo", "xxhash"),
            "has no algorithm",
        ),
        (("serve", "m", "--max-model-len", "70000"), "--num-gpu-blocks-override"),
        (("serve", "m", "--lora-modules", "a"), "NAME=PATH"),
        (("serve", "m", "--lora-modules", "a=b", "a=c"), "different names"),
        (("serve", "m", "--lora-modules", "m=b"), "other names than the model's"),
        (
            ("serve", "m", "--lora-modules", "x=b", "--served-model-name", "y", "x"),
            "other names than the model's",
        ),
        (("serve", "m", "--watermark", "nan"), "--watermark"),
        (("serve", "m", "--shutdown-timeout", "nan"), "--shutdown-timeout"),
        (("serve", "m", "--speculative-config", '{"method":"eagle"}'), "--speculative-config"),
        (("serve", "m", "--tokenizer", "./nowhere"), "no such tokenizer"),
        (("serve", "m", "--host", "no.such.host.invalid"), "cannot listen"),
        (
            ("serve", "m", "--kv-events-config", '{"enable_kv_cache_events":true,"endpoint":"udp://x"}'),
            "no endpoint",
        ),
    ],
)
def test_bad_flags_are_one_line_and_exit_2(arguments: tuple[str, ...], says: str) -> None:
    """What the engine cannot start with is said before it starts, without a traceback."""
    done = run_here(*arguments, *(("--port", "0") if len(arguments) > 1 else ()))
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "config",
    [
        {"max_position_embeddings": -4},
        {"max_position_embeddings": 1},
        {"vocab_size": 0},
        {"vocab_size": 1e999},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 2, "sliding_window": 0},
        {"eos_token_id": "x"},
    ],
    ids=str,
)
def test_bad_model_configuration_is_one_line_and_exit_2(tmp_path: Path, config: dict[str, object]) -> None:
    """Numbers that no model has are said before the server starts, with the file's name."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = run_here("serve", str(tmp_path), "--port", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "config.json is no model configuration" in done.stderr
    assert "Traceback" not in done.stderr


def test_template_that_does_not_parse_is_refused(tokenizer_folder: Path) -> None:
    """A mistake in --chat-template is said at the start, not to each client."""
    done = run_here(
        *("serve", "m", "--port", "0", "--tokenizer", str(tokenizer_folder)), "--chat-template", "{% for x %}"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "does not parse" in done.stderr


def test_a_rank_that_cannot_start_ends_all() -> None:
    """What is wrong in a rank's own process is said once, by the server, which starts nothing."""
    config = '{"enable_kv_cache_events":true,"endpoint":"udp://x"}'
    command = ("-m", "engine_ref", "serve", "m", "--port", "0", "-dp", "2", "--kv-events-config", config)
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, cwd=ROOT, timeout=DEADLINE_S
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "rank 0" in done.stderr
    assert "no endpoint" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    """The second server on a port ends with exit code 2 and says which."""
    with process(tmp_path / "log", *SMALL) as served:
        port = served.url.rsplit(":", 1)[1]
        done = run_here("serve", "m", "--port", port)
        assert done.returncode == 2
        assert f"cannot listen on 127.0.0.1:{port}" in done.stderr


def test_interrupt_ends_it_as_ctrl_c_does(tmp_path: Path) -> None:
    """SIGINT is a graceful end too; its exit code is 130."""
    with process(tmp_path / "log", *SMALL) as served:
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(DEADLINE_S) == 130
        assert "Traceback" not in served.log.read_text()


def post_raw(url: str, path: str, body: bytes, *, unsent: int = 0) -> socket.socket:
    """Send a request over a bare socket, all but the last `unsent` bytes of it; the answer is left unread."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.settimeout(DEADLINE_S)
    raw.connect((httpx.URL(url).host, httpx.URL(url).port))
    raw.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode())
    raw.sendall(body[: len(body) - unsent])
    return raw


def test_no_client_keeps_the_server_from_ending(tmp_path: Path, tokenizer_folder: Path) -> None:
    """A tokenizer at work for minutes, a client that never reads and one that never sends all delay no SIGTERM long."""
    flags = ("--tokenizer", str(tokenizer_folder), "--num-gpu-blocks-override", "20000", *SMALL[:2], *QUIET)
    stream = {"prompt": [1] * 9, "max_tokens": 2000, "n": 32, "stream": True}
    with process(tmp_path / "log", *flags) as served, contextlib.ExitStack() as stack:
        for path, body, unsent in (
            ("/tokenize", json.dumps({"prompt": "x" * 40_000_000}).encode(), 0),
            ("/v1/completions", json.dumps(stream).encode(), 0),
            ("/v1/completions", json.dumps(stream).encode(), 5),
        ):
            stack.enter_context(post_raw(served.url, path, body, unsent=unsent))
        wait_for(lambda: not idle_metrics(served), "the stream")
        begun = time.monotonic()
        assert served.terminate() == 0
        assert time.monotonic() - begun < 20
        assert "Traceback" not in served.log.read_text()


def test_vllms_spelling_of_flags_is_understood(tmp_path: Path) -> None:
    """Underscores, several values after one flag, and flags of the model's computation, as in vLLM's command lines."""
    arguments = (
        "--block_size",
        "4",
        "--lora-modules",
        "a=p",
        '{"name":"b","path":"q"}',
        "-dp",
        "1",
        "--served-model-name",
        "x",
        "y",
    )
    port = free_base(1)
    more = (
        *events_on(port),
        "-tp",
        "2",
        "--gpu-memory-utilization",
        "0.9",
        "--enforce-eager",
        "--enable-lora",
    )
    with process(tmp_path / "log", *arguments, *more) as served:
        cards = httpx.get(f"{served.url}/v1/models", timeout=DEADLINE_S).json()["data"]
        assert [card["id"] for card in cards] == ["x", "y", "a", "b"]
        assert served.ready["ranks"][0]["endpoint"] == f"tcp://127.0.0.1:{port}"
        assert "without effect here" in served.log.read_text()
