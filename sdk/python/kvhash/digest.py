"""The digests: SHA-256 and XXH3-128, bytes in, bytes out, most significant byte first."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import xxhash

__all__ = ["Digest", "sha256", "xxh3_128"]

#: A digest function.
Digest = Callable[[bytes], bytes]


def sha256(data: bytes) -> bytes:
    """Return the SHA-256 digest of `data`, 32 bytes."""
    return hashlib.sha256(data).digest()


def xxh3_128(data: bytes) -> bytes:
    """Return the XXH3 128-bit digest of `data`, seed 0, 16 bytes big-endian (as `xxhash.xxh3_128_digest`)."""
    return xxhash.xxh3_128_digest(data)
