"""The events: one frozen type for each, with every field of every vLLM release and of SGLang.

A field that a release does not have, or that the publisher left out, is None. Values are as on the wire: a
block hash is an int (signed or not) or bytes, `hash_key` makes one comparable key of it.
"""

from __future__ import annotations

import contextlib
import operator
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec

from kvhash._errors import InvalidHashError
from kvhash.block_hash import low64

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "Event",
    "EventBatch",
    "HashValue",
    "UndecodableEvent",
    "UnknownEvent",
    "hash_key",
]

# msgspec reads these annotations when it builds its decoders. Where the wire's common shape is narrower than
# what a value may hold, the decoder gets the narrow one: all else goes to the careful reader, which sets it
# itself.
if TYPE_CHECKING:
    HashValue: TypeAlias = "int | bytes"
    #: Token ids; with SGLang's EAGLE pairs ``(t0, t1)`` instead of each.
    TokenIds: TypeAlias = "tuple[int, ...] | tuple[tuple[int, int], ...]"
    Extra: TypeAlias = "dict[str | int, Any] | None"
else:
    #: A block hash as on the wire: a 64-bit integer, signed or not, or the digest's bytes.
    HashValue = int | Annotated[bytes, msgspec.Meta(min_length=8, max_length=64)]
    TokenIds = tuple[int, ...]
    Extra = type(None)

_Size = Annotated[int, msgspec.Meta(ge=0)]


def hash_key(value: HashValue) -> int:
    """Return one key for a block hash in any of its wire forms: its low 64 bits, unsigned.

    An int may be signed (two's complement) or unsigned; of bytes, 8 to 64 of them, the last 8 count, big-endian. The
    three forms in which one engine may publish a hash give the same key. Raises InvalidHashError for anything else.
    """
    if type(value) is int or (isinstance(value, bytes) and 8 <= len(value) <= 64):
        return low64(value)
    if not isinstance(value, bytes) and type(value).__name__ not in ("bool", "bool_"):  # NumPy's too
        with contextlib.suppress(TypeError):
            return low64(operator.index(value))
    shown = f"{len(value)} bytes" if isinstance(value, bytes) else f"{value!r:.40} ({type(value).__name__})"
    raise InvalidHashError(f"expected a block hash, an integer or 8 to 64 bytes, got {shown}")


class _Event(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Base of the known events."""


class BlockStored(_Event, frozen=True, gc=False, tag="BlockStored"):
    """Blocks entered a cache: one hash a block, chained after ``parent_block_hash`` (None: a prompt's start).

    ``token_ids`` are those of all the blocks (empty for tiers that do not say), ``block_size`` tokens each.
    ``extra_keys``: per block None or what else its hash covers, untagged. ``lookahead_token_ids``: per block
    the tokens after it that its hash covers. ``cache_salt`` is SGLang's. ``extra`` keeps fields that are not
    known: by name from a map, by position (the tag is 0) from an array.
    """

    block_hashes: tuple[HashValue, ...]
    parent_block_hash: HashValue | None
    token_ids: TokenIds
    block_size: _Size
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: tuple[tuple[int, ...], ...] | None = None
    cache_salt: str | None = None
    extra: Extra = msgspec.field(default=None, name="*extra")

    @property
    def bigram(self) -> bool:
        """Whether ``token_ids`` holds pairs of tokens (SGLang with EAGLE) instead of tokens."""
        return bool(self.token_ids) and isinstance(self.token_ids[0], tuple)


class BlockRemoved(_Event, frozen=True, gc=False, tag="BlockRemoved"):
    """Blocks left a cache. ``extra`` as in `BlockStored`."""

    block_hashes: tuple[HashValue, ...]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    extra: Extra = msgspec.field(default=None, name="*extra")


class AllBlocksCleared(_Event, frozen=True, gc=False, tag="AllBlocksCleared"):
    """The whole prefix cache was dropped, every tier and group. ``extra`` as in `BlockStored`."""

    extra: Extra = msgspec.field(default=None, name="*extra")


class UnknownEvent(msgspec.Struct, frozen=True, gc=False):
    """An event whose tag is not known; ``raw`` is its msgpack."""

    tag: str
    raw: bytes


class UndecodableEvent(msgspec.Struct, frozen=True, gc=False):
    """An event that cannot be read, in its place among the others of its batch.

    ``path`` says where (``$.events[2].block_hashes[0]``), ``message`` what and what would be right, ``tag``
    the event's tag where that could be read; ``raw`` is its msgpack.
    """

    path: str
    message: str
    raw: bytes
    tag: str | None = None

    def __str__(self) -> str:
        return f"{self.message} - at {self.path}"


#: What a batch may hold.
Event: TypeAlias = "BlockStored | BlockRemoved | AllBlocksCleared | UnknownEvent | UndecodableEvent"


class EventBatch(msgspec.Struct, frozen=True):
    """One published message: the events of one engine step, in order.

    ``ts``: seconds since the epoch, by the engine's clock. ``data_parallel_rank``: None where not said.
    ``layout``: how the events were written, ``"array"``, ``"map"`` or (within one batch) ``"mixed"``; None
    when there was none to tell it by. ``extra`` keeps what the batch holds besides, by name or position.
    """

    ts: float
    events: tuple[Event, ...]
    data_parallel_rank: int | None = None
    layout: Literal["array", "map", "mixed"] | None = None
    extra: dict[str | int, Any] | None = None
