"""Events as JSON lines and Parquet: batches to JSON objects and back, and recordings to files.

A JSON line is one batch. A block hash is a decimal text (integers of 64 bits do not survive a JSON reader as
numbers) or ``{"bytes": hex}``; fields that are None are left out. A Parquet row is one event.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kvhash._errors import InvalidRequestError, MissingDependencyError
from kvhash.block_hash import parse_hash

from ._errors import EventDecodeError
from .decode import decode_batch
from .encode import encode_event_fields
from .recording import Record
from .schema import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    UndecodableEvent,
    UnknownEvent,
)

__all__ = [
    "batch_from_json",
    "batch_to_json",
    "event_to_json",
    "export_jsonl",
    "export_parquet",
    "record_to_json",
]


def event_to_json(event: Event) -> dict[str, Any]:
    """Return an event as a JSON object with ``type``; the fields that are None are left out."""
    if isinstance(event, UndecodableEvent):
        fault = {"tag": event.tag, "path": event.path, "message": event.message, "raw": event.raw.hex()}
        return {"type": "Undecodable", **fault}
    if isinstance(event, UnknownEvent):
        return {"type": "Unknown", "tag": event.tag, "raw": event.raw.hex()}
    result: dict[str, Any] = {"type": type(event).__name__}
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if value is None and name != "parent_block_hash":
            continue
        if name == "block_hashes":
            value = [_hash_json(item) for item in value]
        elif name == "parent_block_hash":
            value = None if value is None else _hash_json(value)
        result[name] = _json(value)
    return result


def batch_to_json(batch: EventBatch) -> dict[str, Any]:
    """Return a batch as a JSON object: ``ts``, ``data_parallel_rank``, ``events``."""
    return {
        "ts": batch.ts,
        "data_parallel_rank": batch.data_parallel_rank,
        "events": [event_to_json(event) for event in batch.events],
    }


def record_to_json(record: Record) -> dict[str, Any]:
    """Return a recorded message as a JSON object: where and when it came from, and its batch or ``error``."""
    head = {
        "received_ns": str(record.received_ns),
        "endpoint": record.endpoint,
        "topic": record.topic.decode("utf-8", "backslashreplace"),
        "seq": record.seq,
    }
    if record.rank is not None:
        head["rank"] = record.rank
    try:
        return {**head, **batch_to_json(decode_batch(record.payload))}
    except EventDecodeError as error:
        return {**head, "error": {"code": error.code, "message": str(error)}, "raw": record.payload.hex()}


def batch_from_json(value: Any) -> EventBatch:
    """Read what `batch_to_json` gives (other fields of the object are passed over).

    Raises InvalidRequestError naming the place of what is wrong.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get("events"), list):
        raise InvalidRequestError("expected an object with a list of 'events'", at="$")
    encoded = []
    for i, item in enumerate(value["events"]):
        at = f"$.events[{i}]"
        if not isinstance(item, Mapping) or not isinstance(item.get("type"), str):
            raise InvalidRequestError("expected an object with the event's 'type'", at=at)
        if item["type"] in ("Undecodable", "Unknown"):
            try:
                encoded.append(msgspec.Raw(bytes.fromhex(item["raw"])))
            except (KeyError, TypeError, ValueError):
                raise InvalidRequestError("expected the event's msgpack as hex", at=f"{at}.raw") from None
            continue
        encoded.append(msgspec.Raw(encode_event_fields(_from_json(item, at), at=at)))
    try:
        payload = msgspec.msgpack.encode([value.get("ts", 0.0), encoded, value.get("data_parallel_rank")])
        batch = decode_batch(payload)
    except (EventDecodeError, TypeError, OverflowError, msgspec.MsgspecError) as error:
        at_path = getattr(error, "at", None) or "$"
        raise InvalidRequestError(getattr(error, "message", str(error)), at=at_path) from None
    for event, item in zip(batch.events, value["events"], strict=True):
        if isinstance(event, UndecodableEvent) and item["type"] != "Undecodable":
            raise InvalidRequestError(event.message, at=event.path)
    return batch


def _from_json(item: Mapping[str, Any], at: str) -> dict[str, Any]:
    fields = {name: _plain(value) for name, value in item.items() if name != "extra"}
    if isinstance(item.get("block_hashes"), list):
        fields["block_hashes"] = [
            parse_hash(value, at=f"{at}.block_hashes[{i}]") for i, value in enumerate(item["block_hashes"])
        ]
    if item.get("parent_block_hash") is not None:
        fields["parent_block_hash"] = parse_hash(item["parent_block_hash"], at=f"{at}.parent_block_hash")
    elif item["type"] == "BlockStored":
        fields.setdefault("parent_block_hash", None)
    return fields


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping) and set(value) == {"bytes"} and isinstance(value["bytes"], str):
        try:
            return bytes.fromhex(value["bytes"])
        except ValueError:
            return value
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _hash_json(value: int | bytes) -> Any:
    return str(value) if isinstance(value, int) else {"bytes": value.hex()}


def _json(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, (list, tuple)):
        return [_json(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _json(item) for name, item in value.items()}
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


# --- files


@contextmanager
def _whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a file beside `path` to write; it replaces `path` when all went well, else it is gone.

    A pipe or a device is written to as it is: it would be gone if it were replaced.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        yield target
        return
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    try:
        yield Path(name)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def export_jsonl(records: Iterable[Record], path: str | os.PathLike[str]) -> int:
    """Write one JSON line a record, and return how many; `path` is only replaced by a whole file."""
    count = 0
    with _whole_file(path) as draft, draft.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record_to_json(record), ensure_ascii=False, separators=(",", ":")) + "\n")
            count += 1
    return count


_TEXT_COLUMNS = ("type", "medium", "lora_name", "kv_cache_spec_kind", "locality", "ownership", "session_id")
_INT_COLUMNS = ("block_size", "lora_id", "group_idx", "kv_cache_spec_sliding_window")


def export_parquet(
    records: Iterable[Record], path: str | os.PathLike[str], *, rows_per_group: int = 65536
) -> int:
    """Write one row an event, and return how many; `path` is only replaced by a whole file.

    Hashes are text as in JSON lines (bytes as hex with ``0x``); extra keys, undecodable events and unknown
    fields JSON text. Memory is bounded by `rows_per_group`. Raises MissingDependencyError without pyarrow.
    """
    try:
        import pyarrow as pa  # type: ignore[import-untyped,import-not-found,unused-ignore]
        import pyarrow.parquet as pq  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        raise MissingDependencyError(
            "Parquet needs pyarrow; install it with: pip install 'kvhash[parquet]'"
        ) from None
    schema = pa.schema(
        [("received_ns", pa.int64()), ("endpoint", pa.string()), ("rank", pa.int64()), ("topic", pa.string())]
        + [
            ("seq", pa.int64()),
            ("ts", pa.float64()),
            ("data_parallel_rank", pa.int64()),
            ("event", pa.int64()),
        ]
        + [(name, pa.string()) for name in _TEXT_COLUMNS]
        + [(name, pa.int64()) for name in _INT_COLUMNS]
        + [("block_hashes", pa.list_(pa.string())), ("parent_block_hash", pa.string())]
        + [("token_ids", pa.list_(pa.int64())), ("extra_keys", pa.string()), ("other", pa.string())]
    )
    count = 0
    rows: list[dict[str, Any]] = []
    with _whole_file(path) as draft, pq.ParquetWriter(draft, schema) as writer:
        for record in records:
            rows += _rows(record)
            if len(rows) >= rows_per_group:
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                count += len(rows)
                rows = []
        writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    return count + len(rows)


def _rows(record: Record) -> Iterator[dict[str, Any]]:
    head: dict[str, Any] = {
        "received_ns": record.received_ns,
        "endpoint": record.endpoint,
        "rank": record.rank,
        "topic": record.topic.decode("utf-8", "backslashreplace"),
        "seq": record.seq,
    }
    try:
        batch = decode_batch(record.payload)
    except EventDecodeError as error:
        yield {**head, "type": "UndecodableBatch", "other": json.dumps({"message": str(error)})}
        return
    head |= {"ts": batch.ts, "data_parallel_rank": batch.data_parallel_rank}
    for i, event in enumerate(batch.events):
        yield {**head, "event": i, **_row(event)}


def _row(event: Event) -> dict[str, Any]:
    values = event_to_json(event)
    row = {name: values.pop(name, None) for name in (*_TEXT_COLUMNS, *_INT_COLUMNS)}
    for name in _INT_COLUMNS:
        if row[name] is not None and not -(1 << 63) <= row[name] < 1 << 63:
            values[name] = str(row[name])
            row[name] = None
    if isinstance(event, (BlockStored, BlockRemoved)):
        row["block_hashes"] = [_hash_text(value) for value in event.block_hashes]
        values.pop("block_hashes")
    if isinstance(event, BlockStored):
        parent = event.parent_block_hash
        row["parent_block_hash"] = None if parent is None else _hash_text(parent)
        values.pop("parent_block_hash")
        plain: Any = event.token_ids
        if not event.bigram and all(-(1 << 63) <= token < 1 << 63 for token in plain):
            row["token_ids"] = list(plain)
            values.pop("token_ids")
        if "extra_keys" in values:
            row["extra_keys"] = json.dumps(values.pop("extra_keys"))
    if isinstance(event, AllBlocksCleared) and not values:
        return row
    row["other"] = json.dumps(values) if values else None
    return row


def _hash_text(value: int | bytes) -> str:
    return str(value) if isinstance(value, int) else f"0x{value.hex()}"
