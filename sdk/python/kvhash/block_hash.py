"""The forms a block hash takes: in the chain, with a group id, and published in events.

In the chain it is the digest (bytes) from vLLM 0.10.2 on, an integer before. Published it is the low 64 bits of
the big-endian digest as an unsigned integer, or the raw bytes (``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NewType, TypeAlias, overload

from ._errors import InvalidBlockSizeError, InvalidHashError

__all__ = [
    "BlockHash",
    "BlockHashView",
    "BlockHashWithGroupId",
    "ChainValue",
    "ExternalForm",
    "external_hash",
    "get_block_hash",
    "get_group_id",
    "hash_text",
    "json_hash",
    "low64",
    "make_block_hash_with_group_id",
    "parse_hash",
    "to_signed",
    "to_unsigned",
]

#: The digest of one block, 32 bytes (sha256*) or 16 (xxhash*).
BlockHash = NewType("BlockHash", bytes)
#: A digest with its KV cache group's id behind it, 4 bytes big-endian.
BlockHashWithGroupId = NewType("BlockHashWithGroupId", bytes)
#: What is chained: a digest, or (before 0.10.2) an integer.
ChainValue: TypeAlias = "BlockHash | int"
ExternalForm = Literal["uint64", "int64", "bytes"]

_MASK64 = (1 << 64) - 1


def low64(value: bytes | int) -> int:
    """Return the low 64 bits, unsigned: of an integer, or of a digest read big-endian (its last 8 bytes)."""
    return (value if isinstance(value, int) else int.from_bytes(value[-8:], "big")) & _MASK64


def to_signed(value: int) -> int:
    """Return a 64-bit value as two's complement, as a consumer that knows only ``int64`` reads it."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def to_unsigned(value: int) -> int:
    """Return a 64-bit value, signed or not, as the unsigned one that vLLM publishes."""
    return value & _MASK64


def external_hash(value: ChainValue, form: ExternalForm = "uint64") -> int | bytes:
    """Return a block hash as events carry it.

    Before 0.10.2 vLLM publishes the chain's integer as it is (256 bits for sha256, which its own encoder cannot
    write), so for an integer ``"uint64"`` returns it unchanged; ``"bytes"`` does not exist there and raises
    InvalidHashError.
    """
    if form == "bytes":
        if isinstance(value, int):
            raise InvalidHashError("before vLLM 0.10.2 hashes are integers; they have no bytes form")
        return bytes(value)
    if form == "int64":
        return to_signed(low64(value))
    return value if isinstance(value, int) else low64(value)


def make_block_hash_with_group_id(block_hash: bytes, group_id: int) -> BlockHashWithGroupId:
    """Return the key of vLLM's hash map: the digest and the KV cache group's id, 4 bytes big-endian."""
    if not 0 <= group_id < 1 << 32:
        raise InvalidHashError(f"a group id is 0 to 2^32 - 1, got {group_id}")
    return BlockHashWithGroupId(bytes(block_hash) + group_id.to_bytes(4, "big"))


def get_block_hash(key: bytes) -> BlockHash:
    """Return the digest part of a `BlockHashWithGroupId`."""
    return BlockHash(key[:-4])


def get_group_id(key: bytes) -> int:
    """Return the group id part of a `BlockHashWithGroupId`."""
    return int.from_bytes(key[-4:], "big")


def json_hash(value: ChainValue) -> str | dict[str, str]:
    """Return a chain value as request lines carry it: lower-case hex, or ``{"int": decimal}`` before 0.10.2."""
    return {"int": str(value)} if isinstance(value, int) else value.hex()


def hash_text(value: ChainValue) -> str:
    """Return a chain value for people: hex with the published 64-bit decimal beside it, or its integer."""
    return str(value) if isinstance(value, int) else f"{value.hex()}  {low64(value)}"


_HEX = re.compile(r"(?:0x)?((?:[0-9a-fA-F]{2}){8,36})")


def parse_hash(value: Any, *, at: str | None = None) -> bytes | int:
    """Read an observed hash: hex of 8 to 36 bytes, a decimal integer (signed 64-bit too), or ``{"int": decimal}``.

    16 hex digits without a letter are ambiguous with a decimal; ``0x`` in front makes them hex, else they are
    decimal. Raises InvalidHashError.
    """
    fault = InvalidHashError(
        f"{value!r:.60} is no block hash; expected hex of 8 to 36 bytes or a decimal integer", at=at
    )
    if isinstance(value, dict) and set(value) == {"int"}:
        value = value["int"]
    if isinstance(value, dict) and set(value) == {"bytes"} and isinstance(value["bytes"], str):
        value = "0x" + value["bytes"]
    if isinstance(value, bool):
        raise fault
    if isinstance(value, int):
        return value if value >= 0 else to_unsigned(value)
    if isinstance(value, bytes) and 8 <= len(value) <= 36:
        return value
    if not isinstance(value, str):
        raise fault
    text = value.strip()
    if re.fullmatch(r"-?\d{1,79}", text) and not (len(text) in (32, 64, 40, 72) and text[0] != "-"):
        number = int(text)
        if number < -(1 << 63):
            raise fault
        return number if number >= 0 else to_unsigned(number)
    match = _HEX.fullmatch(text)
    if match is None:
        raise fault
    return bytes.fromhex(match[1])


class BlockHashView(Sequence[ChainValue]):
    """Block hashes seen at a coarser block size, without hashing again.

    A hash covers its whole prefix, so the hash of a block of ``factor`` fine blocks is that of its last fine one:
    with fine hashes A B C D and factor 2 the view is B D. A tail that fills no coarse block is left out. The view
    follows the list as that grows.
    """

    def __init__(self, hashes: Sequence[ChainValue], factor: int) -> None:
        if isinstance(factor, bool) or not isinstance(factor, int) or factor < 1:
            raise InvalidBlockSizeError(f"expected a factor of at least 1, got {factor!r}")
        self._hashes = hashes
        self._factor = factor

    def __len__(self) -> int:
        return len(self._hashes) // self._factor

    @overload
    def __getitem__(self, index: int) -> ChainValue: ...
    @overload
    def __getitem__(self, index: slice) -> list[ChainValue]: ...
    def __getitem__(self, index: int | slice) -> ChainValue | list[ChainValue]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError("block index out of range")
        return self._hashes[(index + 1) * self._factor - 1]

    def __iter__(self) -> Iterator[ChainValue]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"BlockHashView({len(self)} blocks, factor {self._factor})"
