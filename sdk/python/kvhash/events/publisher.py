"""A publisher of KV events as vLLM's: PUB with sequence numbers, and a ROUTER that replays the last batches.

Options and defaults are vLLM's ``--kv-events-config``; the release decides how events are written and how a replay
is framed. Source: vLLM 0.33.0's ZMQ publisher and, for older framings, those releases'.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from itertools import count
from types import TracebackType
from typing import Any, Literal

import msgspec
import zmq

from kvhash._errors import UsageError
from kvhash.contract import Contract

from ._options import MOST_MESSAGES, check_number
from .encode import encode_batch
from .endpoint import EndpointError, binds, offset_endpoint
from .message import END_SEQ
from .schema import EventBatch

__all__ = ["Publisher", "PublisherClosedError"]

_POLL_MS = 50
#: A payload, its sequence number and its topic where they are not the publisher's next and own.
_Item = tuple[bytes, "int | None", "bytes | None"]


class PublisherClosedError(UsageError):
    """The publisher was closed."""

    code = "publisher-closed"


class Publisher:
    """Publishes batches from a thread of its own; use it as a context manager or call `close`.

    ``endpoint``: bound when it has a wildcard (``tcp://*:5557``, ``tcp://[::]:5557``) or is ipc or inproc, connected
    to otherwise, as vLLM does. ``replay_endpoint``: always bound. Both get the rank added to their port. ``release``
    decides the shape of events. ``buffer_steps`` batches are kept for replay. ``hwm``: batches that ZeroMQ queues for a
    slow subscriber before it drops. ``max_queue_size`` batches may wait to be published; ``when_full``: ``"block"`` the
    caller as vLLM does, or ``"drop"`` the new batch and count it in `dropped`. ``bind``: bind (or connect) whatever the
    endpoint looks like; None for vLLM's rule.

    Raises EndpointError when an endpoint cannot be used, and UsageError for another value that cannot be.
    """

    def __init__(
        self,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        *,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        topic: str = "",
        data_parallel_rank: int = 0,
        release: str = "latest",
        when_full: Literal["block", "drop"] = "block",
        first_seq: int = 0,
        bind: bool | None = None,
        context: zmq.Context[Any] | None = None,
    ) -> None:
        check_number("buffer_steps", buffer_steps, most=MOST_MESSAGES // 2 - 1)
        check_number("hwm", hwm)
        check_number("max_queue_size", max_queue_size)
        check_number("first_seq", first_seq, most=END_SEQ - 1)
        if when_full not in ("block", "drop"):
            raise UsageError(f"when_full is 'block' or 'drop', got {when_full!r:.40}", code="invalid-option")
        self._release = release
        contract = Contract.events_for_vllm(release)
        self._topic_frame = contract.replay_topic_frame
        self._rank = data_parallel_rank
        self._when_full = when_full
        self._topic = topic.encode()
        self._queue: queue.Queue[_Item | None] = queue.Queue(max_queue_size)
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._numbers = count(first_seq)
        self.dropped = 0
        self.published = 0
        self._unpublished = 0
        self._closing = threading.Event()
        self._own_context = context is None
        self._context = context if context is not None else zmq.Context()
        offset = {"port_zero_from_os": contract.port_zero_from_os}
        try:
            where = offset_endpoint(endpoint, data_parallel_rank, **offset)
            self._pub = self._open(zmq.PUB, where, hwm, binds(where) if bind is None else bind)
            self._router = None
            if replay_endpoint is not None:
                where = offset_endpoint(replay_endpoint, data_parallel_rank, **offset)
                # ZeroMQ learns of reads only every half mark, so twice the buffer always takes a whole replay.
                self._router = self._open(zmq.ROUTER, where, 2 * (buffer_steps + 1), True)
        except BaseException:
            # A context that the caller gave has other sockets in it.
            opened = getattr(self, "_pub", None)
            if opened is not None:
                opened.close(0)
            if self._own_context:
                self._context.destroy(linger=0)
            raise
        self.endpoint = self._bound(self._pub)
        self.replay_endpoint = None if self._router is None else self._bound(self._router)
        self._thread = threading.Thread(target=self._run, daemon=True, name="kv-event-publisher")
        self._thread.start()

    def _open(self, kind: int, endpoint: str, hwm: int, bind: bool) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, hwm)
        socket.setsockopt(zmq.LINGER, 0)
        if "[" in endpoint or "::" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        try:
            if bind:
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close(0)
            raise EndpointError(f"cannot use {endpoint}: {error.strerror or error}") from None
        return socket

    @staticmethod
    def _bound(socket: zmq.Socket[Any]) -> str:
        where = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(where, bytes)
        return where.rstrip(b"\0").decode()

    def publish(self, batch: EventBatch) -> bool:
        """Queue a batch; return whether it was taken (a full queue that drops does not).

        The rank is filled in where the batch has none. Raises EventEncodeError at once when the release cannot write
        the batch, PublisherClosedError after `close`.
        """
        return self.publish_payload(encode_batch(self.with_rank(batch), self._release))

    def with_rank(self, batch: EventBatch) -> EventBatch:
        """Return the batch with the publisher's rank, where it has none."""
        if batch.data_parallel_rank is not None:
            return batch
        return msgspec.structs.replace(batch, data_parallel_rank=self._rank)

    def publish_payload(self, payload: bytes, *, seq: int | None = None, topic: bytes | None = None) -> bool:
        """Queue a batch that is already encoded; else as `publish`.

        `seq`: its sequence number, the next ones following it (a recording is played with its own); None for the next.
        A number below the last begins a new life: the replay buffer is emptied. `topic`: another than the publisher's.
        """
        while not self._closing.is_set():
            try:
                self._queue.put((payload, seq, topic), timeout=0 if self._when_full == "drop" else 0.1)
            except queue.Full:
                if self._when_full == "drop":
                    self.dropped += 1
                    return False
            else:
                return True
        raise PublisherClosedError("the publisher is closed")

    def _run(self) -> None:
        wake = zmq.Poller()
        if self._router is not None:
            wake.register(self._router, zmq.POLLIN)
        while True:
            if self._router is not None and wake.poll(0):
                self._serve_replay()
            try:
                item = self._queue.get(timeout=_POLL_MS / 1000)
            except queue.Empty:
                if self._closing.is_set():
                    return
                continue
            if item is None:
                return
            payload, seq, topic = item
            if seq is None:
                seq = next(self._numbers) % END_SEQ
            else:
                self._numbers = count(seq + 1)
                if self._buffer and seq <= self._buffer[-1][0]:
                    self._buffer.clear()
            self._buffer.append((seq, payload))
            with contextlib.suppress(zmq.ZMQError):  # the context was terminated under us
                self._pub.send_multipart(
                    (self._topic if topic is None else topic, seq.to_bytes(8, "big"), payload)
                )
            self.published += 1

    def _serve_replay(self) -> None:
        """Answer one replay request; a client that does not read cannot stop the others, its messages are dropped."""
        assert self._router is not None
        with contextlib.suppress(zmq.Again):
            frames = self._router.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 3 or len(frames[2]) != 8:
                return
            client, start = frames[0], int.from_bytes(frames[2], "big")
            topic = [self._topic] if self._topic_frame else []
            end_topic = [b""] if self._topic_frame else []
            replies = [
                [client, b"", *topic, seq.to_bytes(8, "big"), payload]
                for seq, payload in self._buffer
                if seq >= start
            ]
            for reply in [*replies, [client, b"", *end_topic, END_SEQ.to_bytes(8, "big"), b""]]:
                self._router.send_multipart(reply, zmq.NOBLOCK)

    def close(self, timeout: float = 1.0) -> int:
        """Publish what is queued for up to `timeout` seconds, then end; return how many batches were left unpublished.

        Always returns; calling it again does nothing.
        """
        if self._closing.is_set():
            return self._unpublished
        deadline = time.monotonic() + timeout
        self._closing.set()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._unpublished = sum(item is not None for item in list(self._queue.queue))
        with self._queue.mutex:
            self._queue.queue.clear()
        if self._thread.is_alive():
            self._thread.join(2 * _POLL_MS / 1000)
        linger = max(0, int((deadline - time.monotonic()) * 1000))
        self._pub.close(linger)
        if self._router is not None:
            self._router.close(linger)
        if self._own_context:
            self._context.destroy(linger=linger)
        return self._unpublished

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
