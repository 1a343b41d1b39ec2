"""Inputs too long to write down: a stream of bytes from SHA-256 over a counter, and token ids read from it.

Byte ``i`` of the stream of a seed is byte ``i mod 32`` of ``SHA-256(seed as UTF-8 || (i div 32) as 8 bytes
big-endian)``. A token id is the next 4 bytes, big-endian, modulo the size of the vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

__all__ = ["byte_stream", "expand", "tokens"]


def byte_stream(seed: str) -> Iterator[bytes]:
    """Yield the stream of `seed`, 32 bytes at a time, without end."""
    head = seed.encode()
    counter = 0
    while True:
        yield hashlib.sha256(head + counter.to_bytes(8, "big")).digest()
        counter += 1


def tokens(seed: str, count: int, vocabulary: int) -> list[int]:
    """Return `count` token ids, each 0 to `vocabulary` - 1."""
    return list(_tokens(seed, count, vocabulary))


@lru_cache(maxsize=16)
def _tokens(seed: str, count: int, vocabulary: int) -> tuple[int, ...]:
    ids: list[int] = []
    blocks = byte_stream(seed)
    while len(ids) < count:
        block = next(blocks)
        ids += [int.from_bytes(block[i : i + 4], "big") % vocabulary for i in range(0, 32, 4)]
    return tuple(ids[:count])


def expand(value: Any) -> Any:
    """Return a request with generated tokens written out.

    ``{"generate": {"seed": text, "count": n, "vocabulary": v}}`` in the place of a list of tokens.
    """
    if isinstance(value, dict) and isinstance(value.get("tokens"), dict):
        spec = value["tokens"]["generate"]
        return {**value, "tokens": tokens(spec["seed"], spec["count"], spec["vocabulary"])}
    return value
