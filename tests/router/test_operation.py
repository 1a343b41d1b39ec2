"""The router as a process that someone operates: its log's disk, rotation, signals, files, and limits of the system."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp.client_reqrep import ConnectionKey
from kvhash_router.config import EngineConfig, HealthConfig
from kvhash_router.decision import Policy
from kvhash_router.decision_log import DecisionLog
from kvhash_router.fleet import Fleet
from kvhash_router.health import HealthChecker

from .running import DEADLINE_S, engines, event, router, router_process, stubs, wait_for, whole

OK = b'{"choices":[{"index":0,"text":"ok"}],"usage":{"prompt_tokens":3,"completion_tokens":1}}'
PROMPT = list(range(200))


async def answers(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
    """Answer."""
    whole(writer, 200, OK)


def test_full_disk_costs_lines_of_the_log_and_no_request(caplog: pytest.LogCaptureFixture) -> None:
    """A log that cannot be written is counted and said once; requests go on, and the end is no error."""
    log = DecisionLog("/dev/full")
    with stubs(answers) as served, router(served, app={"decision_log": log}) as running:
        for _ in range(3):
            assert running.complete([1, 2, 3]).status_code == 200
        wait_for(lambda: running.metric("kvhash_router_log_dropped_total") == 3, "the lines to be dropped")
    assert [record.message for record in caplog.records if "decision log" in record.message] == [
        "the decision log cannot be written, its lines are dropped: [Errno 28] No space left on device"
    ]
    assert not [record for record in caplog.records if record.exc_info]


def test_line_that_was_cut_by_a_full_disk_spoils_no_other(tmp_path: Path) -> None:
    """What was written of it is ended, so that every other line can be read."""
    log = DecisionLog(str(tmp_path / "log"))
    file = log._file

    class Filling:
        """Takes half of one line, then has no room, then has again."""

        state = 0

        def write(self, data: Any) -> int:
            self.state += 1
            if self.state == 2:
                raise OSError(errno.ENOSPC, "full")
            return file.write(bytes(data[: len(data) // 2] if self.state == 1 else data))

        def __getattr__(self, name: str) -> Any:
            return getattr(file, name)

    log._file = Filling()  # type: ignore[assignment]
    for number in range(3):
        assert log.write({"number": number})
    log.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == ['{"numb', '{"number":1}', '{"number":2}']
    assert log.dropped == 1


def test_log_that_was_moved_away_is_begun_anew(tmp_path: Path) -> None:
    """Rotation needs no signal: what was moved keeps its lines, its name gets a new file, and so does one removed."""
    path = tmp_path / "log"
    log = DecisionLog(str(path))

    def add(number: int) -> None:
        assert log.write({"n": number})
        wait_for(lambda: path.exists() and f'"n":{number}}}\n' in path.read_text(), "the line")

    add(1)
    path.rename(tmp_path / "log.1")
    add(2)
    path.unlink()
    add(3)
    log.close()
    assert (tmp_path / "log.1").read_text() == '{"n":1}\n'
    assert path.read_text() == '{"n":3}\n'


def test_file_that_is_half_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    """However a file is written, in pieces or emptied first, engines stay until it can be used, and then are its."""
    file = tmp_path / "router.json"
    models = {"demo": {"hash": {"algorithm": "sha256_cbor", "hash_seed": "0"}}}
    text = json.dumps({"models": models, "engines": [{"url": "http://127.0.0.1:1", "name": "new"}]})
    file.write_text("{}")
    with stubs(answers) as served, router(served, app={"config_file": file}) as running:

        def names() -> list[str]:
            return list(running.client.get("/debug/residency").json()["engines"])

        def errors() -> float:
            return running.metric("kvhash_router_config_errors_total")

        for number, end in enumerate((0, 1, len(text) // 2, len(text) - 1), 1):
            file.write_text(text[:end])
            wait_for(lambda number=number: errors() == number, "the piece to be refused")
            assert names() == ["s0"]
        file.unlink()
        wait_for(lambda: errors() == 5, "the missing file to be counted")
        file.write_text(text)
        wait_for(lambda: names() == ["new"], "the whole file")


def test_signals_lose_no_request(tmp_path: Path) -> None:
    """SIGHUP reads the file anew and ends nothing; after SIGTERM streams have time, and are told when it is over."""
    lines: list[str] = []
    refused: list[httpx.Response] = []

    async def slow(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
        if value.get("stream"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + event("one"))
        await asyncio.sleep(600)

    def stream(url: str) -> None:
        body = {"prompt": [1], "stream": True}
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, trust_env=False, timeout=DEADLINE_S
        ) as answer:
            lines.extend(line for line in answer.iter_lines() if line)

    def ask(url: str) -> None:
        body = {"prompt": [1]}
        refused.append(httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=DEADLINE_S))

    file = tmp_path / "router.json"
    models = {"demo": {"hash": {"algorithm": "sha256_cbor", "hash_seed": "0"}}}
    with stubs(slow) as served:
        file.write_text(json.dumps({"models": models, "engines": [{"url": served[0].url}]}))
        process = router_process(
            [], "--drain-timeout", "1", "--decision-log", str(tmp_path / "log"), config=file
        )
        assert process.stderr is not None
        url = process.stderr.readline().split()[-1]
        clients = [threading.Thread(target=one, args=(url,)) for one in (stream, ask)]
        for client in clients:
            client.start()
        wait_for(lambda: len(served[0].requests) == 2 and lines, "both to be under way")
        process.send_signal(signal.SIGHUP)
        assert "was read again: 1 engines" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
        for client in clients:
            client.join(DEADLINE_S)
        said = process.stderr.read()
        process.stderr.close()
    assert "Traceback" not in said
    outcomes = [json.loads(line)["outcome"] for line in (tmp_path / "log").read_text().splitlines()]
    assert outcomes == ["router-stopped"] * 2
    assert [json.loads(line[6:]).get("error", {}).get("type") for line in lines] == [None, "router_stopped"]
    assert refused[0].status_code == 503
    assert refused[0].json()["error"]["message"] == "the router was stopped"


def test_engine_that_comes_back_with_other_settings_is_found_out() -> None:
    """Its events are judged anew: a restart with another seed makes it unknown, with the reason."""
    with engines(1) as started, router(started, health=HealthConfig(interval_s=0.1)) as running:
        running.complete(PROMPT)
        wait_for(lambda: running.where(PROMPT)["matched_tokens"] == {"e0": 192}, "the blocks")
        started[0].kill()
        started[0]._options = ("--hash-seed", "7")
        wait_for(lambda: not running.state("e0")["up"], "the engine to be taken out")
        started[0].restart()
        wait_for(lambda: running.state("e0")["up"], "the engine to be back")
        wait_for(lambda: running.where(PROMPT)["matched_tokens"] == {"e0": 0}, "its cache to be forgotten")
        running.complete(PROMPT)
        wait_for(lambda: running.state("e0")["knowledge"] == "unknown", "the mismatch")
        assert running.state("e0")["reason"].startswith("hash-mismatch")


def test_want_of_files_here_is_no_fault_of_an_engine() -> None:
    """A connection that cannot be made because this process has no file left takes no engine out."""

    class Client:
        """Connects to nothing, for a reason."""

        number = errno.EMFILE

        def get(self, *_: Any, **__: Any) -> Any:
            key = ConnectionKey("h", 1, False, None, None, None, None)
            raise aiohttp.ClientConnectorError(key, OSError(self.number, "no"))

    fleet = Fleet(policy=Policy())
    fleet.set_engines([EngineConfig(url="http://h:1", name="a", model="m")])
    client = Client()
    health = HealthChecker(fleet, client, HealthConfig(failures=1), came_back=lambda _: None)  # type: ignore[arg-type]
    for number, up in ((errno.EMFILE, True), (errno.EADDRNOTAVAIL, True), (errno.ECONNREFUSED, False)):
        client.number = number
        asyncio.run(health.check_all())
        assert fleet.engines["a"].up is up


def test_checks_that_had_no_time_here_take_no_engine_out(caplog: pytest.LogCaptureFixture) -> None:
    """While the router itself is held up a check that times out says nothing; one that has its time does."""

    class Client:
        """Answers no check in time; once it holds everything up, for longer than a check may take."""

        holds_up = True

        @contextlib.asynccontextmanager
        async def get(self, *_: Any, **__: Any) -> Any:
            await asyncio.sleep(0.2)
            if self.holds_up:
                time.sleep(0.3)  # what holds up an event loop
                await asyncio.sleep(0.15)
            raise asyncio.TimeoutError
            yield

    async def check() -> None:
        task = asyncio.ensure_future(health.run())
        while client.holds_up:
            await asyncio.sleep(0.01)
            if "could not be checked in time" in caplog.text:
                assert fleet.engines["a"].up
                client.holds_up = False
        while fleet.engines["a"].up:
            await asyncio.sleep(0.01)
        task.cancel()

    fleet = Fleet(policy=Policy())
    fleet.set_engines([EngineConfig(url="http://h:1", name="a", model="m")])
    client = Client()
    config = HealthConfig(failures=1, timeout_s=0.5, interval_s=0.01)
    health = HealthChecker(fleet, client, config, came_back=lambda _: None)  # type: ignore[arg-type]
    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))
    assert fleet.engines["a"].last_failure == "health check: TimeoutError"
