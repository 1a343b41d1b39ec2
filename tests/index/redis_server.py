"""A real Redis or Valkey server for the tests, on a socket of its own."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import redis
import redis.cluster

from kvhash.index.shared import SharedResidencyIndex

from ..interop.toolchain import need
from ..ports import free_base
from ..waiting import wait_for


class RedisServer:
    """A server that can be stopped and started again, with or without what it held."""

    def __init__(self, *, cluster: bool = False) -> None:
        self._program = need("redis-server", "valkey-server")
        self._cluster = cluster
        self._folder = Path(tempfile.mkdtemp(prefix="kvhash-redis-"))
        self._process: subprocess.Popen[bytes] | None = None
        self.start()
        if cluster:
            self.client().execute_command("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
            wait_for(
                lambda: b"cluster_state:ok" in self.client().execute_command("CLUSTER", "INFO"),
                "the cluster to be whole",
                seconds=10,
            )

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
            # A node of a cluster needs a port, and listens on its port plus 10,000 too; nobody connects to it.
            options[1] = str(free_base(10_000))
            options += ["--cluster-enabled", "yes", "--bind", "127.0.0.1"]
        else:
            options += ["--appendonly", "yes", "--appendfsync", "no"]
        self._process = subprocess.Popen([self._program, *options], stdout=subprocess.DEVNULL)
        wait_for(self._is_up, "the server", seconds=20)

    def _is_up(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, "the server has ended"
        return _answers(self.client())

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


def shared(server: RedisServer, **options: Any) -> SharedResidencyIndex:
    """Return an index on the server, which tries again at once when it was away."""
    return SharedResidencyIndex(server.client(), retry_s=0.0, **options)


class RedisCluster:
    """Three nodes that share the slots of one cluster."""

    def __init__(self) -> None:
        self._program = need("redis-server", "valkey-server")
        self._folder = Path(tempfile.mkdtemp(prefix="kvhash-cluster-"))
        # A node listens on its port plus 10,000 too.
        base = free_base(1, 2, 10_000, 10_001, 10_002)
        self.ports = [base + node for node in range(3)]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self.start()
            self._join()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Start all nodes and wait until each answers."""
        for port in self.ports:
            folder = self._folder / str(port)
            folder.mkdir(exist_ok=True)
            options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
            command = [self._program, *options, "--cluster-enabled", "yes", "--appendonly", "yes"]
            self._processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        for node in self.nodes():
            wait_for(lambda: _answers(node), "a node of the cluster")  # noqa: B023 - called at once

    def nodes(self) -> list[redis.Redis]:
        """Return a new client of each node."""
        return [redis.Redis(port=port, socket_timeout=10, retry=None) for port in self.ports]

    def _join(self) -> None:
        for node, (low, high) in zip(self.nodes(), ((0, 5460), (5461, 10922), (10923, 16383)), strict=True):
            node.execute_command("CLUSTER", "ADDSLOTSRANGE", low, high)
        for port in self.ports[1:]:
            self.nodes()[0].execute_command("CLUSTER", "MEET", "127.0.0.1", port)
        self.settle()

    def settle(self) -> None:
        """Wait until every node knows all of them and all slots are served."""

        def settled() -> bool:
            infos = [node.execute_command("CLUSTER", "INFO") for node in self.nodes()]
            return all(b"cluster_state:ok" in info and b"known_nodes:3" in info for info in infos)

        wait_for(settled, "the cluster to be whole")

    def client(self) -> redis.cluster.RedisCluster:
        """Return a new client of the whole cluster."""
        return redis.cluster.RedisCluster(host="127.0.0.1", port=self.ports[0], socket_timeout=10)

    def stop(self) -> None:
        """Stop all nodes; what they hold is there again when they are started."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(10)
        self._processes.clear()

    def close(self) -> None:
        """End it and remove its folder."""
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.exceptions.ConnectionError:
        return False
