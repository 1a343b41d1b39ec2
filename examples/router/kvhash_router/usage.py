"""The token counts that an engine reports with an answer (OpenAI's ``usage``)."""

from __future__ import annotations

from typing import Any

__all__ = ["cached_tokens", "count"]

#: No request has more tokens; what an engine reports beyond is not counted.
_MOST_TOKENS = 1 << 40


def cached_tokens(usage: dict[str, Any]) -> int | None:
    """Return the prompt tokens that were in the engine's cache, or None where it does not say."""
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return count(cached)


def count(value: Any) -> int | None:
    """Return a number of tokens that an engine reports, or None where it is none that can be."""
    return value if type(value) is int and 0 <= value <= _MOST_TOKENS else None
