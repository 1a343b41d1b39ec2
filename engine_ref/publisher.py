"""Publishes event batches over ZeroMQ as vLLM does: PUB frames [topic, sequence, payload], and a replay socket."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence

import zmq

from kvhash.contract import EventContract, Release
from kvhash.events.encode import encode_batch
from kvhash.events.schema import EventBatch

from .event_config import KVEventsConfig, offset_endpoint
from .events import KVEvent

__all__ = ["ZmqEventPublisher"]

_log = logging.getLogger(__name__)
_END = (-1).to_bytes(8, "big", signed=True)


class ZmqEventPublisher:
    """One publisher of one data-parallel rank; a thread of its own owns the sockets.

    `publish` only queues. `release`: the vLLM release in whose wire shape batches are written. Sequence numbers start
    at 0, so a restart shows. The replay socket answers a start sequence (8 bytes, big-endian) with the kept batches
    from there and an end marker (sequence -1). ``endpoint`` and ``replay_endpoint`` are what is really bound.

    Raises zmq.ZMQError when an endpoint cannot be bound.
    """

    def __init__(
        self, config: KVEventsConfig, *, rank: int = 0, release: str | Release | EventContract = "latest"
    ) -> None:
        self._release = release
        self._rank = rank
        self._topic = config.topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._queue: queue.Queue[EventBatch | None] = queue.Queue(maxsize=config.max_queue_size)
        self._sequence = 0
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self.endpoint = _attach(self._pub, offset_endpoint(config.endpoint, rank))
            self.replay_endpoint = None
            if config.replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                # A whole replay and its end marker must fit for a subscriber that reads slowly.
                self._replay.setsockopt(zmq.SNDHWM, 2 * (config.buffer_steps + 1))
                self.replay_endpoint = _attach(self._replay, offset_endpoint(config.replay_endpoint, rank))
        except Exception:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-event-publisher", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Queue one batch; waits when the queue is full, so that nothing is lost."""
        self._queue.put(EventBatch(ts=time.time(), events=tuple(events), data_parallel_rank=self._rank))

    def close(self, *, timeout: float = 5.0) -> bool:
        """Publish what is queued, then close; returns whether all went out within `timeout` seconds."""
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                self._answer_replays()
                try:
                    batch = self._queue.get(timeout=0.05)
                except queue.Empty:
                    continue
                if batch is None:
                    return
                self._send(batch)
        finally:
            self._context.destroy(linger=1000)

    def _send(self, batch: EventBatch) -> None:
        try:
            payload = encode_batch(batch, self._release, drop_fields=True)
        except Exception:
            _log.exception("a batch of %d events cannot be encoded and is not published", len(batch.events))
            return
        number, self._sequence = self._sequence, self._sequence + 1
        self._kept.append((number, payload))
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _answer_replays(self) -> None:
        while self._replay is not None and self._replay.poll(0):
            frames = self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                _log.warning("a replay request of %d frames is not one; ignored", len(frames))
                continue
            client, start = frames[0], int.from_bytes(frames[2], "big")
            for number, payload in self._kept:
                if number >= start:
                    head = number.to_bytes(8, "big")
                    self._replay.send_multipart((client, b"", self._topic, head, payload))
            self._replay.send_multipart((client, b"", b"", _END, b""))


def _attach(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind wildcards and local transports, connect to what names another host; returns the real endpoint."""
    if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
        socket.bind(endpoint)
    elif endpoint.startswith(("tcp://127.", "tcp://localhost:")):
        socket.bind(endpoint)  # the engine's own machine: nobody else would bind it
    else:
        socket.connect(endpoint)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
