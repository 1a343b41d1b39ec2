"""``--kv-events-config``: vLLM's JSON, with its fields and its defaults."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvhash._errors import InvalidRequestError

__all__ = ["KVEventsConfig", "offset_endpoint"]


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


def offset_endpoint(endpoint: str, rank: int) -> str:
    """Return the endpoint of a data-parallel rank: the port plus the rank; a suffix for ``inproc``.

    Port 0, left to the system, stays. Raises InvalidRequestError for a transport that cannot be offset.
    """
    if rank == 0:
        return endpoint
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{rank}"
    base, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdigit():
        raise InvalidRequestError(f"expected a tcp:// endpoint with a port for rank {rank}, got {endpoint!r}")
    return endpoint if int(port) == 0 else f"{base}:{int(port) + rank}"
