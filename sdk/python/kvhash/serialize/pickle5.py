"""Pickle protocol 5, byte for byte as CPython's C pickler writes a preimage.

What the stream looks like::

    80 05                       PROTO 5
    95 <8 bytes, little-endian> FRAME, with the length of what follows in this frame
    ...                         the value
    2e                          STOP

Three rules make the bytes what they are:

* **Memo.** Text, bytes and non-empty tuples are numbered in the order in which they are finished (``94``,
  MEMOIZE). An *object* met again is written as ``68 n`` (BINGET) or ``6a nnnn`` (LONG_BINGET). Identity counts,
  not equality: see `Ref`. Integers and None are never numbered. The empty text and the empty bytes are one object
  each in every CPython.
* **Frames.** Before each value the pickler looks at the open frame; once that holds 64 KiB or more it is closed
  and the next byte opens a new one. A frame of fewer than 4 bytes is written without its header.
* **Large payloads.** Text or bytes of 64 KiB or more leave the frame: the frame is closed, the payload is written
  bare, and the next byte opens a new frame.

Source: CPython's ``Modules/_pickle.c``, observed through `pickle.dumps` by the tests.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ._values import Ref, Value

__all__ = ["PickleTokens", "encode_pickle5", "encode_pickle_int"]

PROTO = b"\x80\x05"
STOP = b"."
NONE = b"N"
MARK = b"("
FRAME = b"\x95"
MEMOIZE = b"\x94"
EMPTY_TUPLE = b")"
TUPLE = b"t"
SHORT_TUPLES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}

FRAME_SIZE_TARGET = 64 * 1024
FRAME_SIZE_MIN = 4


def encode_pickle_int(value: int) -> bytes:
    """Return one integer as its shortest opcode and operand: BININT1, BININT2, BININT, LONG1 or LONG4."""
    if 0 <= value < 1 << 8:
        return b"K" + bytes((value,))
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    # Two's complement in the fewest bytes that keep the sign.
    magnitude = value if value >= 0 else ~value
    payload = value.to_bytes(magnitude.bit_length() // 8 + 1, "little", signed=True)
    if len(payload) < 1 << 8:
        return b"\x8a" + bytes((len(payload),)) + payload
    return b"\x8b" + struct.pack("<i", len(payload)) + payload


def _head(value: str | bytes, length: int) -> bytes:
    """Return the opcode and length of a text or bytes object of `length` bytes."""
    short, medium, large = (b"\x8c", b"X", b"\x8d") if isinstance(value, str) else (b"C", b"B", b"\x8e")
    if length < 1 << 8:
        return short + bytes((length,))
    if length < 1 << 32:
        return medium + struct.pack("<I", length)
    return large + struct.pack("<Q", length)


class _Writer:
    """One pickle being written: what is finished, the open frame, and the memo."""

    def __init__(self) -> None:
        self._out = bytearray(PROTO)
        self._frame: bytearray | None = None
        # Objects in the order of their numbers. The key is the id of a Ref, or the empty value itself.
        self._memo: dict[int | str | bytes, int] = {}
        self._numbered = 0

    def finish(self) -> bytes:
        self._write(STOP)
        self._close_frame()
        return bytes(self._out)

    def save(self, value: Value) -> None:
        if self._frame is not None and len(self._frame) >= FRAME_SIZE_TARGET:
            self._close_frame()
        if value is None:
            self._write(NONE)
        elif isinstance(value, int):
            self._write(encode_pickle_int(value))
        elif isinstance(value, tuple):
            self._save_tuple(value)
        elif isinstance(value, (str, bytes, Ref)):
            self._save_object(value)
        else:
            raise TypeError(f"a preimage holds no {type(value).__name__}")

    def _save_tuple(self, items: tuple[Value, ...]) -> None:
        if not items:
            self._write(EMPTY_TUPLE)
            return
        closing = SHORT_TUPLES.get(len(items))
        if closing is None:
            self._write(MARK)
        for item in items:
            self.save(item)
        self._write(closing or TUPLE)
        self._memoize(None)

    def _save_object(self, value: str | bytes | Ref) -> None:
        content = value.value if isinstance(value, Ref) else value
        identity = content if not content else id(value) if isinstance(value, Ref) else None
        if identity is not None and identity in self._memo:
            number = self._memo[identity]
            self._write(b"h" + bytes((number,)) if number < 1 << 8 else b"j" + struct.pack("<I", number))
            return
        payload = content.encode() if isinstance(content, str) else content
        header = _head(content, len(payload))
        if len(payload) < FRAME_SIZE_TARGET:
            self._write(header + payload)
        else:
            self._close_frame()
            self._out += header + payload
        self._memoize(identity)

    def _memoize(self, identity: int | str | bytes | None) -> None:
        if identity is not None:
            self._memo[identity] = self._numbered
        self._numbered += 1
        self._write(MEMOIZE)

    def _write(self, data: bytes) -> None:
        if self._frame is None:
            self._frame = bytearray()
        self._frame += data

    def _close_frame(self) -> None:
        if self._frame is None:
            return
        if len(self._frame) >= FRAME_SIZE_MIN:
            self._out += FRAME + struct.pack("<Q", len(self._frame))
        self._out += self._frame
        self._frame = None


def encode_pickle5(value: Value) -> bytes:
    """Serialize `value` as ``pickle.dumps(value, protocol=5)`` would, with identities as `Ref` says.

    Raises TypeError for a value that no preimage holds; that is a fault of the caller's code, not of its input.
    """
    writer = _Writer()
    writer.save(value)
    return writer.finish()


class PickleTokens:
    """The block preimage ``(parent, tokens, None)`` in one piece, with each token's bytes remembered.

    Only for a preimage that fits one frame; the general writer above is the definition. At most `LIMIT` tokens
    are kept.
    """

    LIMIT = 1 << 18

    class _Ints(dict[int, bytes]):
        def __missing__(self, token: int) -> bytes:
            written = encode_pickle_int(token)
            if len(self) < PickleTokens.LIMIT:
                self[token] = written
            return written

    def __init__(self) -> None:
        self._ints = self._Ints()

    def encode(self, parent: int | bytes, tokens: Sequence[int]) -> bytes:
        """Serialize ``(parent, tuple(tokens), None)``; each token is 0 to 2^64 - 1."""
        if len(tokens) < 4 or len(tokens) > 4096:
            return encode_pickle5((parent, tuple(tokens), None))
        opening = (
            encode_pickle_int(parent)
            if isinstance(parent, int)
            else _head(parent, len(parent)) + parent + MEMOIZE
        )
        body = b"".join(
            (
                opening,
                MARK,
                *map(self._ints.__getitem__, tokens),
                TUPLE,
                MEMOIZE,
                NONE,
                b"\x87",
                MEMOIZE,
                STOP,
            )
        )
        return b"".join((PROTO, FRAME, struct.pack("<Q", len(body)), body))
