"""Engines in processes of their own, stub engines that misbehave on purpose, and a router with a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from kvhash_router.app import make_app
from kvhash_router.config import EngineConfig, HashSettings, ModelConfig, RouterConfig
from kvhash_router.residency import Residency

from kvhash.index import ResidencyIndex

from ..ports import free_base
from ..waiting import DEADLINE_S, wait_for

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "examples" / "router" / "demo_engine.py"


def environment() -> dict[str, str]:
    """Return the environment of children: what is importable here is importable there."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class EngineProcess:
    """A reference engine in a process of its own."""

    def __init__(self, name: str, *options: str) -> None:
        self.name = name
        self._options = options
        base = free_base(1, 2)
        self.url = f"http://127.0.0.1:{base}"
        self.events, self.replay = (f"tcp://127.0.0.1:{base + offset}" for offset in (1, 2))
        self.restart()

    @property
    def config(self) -> EngineConfig:
        """Return the engine as the router is told of it."""
        return EngineConfig(url=self.url, events=self.events, replay=self.replay, name=self.name)

    def kill(self) -> None:
        """End the process as a crash does."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(DEADLINE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def restart(self) -> None:
        """Start (again) at the same address, with an empty cache."""
        where = ("--port", self.url.rpartition(":")[2], "--events", self.events, "--replay", self.replay)
        self._process = subprocess.Popen(
            [sys.executable, str(ENGINE), *self._options, *where],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.split() == [self.url, self.events, self.replay], f"engine {self.name} did not start"

    def counts(self) -> dict[str, int]:
        """Return what the engine counted."""
        return dict(httpx.get(f"{self.url}/debug/counts", trust_env=False).json())


@contextlib.contextmanager
def engines(count: int, *options: str) -> Iterator[list[EngineProcess]]:
    """Run `count` engines, named e0, e1, ..."""
    started: list[EngineProcess] = []
    try:
        for i in range(count):
            started.append(EngineProcess(f"e{i}", *options))
        yield started
    finally:
        for engine in started:
            with contextlib.suppress(OSError, ValueError):
                engine.kill()


class StubEngine:
    """An HTTP engine in a thread that does what a test tells it: `behave` gets a request's writer and its body."""

    def __init__(self, name: str, behave: Callable[[asyncio.StreamWriter, dict[str, Any]], Any]) -> None:
        self.name = name
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.hung_up = threading.Event()
        #: Whether a health check is answered; else its connection is broken off.
        self.healthy: Callable[[], bool] = lambda: True
        self._behave = behave
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(DEADLINE_S)

    @property
    def config(self) -> EngineConfig:
        """Return the engine as the router is told of it."""
        return EngineConfig(url=self.url, name=self.name)

    def _run(self, ready: threading.Event) -> None:
        async def serve() -> None:
            server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self._stop = asyncio.Event()
            ready.set()
            await self._stop.wait()
            server.close()

        self._loop.run_until_complete(serve())
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(
                (int(line[15:]) for line in head.lower().split("\r\n") if line.startswith("content-length:")),
                0,
            )
            body = await reader.readexactly(length)
            path = head.split(" ")[1]
            if path == "/health":
                if not self.healthy():
                    writer.transport.abort()
                    return
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            else:
                value = json.loads(body)
                self.requests.append((path, value))
                pairs = (line.partition(": ") for line in head.lower().split("\r\n")[1:])
                self.headers.append({name: content for name, _, content in pairs})
                waiting = asyncio.ensure_future(reader.read())
                waiting.add_done_callback(lambda _: self.hung_up.set())
                await self._behave(writer, value)
            await writer.drain()
            writer.close()

    def close(self) -> None:
        """Stop serving; a second time does nothing."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(DEADLINE_S)


def stream_head(writer: asyncio.StreamWriter) -> None:
    """Begin a chunked stream of events."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")


def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write one chunk; an empty one ends the body."""
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def event(text: str) -> bytes:
    """Return one event with a piece of text."""
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


def whole(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    """Write a whole answer."""
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)


class RunningRouter:
    """A router under uvicorn, in a thread, and a client of it."""

    def __init__(self, app: Any) -> None:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        logging.getLogger("uvicorn").propagate = True  # so that a test sees what the server logs
        self._server = uvicorn.Server(
            uvicorn.Config(
                app, log_config=None, log_level="warning", access_log=False, timeout_graceful_shutdown=1
            )
        )
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        wait_for(lambda: self._server.started, "the router to start")
        self.client = httpx.Client(base_url=self.url, timeout=DEADLINE_S, trust_env=False)

    def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        """Ask for a completion."""
        return self.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, **fields})

    def where(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """Return where a request would go."""
        answer = self.client.post("/debug/residency", json={"prompt": prompt, **fields})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def state(self, engine: str) -> dict[str, Any]:
        """Return what the router knows of an engine."""
        return dict(self.client.get("/debug/residency").json()["engines"][engine])

    def metric(self, start: str) -> float:
        """Return the sum of the router's metrics whose lines begin so."""
        lines = [line for line in self.client.get("/metrics").text.splitlines() if line.startswith(start)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def close(self) -> None:
        """Stop it."""
        self.client.close()
        self._server.should_exit = True
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def router(
    served: list[Any],
    *,
    model: ModelConfig | None = None,
    index: Any = None,
    residency: Residency | None = None,
    app: dict[str, Any] | None = None,
    **config: Any,
) -> Iterator[RunningRouter]:
    """Run a router in front of `served`."""
    settings = HashSettings(algorithm="sha256_cbor", hash_seed="0")
    checked = RouterConfig(
        models={"demo": model or ModelConfig(hash=settings)},
        engines=tuple(one.config for one in served),
        **config,
    ).checked()
    residency = residency or Residency(ResidencyIndex() if index is None else index, backoff_s=0.1)
    running = RunningRouter(make_app(checked, residency=residency, watch_s=0.05, **(app or {})))
    try:
        yield running
    finally:
        running.close()


@contextlib.contextmanager
def stubs(*behaviours: Callable[[asyncio.StreamWriter, dict[str, Any]], Any]) -> Iterator[list[StubEngine]]:
    """Run stub engines, named s0, s1, ..."""
    started = [StubEngine(f"s{i}", behave) for i, behave in enumerate(behaviours)]
    try:
        yield started
    finally:
        for stub in started:
            stub.close()


def router_process(
    served: list[EngineProcess], *options: str, config: Path | None = None
) -> subprocess.Popen[str]:
    """Start the router's command in front of `served`; the last word of its first line on stderr is its address.

    `config`: the file that says all, in the place of flags.
    """
    flags = ["--port", "0"]
    if config is None:
        flags += ["--model", "demo", "--hash-seed", "0", "--prefix-caching-hash-algo", "sha256_cbor"]
    else:
        flags += ["--config", str(config)]
    for one in served:
        flags += ["--engine", f"{one.url},events={one.events},replay={one.replay},name={one.name}"]
    return subprocess.Popen(
        [sys.executable, "-m", "kvhash_router", *flags, *options],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
