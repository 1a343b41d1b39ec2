"""``--kv-events-config``: vLLM's JSON, with its fields and its defaults."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvhash._errors import InvalidRequestError

__all__ = ["KVEventsConfig"]


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and how events are published. ``publisher`` left out: ``"zmq"`` if events are enabled, else ``"null"``."""

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @classmethod
    def from_json(cls, text: str) -> KVEventsConfig:
        """Read the flag's value; raises InvalidRequestError."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise InvalidRequestError(f"bad --kv-events-config: {error}") from None

    @property
    def publishes(self) -> bool:
        """Whether events go out."""
        return self.enable_kv_cache_events and self.publisher != "null"
