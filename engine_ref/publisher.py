"""The engine's event publisher: vLLM's configuration over the SDK's ZeroMQ publisher, one for a data-parallel rank.

What goes out, when, and how a replay is answered is `kvhash.events.publisher.Publisher`'s; here a batch gets its time
and is written in the shape of the release that the engine emulates, and the log says where events really are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from kvhash.events import EventEncodeError
from kvhash.events.encode import encode_batch
from kvhash.events.endpoint import binds, is_loopback
from kvhash.events.publisher import Publisher
from kvhash.events.schema import EventBatch

from .event_config import KVEventsConfig
from .events import KVEvent

__all__ = ["EventPublisher"]

_log = logging.getLogger(__name__)


class EventPublisher:
    """Publishes the events of one rank. `publish` queues and, as in vLLM, waits where the queue is full.

    ``release``: the vLLM release in whose shape batches are written. ``endpoint`` and ``replay_endpoint`` are what is
    really bound (or connected to). ``failed``: batches that the release cannot write.

    Raises EndpointError when an endpoint cannot be used.
    """

    def __init__(self, config: KVEventsConfig, *, rank: int = 0, release: str = "latest") -> None:
        self._release = release
        self._rank = rank
        self.failed = 0
        self._publisher = Publisher(
            config.endpoint,
            config.replay_endpoint,
            buffer_steps=config.buffer_steps,
            hwm=config.hwm,
            max_queue_size=config.max_queue_size,
            topic=config.topic,
            data_parallel_rank=rank,
            release=release,
        )
        self.endpoint = self._publisher.endpoint
        self.replay_endpoint = self._publisher.replay_endpoint
        for line in self._describe(config):
            _log.info("KV events of rank %d: %s", rank, line)

    def _describe(self, config: KVEventsConfig) -> list[str]:
        """Say where events go; an endpoint that names a host is connected to, which surprises everybody once."""
        lines = []
        if binds(config.endpoint):
            lines.append(f"bound to {self.endpoint}; subscribers connect there")
        else:
            lines.append(
                f"CONNECTED to {self.endpoint}, as vLLM does with an endpoint that names a host: a subscriber must "
                "bind there. To let subscribers connect, give a wildcard, for example tcp://*:5557"
            )
        if binds(config.endpoint) and not is_loopback(self.endpoint):
            lines.append(
                "every host that reaches this machine can read the events, and the token ids in them"
            )
        if self.replay_endpoint is not None:
            lines.append(f"replay at {self.replay_endpoint}, the last {config.buffer_steps} batches")
        return lines

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Queue one batch. One that the release cannot write is logged and counted: the engine goes on."""
        batch = EventBatch(ts=time.time(), events=tuple(events), data_parallel_rank=self._rank)
        try:
            payload = encode_batch(batch, self._release, drop_fields=True)
        except EventEncodeError as error:
            self.failed += 1
            _log.error("a batch of %d events cannot be published: %s", len(events), error)
            return
        self._publisher.publish_payload(payload)

    def close(self, *, timeout: float = 10.0) -> int:
        """Publish what is queued, then end; returns how many batches `timeout` seconds were too short for."""
        left = self._publisher.close(timeout)
        if left:
            _log.error("%d batches of KV events were not published within %g s", left, timeout)
        return left
