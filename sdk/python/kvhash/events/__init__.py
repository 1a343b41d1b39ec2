"""KV events: their types, every release's wire format, recordings, verification."""

from ._errors import EventDecodeError, EventEncodeError, RecordingError
from .decode import decode_batch
from .encode import encode_batch
from .export import batch_from_json, batch_to_json, event_to_json, export_jsonl, export_parquet
from .recording import Damage, Record, Recording, RecordingWriter
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
from .verify import BlockCheck, Verifier

__all__ = [
    "AllBlocksCleared",
    "BlockCheck",
    "BlockRemoved",
    "BlockStored",
    "Damage",
    "Event",
    "EventBatch",
    "EventDecodeError",
    "EventEncodeError",
    "HashValue",
    "Record",
    "Recording",
    "RecordingError",
    "RecordingWriter",
    "UndecodableEvent",
    "UnknownEvent",
    "Verifier",
    "batch_from_json",
    "batch_to_json",
    "decode_batch",
    "encode_batch",
    "event_to_json",
    "export_jsonl",
    "export_parquet",
    "hash_key",
]
