"""Reads batches without making Python objects of what nobody asks for: hashes, parents and token views.

For indexes, routers and checkers that see every event of a fleet and need few of its fields. `decode_batch` gives
the values that can be compared, changed and written again, whose types are msgspec's own and which msgspec
makes fastest; a lazy type in their place would be another type, so this is one beside them. Both read the same
from every payload, and refuse the same payloads in the same words.

With the native module a batch stays the bytes that came: its shape is checked, and fields, hashes and token ids
are decoded when they are looked at. Without it the same interface stands on `decode_batch`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from kvhash._backend import native_module

from .decode import decode_batch
from .schema import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    HashValue,
    UndecodableEvent,
    UnknownEvent,
    hash_key,
)

__all__ = ["RawBatch", "RawRemoved", "RawStored", "decode_raw", "raw_decoder"]

#: Token ids, or SGLang's pairs of them, decoded when they are looked at; it compares equal to a tuple of them.
TokenView: TypeAlias = "Sequence[int] | Sequence[tuple[int, int]]"


class _RawEvent(ABC):
    """Has the fields of the event that `decode` gives, each made when it is looked at."""

    __slots__ = ()

    @property
    @abstractmethod
    def block_hashes(self) -> tuple[HashValue, ...]:
        """The hashes, as on the wire."""

    @abstractmethod
    def keys(self) -> list[int]:
        """Return `hash_key` of each block hash."""

    @abstractmethod
    def decode(self) -> Any:
        """Return the event as `decode_batch` gives it."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class RawStored(_RawEvent):
    """A `BlockStored`, with all its fields."""

    __slots__ = ()

    @property
    @abstractmethod
    def parent_block_hash(self) -> HashValue | None:
        """The hash before the first block's, None at a prompt's start."""

    @property
    @abstractmethod
    def token_ids(self) -> TokenView:
        """The tokens of all the blocks."""

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Tokens per block."""

    @abstractmethod
    def blocks(self) -> list[tuple[HashValue, HashValue | None, TokenView]]:
        """Return each block's hash, its parent's and its tokens (fewer or none where the event does not say)."""


class RawRemoved(_RawEvent):
    """A `BlockRemoved`, with all its fields."""

    __slots__ = ()


#: What a raw batch may hold.
RawEvent: TypeAlias = "RawStored | RawRemoved | AllBlocksCleared | UnknownEvent | UndecodableEvent"


class RawBatch(ABC):
    """One published message; ``ts``, ``data_parallel_rank``, ``layout`` and ``extra`` as in `EventBatch`."""

    __slots__ = ()

    @property
    @abstractmethod
    def payload(self) -> bytes:
        """The message as it came."""

    @property
    @abstractmethod
    def ts(self) -> float:
        """Seconds since the epoch, by the engine's clock."""

    @property
    @abstractmethod
    def events(self) -> tuple[RawEvent, ...]:
        """The events, in order."""

    @property
    @abstractmethod
    def data_parallel_rank(self) -> int | None:
        """The engine's rank, None where it is not said."""

    @property
    @abstractmethod
    def layout(self) -> Literal["array", "map", "mixed"] | None:
        """How the events were written."""

    @property
    @abstractmethod
    def extra(self) -> dict[str | int, Any] | None:
        """What the batch holds besides."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of events."""

    @abstractmethod
    def blocks(self) -> list[tuple[HashValue, HashValue | None, TokenView]]:
        """Return `RawStored.blocks` of all the stored events, one after the other."""

    @abstractmethod
    def decode(self) -> EventBatch:
        """Return the batch as `decode_batch` gives it."""


def decode_raw(payload: bytes) -> RawBatch:
    """Read the payload frame of one published message; raises EventDecodeError as `decode_batch` does."""
    return raw_decoder()(payload)


@lru_cache(maxsize=1)
def raw_decoder() -> Callable[[bytes], RawBatch]:
    """Return what `decode_raw` calls in this process, for loops; the environment is asked once.

    Raises MissingDependencyError and UsageError as `kvhash.backend` does.
    """
    return make_decoder(native_module())


def make_decoder(module: Any) -> Callable[[bytes], RawBatch]:
    """Return the decoder of the native module, or without one (None) that of the Python definition."""
    if module is None:
        return decode_by_definition
    RawBatch.register(module.RawBatch)
    RawStored.register(module.RawStored)
    RawRemoved.register(module.RawRemoved)
    Sequence.register(module.RawTokens)
    decode: Callable[[bytes], RawBatch] = module.decode_raw
    return decode


def decode_by_definition(payload: bytes) -> RawBatch:
    """Read a payload on `decode_batch`; the native module leaves to this what is no batch."""
    return _Batch(bytes(payload))


class _Removed(RawRemoved):
    __slots__ = ("_event",)

    def __init__(self, event: BlockRemoved) -> None:
        self._event = event

    @property
    def block_hashes(self) -> tuple[HashValue, ...]:
        return self._event.block_hashes

    def keys(self) -> list[int]:
        return [hash_key(value) for value in self._event.block_hashes]

    def decode(self) -> BlockRemoved:
        return self._event

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)

    def __repr__(self) -> str:
        return f"Raw{self._event!r}"


class _Stored(RawStored):
    __slots__ = ("_event",)

    def __init__(self, event: BlockStored) -> None:
        self._event = event

    @property
    def block_hashes(self) -> tuple[HashValue, ...]:
        return self._event.block_hashes

    @property
    def parent_block_hash(self) -> HashValue | None:
        return self._event.parent_block_hash

    @property
    def token_ids(self) -> TokenView:
        return self._event.token_ids

    @property
    def block_size(self) -> int:
        return self._event.block_size

    def keys(self) -> list[int]:
        return [hash_key(value) for value in self._event.block_hashes]

    def blocks(self) -> list[tuple[HashValue, HashValue | None, TokenView]]:
        event, size = self._event, self._event.block_size
        parents = (event.parent_block_hash, *event.block_hashes)
        return [
            (value, parents[i], event.token_ids[i * size : (i + 1) * size])
            for i, value in enumerate(event.block_hashes)
        ]

    def decode(self) -> BlockStored:
        return self._event

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)

    def __repr__(self) -> str:
        return f"Raw{self._event!r}"


def _raw(event: Any) -> RawEvent:
    if isinstance(event, BlockStored):
        return _Stored(event)
    if isinstance(event, BlockRemoved):
        return _Removed(event)
    known: AllBlocksCleared | UnknownEvent | UndecodableEvent = event
    return known


class _Batch(RawBatch):
    __slots__ = ("_batch", "_events", "_payload")

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._batch = decode_batch(payload)
        self._events = tuple([_raw(event) for event in self._batch.events])

    @property
    def payload(self) -> bytes:
        return self._payload

    @property
    def ts(self) -> float:
        return self._batch.ts

    @property
    def events(self) -> tuple[RawEvent, ...]:
        return self._events

    @property
    def data_parallel_rank(self) -> int | None:
        return self._batch.data_parallel_rank

    @property
    def layout(self) -> Literal["array", "map", "mixed"] | None:
        return self._batch.layout

    @property
    def extra(self) -> dict[str | int, Any] | None:
        return self._batch.extra

    def __len__(self) -> int:
        return len(self._events)

    def blocks(self) -> list[tuple[HashValue, HashValue | None, TokenView]]:
        return [block for event in self._events if isinstance(event, RawStored) for block in event.blocks()]

    def decode(self) -> EventBatch:
        return self._batch

    def __repr__(self) -> str:
        return f"Raw{self._batch!r}"
