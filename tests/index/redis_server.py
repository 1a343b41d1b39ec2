"""A real Redis or Valkey server for the tests, on a socket of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import redis


def program() -> str:
    """Return the server's program; where there is none the test fails if everything is required, else is skipped."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        message = "no redis-server or valkey-server: the shared index is not tested"
        if os.environ.get("KVHASH_REQUIRE_ALL") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return found


class RedisServer:
    """A server that can be stopped and started again, with or without what it held."""

    def __init__(self, *, cluster: bool = False) -> None:
        self._program = program()
        self._cluster = cluster
        self._folder = Path(tempfile.mkdtemp(prefix="kvhash-redis-"))
        self._process: subprocess.Popen[bytes] | None = None
        self.start()
        if cluster:
            self.client().execute_command("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
            deadline = time.monotonic() + 10
            while b"cluster_state:ok" not in self.client().execute_command("CLUSTER", "INFO"):
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def start(self) -> None:
        """Start it and wait until it answers."""
        options = [
            "--port",
            "0",
            "--unixsocket",
            str(self._folder / "s"),
            "--dir",
            str(self._folder),
            "--save",
            "",
        ]
        if self._cluster:
            # A node of a cluster needs a port; nobody connects to it.
            options[1] = _free_port()
            options += ["--cluster-enabled", "yes", "--bind", "127.0.0.1"]
        else:
            options += ["--appendonly", "yes", "--appendfsync", "no"]
        self._process = subprocess.Popen([self._program, *options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while True:
            try:
                self.client().ping()
            except redis.exceptions.ConnectionError:
                assert time.monotonic() < deadline
                assert self._process.poll() is None, "the server has ended"
                time.sleep(0.02)
            else:
                return

    def stop(self, *, forget: bool = False) -> None:
        """Stop it; `forget`: it will come back empty."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(10)
        if forget:
            shutil.rmtree(self._folder)
            self._folder.mkdir()

    def client(self) -> redis.Redis:
        """Return a new client."""
        return redis.Redis(unix_socket_path=str(self._folder / "s"), socket_timeout=10, retry=None)

    def close(self) -> None:
        """End it and remove its folder."""
        if self._process is not None and self._process.poll() is None:
            self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def _free_port() -> str:
    import socket

    with socket.socket() as probe:
        # A cluster node listens on the port plus 10,000 too.
        for _ in range(100):
            probe.close()
            probe = socket.socket()
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            if port < 55_000:
                return str(port)
    raise AssertionError("no free port below 55,000")
