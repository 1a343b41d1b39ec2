"""A faulty line of real sockets between a publisher and a subscriber, and a story told over it."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from kvhash.events.decode import decode_batch
from kvhash.events.encode import encode_batch
from kvhash.events.publisher import Publisher
from kvhash.events.records import Batch, Lost, Record, Restart
from kvhash.events.subscriber import Source, Subscriber

from ..ports import free_base, free_endpoints

_LOCAL = "tcp://127.0.0.1"


@dataclass
class Faults:
    """How badly the line behaves; probabilities for each message, and whether the replay socket stalls."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    stall: bool = False


class Relay:
    """Passes live messages and replays on, faultily. `cut` closes and reopens its live sockets on the same ports."""

    def __init__(self, publisher: tuple[str, str], rng: random.Random) -> None:
        self._from, self._replay_from = publisher
        self._rng = rng
        self.faults = Faults()
        self._cut = threading.Event()
        self._stop = threading.Event()
        self._ready = threading.Event()
        self.endpoint = self.replay_endpoint = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def cut(self) -> None:
        """Cut the live connections; they come back at once."""
        self._cut.set()

    def close(self) -> None:
        """End the relay."""
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        context = zmq.Context()
        router = context.socket(zmq.ROUTER)
        self.replay_endpoint = f"{_LOCAL}:{router.bind_to_random_port(_LOCAL)}"
        dealers: dict[bytes, zmq.Socket[Any]] = {}
        pub = context.socket(zmq.PUB)
        port = free_base()
        self.endpoint = f"{_LOCAL}:{port}"
        rebind(pub, self.endpoint)
        sub = self._subscribe(context)
        waiting: list[tuple[float, list[bytes]]] = []
        self._ready.set()
        while not self._stop.is_set():
            if self._cut.is_set():
                self._cut.clear()
                pub.close(0)
                sub.close(0)
                pub = context.socket(zmq.PUB)
                rebind(pub, f"{_LOCAL}:{port}")
                sub = self._subscribe(context)
            poller = zmq.Poller()
            for socket in (sub, router, *dealers.values()):
                poller.register(socket, zmq.POLLIN)
            ready = dict(poller.poll(5))
            now = time.monotonic()
            if sub in ready:
                self._live(sub.recv_multipart(), waiting, now)
            for item in [item for item in waiting if item[0] <= now]:
                waiting.remove(item)
                pub.send_multipart(item[1])
            if router in ready:
                client, *request = router.recv_multipart()
                if not self.faults.stall:
                    dealer = context.socket(zmq.DEALER)
                    dealer.setsockopt(zmq.LINGER, 0)
                    dealer.connect(self._replay_from)
                    dealer.send_multipart(request)
                    dealers[client] = dealer
            for client, dealer in dealers.items():
                if dealer in ready:
                    answer = dealer.recv_multipart()
                    if self._rng.random() >= self.faults.drop / 4:
                        router.send_multipart([client, *answer])
        context.destroy(linger=0)

    def _subscribe(self, context: zmq.Context[Any]) -> zmq.Socket[Any]:
        sub = context.socket(zmq.SUB)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        sub.setsockopt(zmq.RECONNECT_IVL, 10)
        sub.connect(self._from)
        return sub

    def _live(self, frames: list[bytes], waiting: list[tuple[float, list[bytes]]], now: float) -> None:
        if self._rng.random() < self.faults.drop:
            return
        for _ in range(2 if self._rng.random() < self.faults.duplicate else 1):
            late = self._rng.random() * 0.15 if self._rng.random() < self.faults.delay else 0.0
            waiting.append((now + late, frames))


def rebind(socket: zmq.Socket[Any], endpoint: str) -> None:
    """Bind as soon as the port's former socket is gone."""
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.bind(endpoint)
        except zmq.ZMQError:  # the old socket's port is not free yet
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            return


@dataclass
class _Engine:
    """A publisher that can be restarted on its ports; the truth of every life is kept."""

    payloads: list[bytes]
    buffer_steps: int
    release: str
    publisher: Publisher | None = None
    endpoints: tuple[str, str] = ("", "")
    truth: list[list[bytes]] = field(default_factory=list)

    def start(self) -> None:
        if not self.truth:
            self.endpoints = free_endpoints()
        where = [endpoint.replace("127.0.0.1", "*") for endpoint in self.endpoints]
        deadline = time.monotonic() + 10
        while True:
            try:
                self.publisher = Publisher(*where, buffer_steps=self.buffer_steps, release=self.release)
                break
            except Exception:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        self.truth.append([])

    def publish(self) -> None:
        """Publish the next recorded batch, with the present time."""
        assert self.publisher is not None
        number = sum(map(len, self.truth))
        batch = decode_batch(self.payloads[number % len(self.payloads)])
        payload = encode_batch(msgspec.structs.replace(batch, ts=time.time(), data_parallel_rank=0), "0.33.0")
        self.publisher.publish_payload(payload)
        self.truth[-1].append(payload)

    def restart(self) -> None:
        assert self.publisher is not None
        self.publisher.close(timeout=2)
        self.start()


def run_story(seed: int, payloads: list[bytes]) -> tuple[list[list[bytes]], list[Record]]:
    """Tell one seeded story over the relay; return every life's payloads and what the subscriber said of them."""
    rng = random.Random(seed)
    engine = _Engine(payloads, rng.choice([8, 1000]), rng.choice(["0.25.0", "0.33.0"]))
    engine.start()
    relay = Relay(engine.endpoints, rng)
    records: list[Record] = []
    source = Source(relay.endpoint, relay.replay_endpoint)
    options = {"replay_timeout": 0.3, "reorder_s": 0.1, "probe_idle_s": 0.4, "from_seq": "start"}
    with Subscriber(source, **options) as subscriber:  # type: ignore[arg-type]
        relay.faults = Faults(rng.random() * 0.3, rng.random() * 0.3, rng.random() * 0.3)
        for _ in range(40):
            engine.publish()
            if rng.random() < 0.05:
                relay.faults.stall = not relay.faults.stall
            if rng.random() < 0.04:
                relay.cut()
            # With a short buffer a new life can leave no trace of its beginning; its loss is reported all the same.
            if rng.random() < 0.02 and len(engine.truth[-1]) > 5 and engine.buffer_steps > 100:
                engine.restart()
            while (record := subscriber.poll(0.003)) is not None:
                records.append(record)
        relay.faults = Faults()
        deadline = time.monotonic() + 30
        while not is_quiet(engine.truth, records):
            assert time.monotonic() < deadline, f"seed {seed}: the stream never became complete"
            if len(engine.truth[-1]) < 60:
                engine.publish()
            record = subscriber.poll(0.05)
            if record is not None:
                records.append(record)
    relay.close()
    assert engine.publisher is not None
    engine.publisher.close()
    return engine.truth, records


def last_life(records: list[Record]) -> list[Record]:
    """Return the records after the last restart."""
    for i in range(len(records) - 1, -1, -1):
        if isinstance(records[i], Restart):
            return records[i + 1 :]
    return records


def is_quiet(truth: list[list[bytes]], records: list[Record]) -> bool:
    """Return whether each batch of the last life was delivered or reported lost, and none of another life is there."""
    numbers: set[int] = set()
    final = dict(enumerate(truth[-1]))
    for record in last_life(records):
        if isinstance(record, Batch):
            if final.get(record.seq) != record.payload:
                return False
            numbers.add(record.seq)
        elif isinstance(record, Lost):
            numbers |= set(range(record.first, record.last + 1))
    return numbers == set(final)
