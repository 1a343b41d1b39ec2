"""Which events are wanted, and what of their tokens is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from .schema import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    UndecodableEvent,
    UnknownEvent,
    hash_key,
)

__all__ = ["EventFilter", "TokenView", "show_event"]

TokenView = Literal["none", "head", "all"]

_TYPES = {
    "stored": BlockStored,
    "removed": BlockRemoved,
    "cleared": AllBlocksCleared,
    "unknown": UnknownEvent,
    "undecodable": UndecodableEvent,
}
_HEAD_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """Keeps an event when it fits every condition that is given.

    ``types``: of stored, removed, cleared, unknown, undecodable. ``mediums``: tiers, in any case (an event without one
    counts as GPU). ``groups``: KV cache groups. ``hash_prefix``: hex that a block hash, or its 64-bit value, begins
    with. ``lora``: an adapter's name, ``""`` for the base model.
    """

    types: frozenset[str] = frozenset()
    mediums: frozenset[str] = frozenset()
    groups: frozenset[int] = frozenset()
    hash_prefix: str | None = None
    lora: str | None = None

    def keeps(self, event: Event) -> bool:
        """Return whether the event is wanted; one that cannot be read is, unless only other types are."""
        if self.types and not isinstance(event, tuple(_TYPES[name] for name in self.types)):
            return False
        if not isinstance(event, (BlockStored, BlockRemoved)):
            return True
        if self.mediums and (event.medium or "GPU").upper() not in self.mediums:
            return False
        if self.groups and event.group_idx not in self.groups:
            return False
        if self.lora is not None and isinstance(event, BlockStored) and (event.lora_name or "") != self.lora:
            return False
        return self.hash_prefix is None or any(self._begins(value) for value in event.block_hashes)

    def _begins(self, value: int | bytes) -> bool:
        assert self.hash_prefix is not None
        texts = [f"{hash_key(value):016x}", str(hash_key(value))]
        if isinstance(value, bytes):
            texts.append(value.hex())
        return any(text.startswith(self.hash_prefix) for text in texts)


def show_event(event: Event, *, tokens: TokenView = "all", redact: bool = False) -> tuple[Event, int | None]:
    """Return the event as it may be shown, and how many tokens it has (None where it has no such field).

    `tokens`: none of them, the first eight, or all. `redact` hides what tells of a prompt: token ids, extra keys
    (salts, content identifiers), look-ahead tokens, session ids, and raw bytes.
    """
    if isinstance(event, (UnknownEvent, UndecodableEvent)):
        return (msgspec.structs.replace(event, raw=b"") if redact else event), None
    if not isinstance(event, BlockStored):
        return (msgspec.structs.replace(event, extra=None) if redact and event.extra else event), None
    changes: dict[str, Any] = {}
    if redact:
        changes = {
            "token_ids": (),
            "extra_keys": None,
            "lookahead_token_ids": None,
            "cache_salt": None,
            "session_id": None,
            "extra": None,
        }
    elif tokens == "none":
        changes = {"token_ids": (), "lookahead_token_ids": None}
    elif tokens == "head":
        changes = {"token_ids": event.token_ids[:_HEAD_TOKENS]}
    return (msgspec.structs.replace(event, **changes) if changes else event), len(event.token_ids)
