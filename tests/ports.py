"""Ports for tests that must name them, or take them again after a restart.

They are below the range from which the system takes ports for outgoing connections: another test's client cannot have
one while it is free, nor can a client that tries to connect to it meet itself.
"""

from __future__ import annotations

import contextlib
import random
import socket

__all__ = ["free_base", "free_endpoints"]


def free_base(*offsets: int) -> int:
    """Return a port so that it and the ports at `offsets` behind it are free on loopback and as wildcard."""
    generator = random.Random()
    for _ in range(1000):
        base = generator.randrange(15_000, 32_000)
        with contextlib.ExitStack() as stack:
            try:
                for offset in (0, *offsets):
                    taken = stack.enter_context(socket.socket())
                    taken.bind(("0.0.0.0", base + offset))
            except OSError:
                continue
            return base
    raise AssertionError("no free ports")


def free_endpoints() -> tuple[str, str]:
    """Return endpoints on loopback for a publisher and its replays."""
    base = free_base(1)
    return f"tcp://127.0.0.1:{base}", f"tcp://127.0.0.1:{base + 1}"
