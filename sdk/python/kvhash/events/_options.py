"""Numbers that callers give to subscribers and publishers, checked before a socket is opened."""

from __future__ import annotations

import math

from kvhash._errors import UsageError

__all__ = ["MOST_MESSAGES", "check_number", "check_seconds"]

#: What ZeroMQ keeps for one side at most: its mark is a signed integer of 32 bits.
MOST_MESSAGES = (1 << 31) - 1


def check_seconds(name: str, value: object) -> None:
    """Raise UsageError unless `value` is a finite number of seconds of at least 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        good = number and math.isfinite(value) and value >= 0  # type: ignore[arg-type, operator]
    except OverflowError:  # an integer that no float holds
        good = False
    if not good:
        raise UsageError(
            f"{name} is a number of seconds of at least 0, got {value!r:.40}", code="invalid-option"
        )


def check_number(name: str, value: object, *, most: int = MOST_MESSAGES) -> None:
    """Raise UsageError unless `value` is an integer from 0 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise UsageError(f"{name} is an integer from 0 to {most}, got {value!r:.40}", code="invalid-option")
