"""vLLM's own publisher is read by our subscriber, and a subscriber as in its examples reads our publisher.

vLLM's wheel is downloaded into ``.cache`` of this checkout, for the one module that publishes; what that module imports
of vLLM (and needs torch) is replaced by stand-ins.
"""

from __future__ import annotations

import subprocess
import sys
import time
import types
import zipfile
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvhash.contract import NEWEST
from kvhash.events.publisher import Publisher
from kvhash.events.records import Batch
from kvhash.events.schema import BlockRemoved, BlockStored, EventBatch
from kvhash.events.subscriber import Source, Subscriber

from ..ports import free_base

pytestmark = pytest.mark.interop
CACHE = Path(__file__).parents[2] / ".cache" / "vllm"
MODULE = "vllm/distributed/kv_events.py"
END = (1 << 64) - 1


@pytest.fixture(scope="module")
def vllm_events() -> Any:
    """Return vLLM's module of that release, loaded with stand-ins for its imports."""
    source = CACHE / f"kv_events-{NEWEST}.py"
    if not source.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", str(CACHE), f"vllm=={NEWEST}"], check=True)
        (wheel,) = CACHE.glob(f"vllm-{NEWEST}*.whl")
        with zipfile.ZipFile(wheel) as archive:
            source.write_bytes(archive.read(MODULE))
        wheel.unlink()
    names = ("enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", "buffer_steps", "hwm")
    config = make_dataclass("KVEventsConfig", [*names, "max_queue_size", "topic"])

    class Quiet:
        def __getattr__(self, _name: str) -> Any:
            return lambda *_args, **_options: None

    stand_ins: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {},
        "vllm.config.kv_events": {"KVEventsConfig": config},
        "vllm.logger": {"init_logger": lambda _name: Quiet()},
        "vllm.utils": {},
        "vllm.utils.network_utils": dict.fromkeys(
            ("get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path")
        ),
        "vllm.v1": {},
        "vllm.v1.core": {},
        "vllm.v1.core.kv_cache_utils": {"ExternalBlockHash": bytes | int},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, values in stand_ins.items():
            module = types.ModuleType(name)
            module.__dict__.update(values)
            patch.setitem(sys.modules, name, module)
        loaded = types.ModuleType("vllm_kv_events")
        patch.setitem(sys.modules, "vllm_kv_events", loaded)
        exec(compile(source.read_text(), str(source), "exec"), loaded.__dict__)
        yield loaded


def test_our_subscriber_reads_vllms_publisher(vllm_events: Any) -> None:
    """What vLLM's publisher sends, replayed and live, is read whole and in order."""
    live = free_base(1)
    replay = live + 1
    theirs = vllm_events.ZmqEventPublisher(
        0, endpoint=f"tcp://*:{live}", replay_endpoint=f"tcp://*:{replay}", topic="kv"
    )
    try:

        def publish(number: int) -> None:
            stored = vllm_events.BlockStored(
                block_hashes=[number + 1, number + 2],
                parent_block_hash=None,
                token_ids=[1, 2, 3, 4],
                block_size=2,
                lora_id=None,
                medium="GPU",
                lora_name=None,
            )
            removed = vllm_events.BlockRemoved(block_hashes=[number + 1], medium="GPU")
            theirs.publish(vllm_events.KVEventBatch(ts=float(number), events=[stored, removed]))

        for number in range(20):
            publish(number)
        source = Source(f"tcp://127.0.0.1:{live}", f"tcp://127.0.0.1:{replay}")
        batches: list[Batch] = []
        with Subscriber(source, from_seq="start", probe_idle_s=0.5) as subscriber:
            deadline = time.monotonic() + 20
            sent = 20
            while len(batches) < 30:
                assert time.monotonic() < deadline, len(batches)
                record = subscriber.poll(0.05)
                if isinstance(record, Batch):
                    batches.append(record)
                if len(batches) >= 20 and sent < 30:
                    publish(sent)
                    sent += 1
    finally:
        theirs.shutdown()
    for number, record in enumerate(batches):
        assert (record.seq, record.topic, record.batch.ts) == (number, b"kv", float(number))
        assert record.batch.events == (
            BlockStored((number + 1, number + 2), None, (1, 2, 3, 4), 2, medium="GPU"),
            BlockRemoved((number + 1,), medium="GPU"),
        )


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ])
def test_a_plain_subscriber_reads_our_publisher(vllm_events: Any, kind: int) -> None:
    """SUB and a replay by bare sockets and vLLM's own types get what was published, by our publisher."""
    decoder = vllm_events.msgspec.msgpack.Decoder(vllm_events.EventBatch)
    with (
        Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", release=str(NEWEST), topic="kv") as publisher,
        zmq.Context() as context,
        context.socket(zmq.SUB) as sub,
        context.socket(kind) as replay,
    ):
        assert publisher.replay_endpoint is not None
        for socket in (sub, replay):
            socket.linger = 0
            socket.rcvtimeo = 20_000
        sub.subscribe("kv")
        sub.connect(publisher.endpoint)
        deadline = time.monotonic() + 20
        sent = 0
        while not sub.poll(50):
            assert time.monotonic() < deadline
            publisher.publish(EventBatch(float(sent), (BlockStored((sent + 1,), None, (1, 2), 2),), 0))
            sent += 1
        topic, number, payload = sub.recv_multipart()
        seq = int.from_bytes(number, "big")
        assert (topic, decoder.decode(payload).ts) == (b"kv", float(seq))
        replay.connect(publisher.replay_endpoint)
        start = (0).to_bytes(8, "big")
        replay.send_multipart([start] if kind == zmq.REQ else [b"", start])
        seen: list[int] = []
        while True:
            frames = replay.recv_multipart()
            number, payload = frames[-2:]
            assert len(frames) == (3 if kind == zmq.REQ else 4)
            if int.from_bytes(number, "big") == END:
                break
            seen.append(int.from_bytes(number, "big"))
            assert decoder.decode(payload).ts == float(seen[-1])
            if kind == zmq.REQ:
                break  # such a socket takes one reply a request
    assert seen == list(range(1 if kind == zmq.REQ else sent))
