"""How a page is kept outside the engine: a header that says whose it is, and a checksum over all of it.

::

    magic "KVPG" | version (1) | fingerprint (16) | key length (1) | key | page length (8) | xxh3-128 (16) | page

The fingerprint is a digest of the runner's, the version is 1, numbers in brackets are bytes.

Integers are big-endian. The key is the block hash and its KV cache group id; the checksum covers everything but
itself. A page is given back only under the fingerprint and the key that it was sealed with.
"""

from __future__ import annotations

import hashlib

import xxhash

__all__ = ["BadPageError", "fingerprint_digest", "open_page", "seal_page"]

_MAGIC = b"KVPG\x01"
_SUM = 16


class BadPageError(Exception):
    """Bytes that are not the page asked for. ``reason``: ``truncated``, ``corrupt`` or ``foreign``."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def fingerprint_digest(fingerprint: str) -> bytes:
    """Return the 16 bytes that stand for a runner's page fingerprint."""
    return hashlib.sha256(fingerprint.encode()).digest()[:16]


def seal_page(key: bytes, page: bytes, *, fingerprint: bytes) -> bytes:
    """Return a page with its header; `fingerprint` is a `fingerprint_digest`."""
    head = _head(key, fingerprint) + len(page).to_bytes(8, "big")
    return head + xxhash.xxh3_128_digest(head + page) + page


def open_page(data: bytes, key: bytes, *, fingerprint: bytes) -> bytes:
    """Return the page in `data`; raises BadPageError unless it is whole and sealed with this key and fingerprint."""
    head = _head(key, fingerprint)
    start = len(head) + 8 + _SUM
    if not data.startswith(_MAGIC[: len(data)]):
        raise BadPageError("corrupt")
    if len(data) < start:
        raise BadPageError("truncated")
    end = start + int.from_bytes(data[len(head) : len(head) + 8], "big")
    if not data.startswith(head):
        # Whole under its own header, it is another's; else it is broken.
        size = len(_MAGIC) + 16 + 1 + data[len(_MAGIC) + 16]
        raise BadPageError("foreign" if _sound(data, size) else "corrupt")
    if len(data) < end:
        raise BadPageError("truncated")
    if not _sound(data, len(head)):
        raise BadPageError("corrupt")
    return data[start:]


def _head(key: bytes, fingerprint: bytes) -> bytes:
    return _MAGIC + fingerprint + bytes([len(key)]) + key


def _sound(data: bytes, head: int) -> bool:
    start = head + 8 + _SUM
    if len(data) != start + int.from_bytes(data[head : head + 8], "big"):
        return False
    return xxhash.xxh3_128_digest(data[: head + 8] + data[start:]) == data[head + 8 : start]
