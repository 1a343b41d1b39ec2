"""The JSON form of KV events in recorded traces: null fields left out, hashes as decimal text."""

from __future__ import annotations

from typing import Any

from kvhash.events.schema import AllBlocksCleared, BlockRemoved, BlockStored
from kvhash.extra_keys import json_keys

__all__ = ["KVEvent", "event_to_json"]

KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


def event_to_json(event: KVEvent) -> dict[str, Any]:
    """Return one event as a JSON object."""
    record: dict[str, Any] = {"type": type(event).__name__}
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if value is None:
            continue
        if name == "parent_block_hash":
            record[name] = _hash_text(value)
        elif name == "block_hashes":
            record[name] = [_hash_text(item) for item in value]
        else:
            record[name] = json_keys(value)
    return record


def _hash_text(value: int | bytes) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
