"""KV events: their types, every release's wire format, recordings, verification."""

from ._errors import EventDecodeError, EventEncodeError, RecordingError
from .decode import decode_batch
from .encode import encode_batch
from .schema import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    HashValue,
    UndecodableEvent,
    UnknownEvent,
    hash_key,
)

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "Event",
    "EventBatch",
    "EventDecodeError",
    "EventEncodeError",
    "HashValue",
    "RecordingError",
    "UndecodableEvent",
    "UnknownEvent",
    "decode_batch",
    "encode_batch",
    "hash_key",
]
