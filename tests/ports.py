"""Ports for tests that must name them: below the range from which the system takes its own."""

from __future__ import annotations

import contextlib
import random
import socket

__all__ = ["free_base"]


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
