"""KV events: their types, every release's wire format, recordings, verification."""

from ._errors import EventDecodeError, EventEncodeError, RecordingError
from .decode import decode_batch
from .encode import encode_batch
from .export import batch_from_json, batch_to_json, event_to_json, export_jsonl, export_parquet
from .raw import RawBatch, RawRemoved, RawStored, decode_raw, raw_decoder
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
    "RawBatch",
    "RawRemoved",
    "RawStored",
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
    "decode_raw",
    "encode_batch",
    "event_to_json",
    "export_jsonl",
    "export_parquet",
    "hash_key",
    "raw_decoder",
]
