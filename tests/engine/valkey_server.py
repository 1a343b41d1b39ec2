"""A real Valkey (or Redis) server for the tests of the tier that several engines share."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

from engine_ref.connectors import ValkeyTier

from .connector_engine import until

__all__ = ["PROGRAM", "Server"]

PROGRAM = shutil.which("valkey-server") or shutil.which("redis-server")


class Server:
    """A server on a unix socket in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        assert PROGRAM is not None, "KVHASH_REQUIRE_ALL=1 needs valkey-server or redis-server"
        self.socket = directory / "valkey.sock"
        self.url = f"unix://{self.socket}"
        self._directory = directory
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, empty, and wait until it answers."""
        assert PROGRAM is not None
        options = ["--port", "0", "--unixsocket", str(self.socket), "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(
            [PROGRAM, *options, "--dir", str(self._directory)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        probe = ValkeyTier(url=self.url, timeout=1.0)
        probe.bind(b"probe")
        until(lambda: self.socket.exists() and probe.put(b"probe", b"x") is not None)
        probe.close()

    def kill(self) -> None:
        """Kill it; its socket stays, and nobody answers there."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def pause(self) -> None:
        """Let it hang: connections are taken, answers do not come."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
