"""Subscribers: follow publishers over ZeroMQ and yield records in order, gaps mended by replay where that can be.

`Subscriber` is iterated in a thread, `AsyncSubscriber` (in `kvhash.events.aio`) in an event loop; both drive the same
`SubscriberCore`, which owns the sockets. Nothing is queued in between: what the reader does not take stays in
ZeroMQ's queue, and what that drops shows as a gap.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import zmq

from kvhash._errors import UsageError

from ._options import check_number, check_seconds
from .endpoint import check_connectable, is_loopback, offset_endpoint
from .message import END_SEQ, Message, parse_message, parse_reply
from .records import BadMessage, Record
from .tracker import PublisherTracker

__all__ = ["RemoteEndpointWarning", "Source", "Subscriber", "SubscriberCore"]

#: Messages taken from one socket before the others get their turn.
_BURST = 1000


class RemoteEndpointWarning(UserWarning):
    """Events, and the token ids in them, travel in clear to another machine."""


@dataclass(frozen=True, slots=True)
class Source:
    """One publisher's endpoints: where its events are, and where it replays (None: nowhere)."""

    endpoint: str
    replay_endpoint: str | None = None

    @classmethod
    def for_ranks(
        cls, endpoint: str, replay_endpoint: str | None = None, ranks: Iterable[int] = (0,)
    ) -> tuple[Source, ...]:
        """Return the sources of data parallel ranks, by vLLM's port rule; raises EndpointError."""
        return tuple(
            cls(
                offset_endpoint(endpoint, rank),
                None if replay_endpoint is None else offset_endpoint(replay_endpoint, rank),
            )
            for rank in ranks
        )


@dataclass(slots=True)
class _Line:
    """One source's sockets and trackers.

    ``start``: the replay that begins the stream, while it is under way. ``connections``: says when the socket has made
    a connection; ``connected``: whether it ever had one.
    """

    source: Source
    socket: zmq.Socket[Any]
    trackers: dict[int | None, PublisherTracker] = field(default_factory=dict)
    start: PublisherTracker | None = None
    last_seen: float = 0.0
    connections: zmq.Socket[Any] | None = None
    connected: bool = False


@dataclass(slots=True)
class _Asking:
    """A replay's socket and whom its answers are for.

    ``own``, ``foreign``: whether they had a batch of the tracker's rank, or of another.
    """

    line: _Line
    tracker: PublisherTracker
    asked: int
    socket: zmq.Socket[Any]
    own: bool = False
    foreign: bool = False


class SubscriberCore:
    """The sockets of a subscriber and their trackers; `step` does what is due without blocking.

    ``sources``: endpoints, or `Source` values with replay endpoints. ``topic``: prefix of the topics wanted.
    ``from_seq``: ``"live"``, ``"start"``, a sequence number, or a negative count of batches to go back from the first
    live one. ``replay_timeout``: seconds that a replay may be silent. ``probe_idle_s``: after so long without a message
    the replay is asked whether the newest were missed (None: never). ``rcvhwm``: messages that ZeroMQ keeps for a slow
    reader. ``bind``: bind to the endpoints, for publishers that connect.

    Raises EndpointError for an endpoint that cannot be connected to, and UsageError for another value that cannot be.
    """

    def __init__(
        self,
        sources: Source | str | Sequence[Source | str],
        *,
        topic: str = "",
        from_seq: int | Literal["live", "start"] = "live",
        replay_timeout: float = 5.0,
        reorder_s: float = 0.5,
        probe_idle_s: float | None = 10.0,
        rcvhwm: int = 100_000,
        bind: bool = False,
        context: zmq.Context[Any] | None = None,
    ) -> None:
        listed = [sources] if isinstance(sources, (str, Source)) else list(sources)
        self._sources = [source if isinstance(source, Source) else Source(source) for source in listed]
        if not self._sources:
            raise UsageError("expected at least one endpoint", code="invalid-endpoint")
        number = isinstance(from_seq, int) and not isinstance(from_seq, bool)
        if not number and from_seq not in ("live", "start"):
            raise UsageError(
                f"from_seq is 'live', 'start' or a number, got {from_seq!r:.100}", code="invalid-from-seq"
            )
        if isinstance(from_seq, int) and not -END_SEQ < from_seq < END_SEQ:
            raise UsageError(
                f"from_seq: there is no batch {from_seq}; the last number there can be is {END_SEQ - 1}",
                code="invalid-from-seq",
            )
        check_seconds("replay_timeout", replay_timeout)
        check_seconds("reorder_s", reorder_s)
        if probe_idle_s is not None:
            check_seconds("probe_idle_s", probe_idle_s)
        check_number("rcvhwm", rcvhwm)
        self._from_seq = from_seq
        self._replay_timeout = replay_timeout
        self._reorder_s = reorder_s
        self._probe_idle_s = probe_idle_s
        self._own_context = context is None
        self._context = context if context is not None else zmq.Context()
        self._asking: list[_Asking] = []
        self._lines: list[_Line] = []
        self._began = False
        self.closed = False
        try:
            for source in self._sources:
                if not bind:
                    check_connectable(source.endpoint)
                if source.replay_endpoint is not None:
                    check_connectable(source.replay_endpoint)
            self._warn_of_remote()
            for source in self._sources:
                line = _Line(source, self._socket(zmq.SUB, source.endpoint))
                self._lines.append(line)
                if source.replay_endpoint is not None and not bind:
                    line.connections = line.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
                self._connect(line, topic, rcvhwm, bind)
        except BaseException:
            self.close()
            raise

    def _warn_of_remote(self) -> None:
        """Say once for all sources that what they send can be read on the way."""
        remote = [
            s.endpoint
            for s in self._sources
            if s.endpoint.startswith("tcp://") and not is_loopback(s.endpoint)
        ]
        if remote:
            more = f" and {len(remote) - 1} more" if len(remote) > 1 else ""
            warnings.warn(
                RemoteEndpointWarning(
                    f"{remote[0]}{more}: events and their token ids travel in clear; "
                    "use a private network or a tunnel"
                ),
                stacklevel=4,
            )

    def _connect(self, line: _Line, topic: str, rcvhwm: int, bind: bool) -> None:
        line.socket.setsockopt(zmq.RCVHWM, rcvhwm)
        line.socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._attach(line.socket, line.source.endpoint, bind=bind)

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        if endpoint.startswith("tcp://"):
            socket.setsockopt(zmq.RECONNECT_IVL, 100)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
            socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
        return socket

    def _attach(self, socket: zmq.Socket[Any], endpoint: str, *, bind: bool = False) -> None:
        try:
            if bind:
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close(0)
            raise UsageError(
                f"cannot {'bind' if bind else 'connect'} to {endpoint}: {error.strerror or error}",
                code="invalid-endpoint",
            ) from None

    # --- one step ---------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        """Ask for what was published before, where ``from_seq`` wants it."""
        for line in self._lines:
            line.last_seen = now
            if line.source.replay_endpoint is None or self._from_seq == "live":
                continue
            if self._from_seq == "start" or (isinstance(self._from_seq, int) and self._from_seq >= 0):
                line.start = self._tracker(line, None)
                line.start.start_from(0 if self._from_seq == "start" else int(self._from_seq), now)
        self._run_replays()

    def sockets(self) -> list[zmq.Socket[Any]]:
        """Return the sockets to wait for."""
        connections = [line.connections for line in self._lines if line.connections is not None]
        asking = [asking.socket for asking in self._asking]
        return [*(line.socket for line in self._lines), *asking, *connections]

    def next_deadline(self) -> float | None:
        """Return when `step` has to be called at the latest, by time.monotonic()."""
        deadlines = [
            tracker.next_deadline
            for line in self._lines
            for tracker in line.trackers.values()
            if tracker.next_deadline is not None
        ]
        if self._probe_idle_s is not None:
            deadlines += [
                line.last_seen + self._probe_idle_s for line in self._lines if line.source.replay_endpoint
            ]
        return min(deadlines, default=None)

    def wait_ms(self, now: float, deadline: float | None) -> int:
        """Return for how long the sockets may be waited for, in ms, before `step` is due or `deadline` has come.

        At most half a second, so that another thread's close() is seen; sockets are their own thread's alone.
        """
        due = [at for at in (self.next_deadline(), deadline) if at is not None]
        return int(max(1, min(500.0, (min(due) - now) * 1000 if due else 500.0)))

    def step(self, now: float) -> list[Record]:
        """Take what has arrived and let time pass; return the records that are due. The first call begins."""
        if not self._began:
            self._began = True
            self._begin(now)
        records: list[Record] = []
        for line in self._lines:
            self._verify(line, now)
            records += self._receive(line, now)
        for asking in list(self._asking):
            records += self._receive_replay(asking, now)
        for line in self._lines:
            for tracker in list(line.trackers.values()):
                records += tracker.tick(now)
            self._probe(line, now)
        self._run_replays()
        return records

    def _receive(self, line: _Line, now: float) -> list[Record]:
        records: list[Record] = []
        for _ in range(_BURST):
            try:
                frames = line.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            line.last_seen = now
            message = parse_message(frames, line.source.endpoint, time.time_ns())
            if isinstance(message, BadMessage):
                records.append(message)
                continue
            tracker = self._tracker_of(line, message)
            if tracker is None:
                records.append(
                    BadMessage(
                        line.source.endpoint,
                        None,
                        message.seq,
                        message.received_ns,
                        message.fault,
                        tuple(frames),
                    )
                )
                continue
            if tracker.expected is None:
                self._join(tracker, message.seq, now)
            records += tracker.live(message, now)
        return records

    def _join(self, tracker: PublisherTracker, seq: int, now: float) -> None:
        """Begin at a publisher's first message, `seq`, or before it where ``from_seq`` wants that."""
        if self._from_seq == "live":
            return
        wanted = 0 if self._from_seq == "start" else self._from_seq
        assert isinstance(wanted, int)
        if tracker.can_replay:
            if wanted < 0:
                tracker.start_from(max(0, seq + wanted), now)
        elif 0 <= wanted < seq:
            tracker.expected = wanted  # nobody replays what came before: it is reported as lost

    def _tracker_of(self, line: _Line, message: Message) -> PublisherTracker | None:
        """Return the tracker of the message's publisher.

        A batch that cannot be read has no rank: it is of the only publisher, else of the only one whose next number it
        has, else of nobody (None): a tracker of its own would see gaps between messages of different publishers.
        """
        if message.batch is None:
            known = list(line.trackers.values())
            if len(known) > 1:
                known = [tracker for tracker in known if tracker.expected == message.seq]
            return known[0] if len(known) == 1 else None
        if line.start is not None and line.start.rank is None and message.rank is not None:
            # The replay was asked for before anybody knew the rank: the first batch tells it.
            del line.trackers[None]
            line.start.rank = message.rank
            line.trackers[message.rank] = line.start
            line.start = None
        return self._tracker(line, message.rank)

    def _tracker(self, line: _Line, rank: int | None) -> PublisherTracker:
        if rank not in line.trackers:
            line.trackers[rank] = PublisherTracker(
                line.source.endpoint,
                rank,
                line.source.replay_endpoint is not None,
                replay_timeout=self._replay_timeout,
                reorder_s=self._reorder_s,
            )
        return line.trackers[rank]

    def _receive_replay(self, asking: _Asking, now: float) -> list[Record]:
        records: list[Record] = []
        tracker = asking.tracker
        for _ in range(_BURST):
            if tracker.replay is None or tracker.asked != asking.asked:
                break
            try:
                frames = asking.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            reply = parse_reply(frames, time.time_ns())
            if reply is None:
                continue
            asking.line.last_seen = now
            if reply.batch is not None and asking.line.start is tracker:
                self._tracker_of(asking.line, reply)
            if reply.seq == END_SEQ and asking.foreign and not asking.own:
                records += tracker.cut(now)  # another rank behind the socket answered
            elif reply.batch is None or reply.rank == tracker.rank:
                asking.own |= reply.seq != END_SEQ
                records += tracker.reply(reply, now)
            else:
                asking.foreign = True
        return records

    def _verify(self, line: _Line, now: float) -> None:
        """Ask after a new connection whether the publisher behind it is still in the life that is followed.

        After the first one, too, where a replay began the stream: what was published between its answer and the
        connection came by neither.
        """
        first = again = False
        while line.connections is not None and line.connections.poll(0):
            line.connections.recv_multipart()
            first, again, line.connected = not line.connected, again or line.connected, True
        for tracker in line.trackers.values() if first or again else ():
            if again:
                tracker.probe(now, verify=True)
            elif self._from_seq != "live":
                tracker.follow_up(now)

    def _probe(self, line: _Line, now: float) -> None:
        if self._probe_idle_s is None or now < line.last_seen + self._probe_idle_s:
            return
        line.last_seen = now
        for tracker in line.trackers.values():
            tracker.probe(now)

    def _run_replays(self) -> None:
        """Open a socket for each new replay; close those of replays that are over. A fresh one has no old answers."""
        for asking in list(self._asking):
            if asking.tracker.replay is None or asking.tracker.asked != asking.asked:
                asking.socket.close(0)
                self._asking.remove(asking)
        running = {id(asking.tracker) for asking in self._asking}
        for line in self._lines:
            for tracker in line.trackers.values():
                if tracker.replay is not None and id(tracker) not in running:
                    self._ask(line, tracker)

    def _ask(self, line: _Line, tracker: PublisherTracker) -> None:
        endpoint = line.source.replay_endpoint
        assert endpoint is not None
        assert tracker.replay is not None
        socket = self._socket(zmq.DEALER, endpoint)
        socket.setsockopt(
            zmq.RCVHWM, 0
        )  # bounded by the publisher's buffer; a mark here makes it drop the end
        self._attach(socket, endpoint)
        socket.send_multipart((b"", tracker.replay.start.to_bytes(8, "big")))
        self._asking.append(_Asking(line, tracker, tracker.asked, socket))

    def close(self) -> None:
        """Close all sockets; calling it again does nothing."""
        if self.closed:
            return
        self.closed = True
        for line in self._lines:
            # One that could not be connected is closed already, and has no monitor that could be switched off.
            if line.connections is not None and not line.socket.closed:
                line.socket.disable_monitor()
        for socket in self.sockets():
            socket.close(0)
        if self._own_context:
            self._context.destroy(linger=0)


class Subscriber:
    """Iterate it for records; it ends after `close`, or when nothing came for ``idle_timeout`` seconds.

    Takes what `SubscriberCore` takes. Use it as a context manager.
    """

    def __init__(
        self,
        sources: Source | str | Sequence[Source | str],
        *,
        idle_timeout: float | None = None,
        **options: Any,
    ) -> None:
        if idle_timeout is not None:
            check_seconds("idle_timeout", idle_timeout)
        self._core = SubscriberCore(sources, **options)
        self._idle_timeout = idle_timeout
        self._ready: deque[Record] = deque()
        self._closing = False
        self._polling = threading.Lock()
        self._poller: int | None = None

    def poll(self, timeout: float | None = None) -> Record | None:
        """Return the next record, or None when none is due within `timeout` seconds (None: wait for ever)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._polling:
            self._poller = threading.get_ident()
            try:
                return self._poll(deadline)
            finally:
                self._poller = None
                if self._closing:
                    self._core.close()

    def _poll(self, deadline: float | None) -> Record | None:
        while not self._ready:
            if self._closing:
                return None
            now = time.monotonic()
            self._ready.extend(self._core.step(now))
            if self._ready:
                break
            if deadline is not None and now >= deadline:
                return None
            self._wait(now, deadline)
        return self._ready.popleft()

    def _wait(self, now: float, deadline: float | None) -> None:
        poller = zmq.Poller()
        for socket in self._core.sockets():
            poller.register(socket, zmq.POLLIN)
        poller.poll(self._core.wait_ms(now, deadline))

    def __iter__(self) -> Iterator[Record]:
        while True:
            record = self.poll(self._idle_timeout)
            if record is None:
                return
            yield record

    def close(self) -> None:
        """Close all sockets and end the iteration; from another thread, or a signal handler, within half a second."""
        self._closing = True
        if self._poller == threading.get_ident():
            return  # called from within `poll`, which closes when it returns
        with self._polling:
            self._core.close()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
