"""Engines for the tests: a server on a real socket in this process, or a process of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from engine_ref.build import make_engine
from engine_ref.cli import main
from engine_ref.event_config import KVEventsConfig
from engine_ref.flags import Adapter
from engine_ref.metrics import EngineMetrics
from engine_ref.model_info import ModelInfo
from engine_ref.options import EngineOptions
from engine_ref.server import Frontend, make_app
from engine_ref.server.prompts import Prompts
from engine_ref.server.text import EngineTokenizer

from ..waiting import DEADLINE_S, wait_for

ROOT = Path(__file__).parents[2]
EVENTS = KVEventsConfig(
    enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*"
)


def small_options(**changes: Any) -> EngineOptions:
    """Return the options of a small engine."""
    given: dict[str, Any] = {
        "model": "null",
        "block_size": 4,
        "num_gpu_blocks": 40,
        "max_model_len": 64,
        "prefix_caching_hash_algo": "sha256_cbor",
        "hash_seed": "0",
        "kv_events_config": EVENTS,
    }
    return EngineOptions(**{**given, **changes})


@contextlib.contextmanager
def serving(
    options: EngineOptions | None = None,
    *,
    tokenizer: EngineTokenizer | None = None,
    adapters: dict[str, str] | None = None,
    make_rank: Any = None,
    ranks: int = 1,
    dev_mode: bool = True,
) -> Iterator[tuple[httpx.Client, Frontend]]:
    """Serve in this process; yields a client and the front."""
    options = options or small_options()
    if tokenizer is not None:
        options = EngineOptions(
            **{
                **{name: getattr(options, name) for name in options.__slots__},
                "info": ModelInfo(vocab_size=tokenizer.vocab_size),
            }
        )
    named = {n: Adapter(n, path, i) for i, (n, path) in enumerate((adapters or {}).items(), 1)}
    metrics = EngineMetrics("null", ranks=ranks, max_loras=len(named) or None)
    frontend = Frontend(
        make_rank or (lambda rank, deliver: make_engine(options, deliver, rank=rank)), metrics
    )
    prompts = Prompts(options=options, model_names=("null",), adapters=named, tokenizer=tokenizer)
    app = make_app(frontend, prompts, dev_mode=dev_mode)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        wait_for(lambda: server.started, "the server")
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        try:
            with httpx.Client(base_url=url, timeout=DEADLINE_S) as client:
                yield client, frontend
        finally:
            server.should_exit = True
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


@dataclass
class Served:
    """A server process: where it is, and what it said when it was ready."""

    process: subprocess.Popen[bytes]
    ready: dict[str, Any]
    log: Path

    @property
    def url(self) -> str:
        """Where it answers."""
        return str(self.ready["http"])

    def terminate(self) -> int:
        """End it as an operator does; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)


def start_process(
    log: Path, *arguments: str, model: str = "null", environment: dict[str, str] | None = None
) -> Served:
    """Start `python -m engine_ref serve` and wait until it is ready."""
    env = {**os.environ, "PYTHONHASHSEED": "0", "VLLM_SERVER_DEV_MODE": "1", **(environment or {})}
    with log.open("ab") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine_ref", "serve", model, "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=env,
            cwd=ROOT,
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        process.wait(DEADLINE_S)
        raise AssertionError(f"the server ended at once: {log.read_text()}")
    return Served(process, json.loads(line), log)


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def run_here(*arguments: str, data: str = "") -> Done:
    """Run a command of the engine to its end in this process, which is faster than in one of its own."""
    out, err = io.StringIO(), io.StringIO()
    stdin = io.TextIOWrapper(io.BytesIO(data.encode()))
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", ["engine_ref", *arguments])
        patch.setattr(sys, "stdin", stdin)
        code = main()
    return Done(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def process(log: Path, *arguments: str, **options: Any) -> Iterator[Served]:
    """Run a server process; it is gone afterwards, whatever happened."""
    served = start_process(log, *arguments, **options)
    try:
        yield served
    finally:
        served.process.kill()
        served.process.wait(DEADLINE_S)
        assert served.process.stdout is not None
        served.process.stdout.close()
