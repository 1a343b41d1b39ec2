"""Canonical CBOR (RFC 8949 section 4.2.1, as `cbor2.dumps(value, canonical=True)` writes it).

Every head is as short as it can be. A preimage needs seven shapes only:

====================  ==========================================
value                 bytes
====================  ==========================================
None                  ``f6``
integer 0..2^64-1     head of major type 0
integer -2^64..-1     head of major type 1, holding ``-1 - n``
larger integer        tag 2 (or 3) and the magnitude as bytes
bytes                 head of major type 2, then the bytes
text                  head of major type 3, then UTF-8
tuple                 head of major type 4, then the items
====================  ==========================================
"""

from __future__ import annotations

from collections.abc import Sequence

from ._values import Ref, Value

__all__ = ["CborTokens", "encode_cbor", "head"]

_UINT, _NINT, _BYTES, _TEXT, _ARRAY, _TAG = 0x00, 0x20, 0x40, 0x60, 0x80, 0xC0
_NULL = b"\xf6"
_POSITIVE_BIGNUM, _NEGATIVE_BIGNUM = 2, 3


def head(major: int, argument: int) -> bytes:
    """Return the shortest head of a data item: major type (already shifted) and argument, 0 to 2^64 - 1."""
    if argument < 24:
        return bytes((major | argument,))
    if argument < 1 << 8:
        return bytes((major | 24, argument))
    if argument < 1 << 16:
        return bytes((major | 25,)) + argument.to_bytes(2, "big")
    if argument < 1 << 32:
        return bytes((major | 26,)) + argument.to_bytes(4, "big")
    return bytes((major | 27,)) + argument.to_bytes(8, "big")


def _encode_int(value: int) -> bytes:
    major, magnitude, tag = (
        (_UINT, value, _POSITIVE_BIGNUM) if value >= 0 else (_NINT, -1 - value, _NEGATIVE_BIGNUM)
    )
    if magnitude < 1 << 64:
        return head(major, magnitude)
    payload = magnitude.to_bytes((magnitude.bit_length() + 7) // 8, "big")
    return head(_TAG, tag) + head(_BYTES, len(payload)) + payload


def encode_cbor(value: Value) -> bytes:
    """Serialize `value` as canonical CBOR.

    Raises TypeError for a value that no preimage holds; that is a fault of the caller's code, not of its input.
    """
    if isinstance(value, Ref):
        value = value.value
    if value is None:
        return _NULL
    if isinstance(value, int):
        return _encode_int(value)
    if isinstance(value, bytes):
        return head(_BYTES, len(value)) + value
    if isinstance(value, str):
        payload = value.encode()
        return head(_TEXT, len(payload)) + payload
    if isinstance(value, tuple):
        return head(_ARRAY, len(value)) + b"".join(map(encode_cbor, value))
    raise TypeError(f"a preimage holds no {type(value).__name__}")


class CborTokens:
    """The tuple of token ids of a block, with the head of each id remembered.

    A vocabulary has some 10^5 ids and a prompt uses each many times; looking a head up is several times faster
    than making it. At most `LIMIT` heads are kept.
    """

    LIMIT = 1 << 18

    class _Heads(dict[int, bytes]):
        def __missing__(self, token: int) -> bytes:
            written = head(_UINT, token)
            if len(self) < CborTokens.LIMIT:
                self[token] = written
            return written

    def __init__(self) -> None:
        self._heads = self._Heads()

    def encode(self, tokens: Sequence[int]) -> bytes:
        """Serialize the token ids (each 0 to 2^64 - 1) as one array."""
        return head(_ARRAY, len(tokens)) + b"".join(map(self._heads.__getitem__, tokens))
