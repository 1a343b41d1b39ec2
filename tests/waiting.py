"""Waiting for a condition with a deadline, for the tests of every layer: nothing sleeps for a guessed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["DEADLINE_S", "wait_for"]

DEADLINE_S = 30.0


def wait_for(condition: Callable[[], Any], what: str, *, seconds: float = DEADLINE_S) -> Any:
    """Return the condition's first true value; fail when it does not come within `seconds`."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} did not come within {seconds:g} s"
        time.sleep(0.01)
    return value
