"""Events go out as vLLM's do: shape, order, sequence numbers, replay, nothing lost at shutdown."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

import pytest
import zmq

from engine_ref.coordinator import CacheConfig
from engine_ref.core import EngineCore
from engine_ref.event_config import KVEventsConfig, offset_endpoint
from engine_ref.loop import EngineLoop, Output
from engine_ref.metrics import EngineMetrics, HitRate
from engine_ref.publisher import ZmqEventPublisher
from engine_ref.request import Request
from engine_ref.runner import NullRunner
from engine_ref.scheduler import SchedulerConfig
from engine_ref.spec import FullAttentionSpec
from kvhash import BlockHasher, KvHashError
from kvhash.events.decode import decode_batch
from kvhash.events.schema import AllBlocksCleared, BlockStored

HASHER = BlockHasher(block_size=4, algorithm="sha256_cbor")
END = (-1).to_bytes(8, "big", signed=True)


def core(publisher: ZmqEventPublisher | None = None) -> EngineCore:
    """Return a small engine."""
    cache = CacheConfig(
        groups=(FullAttentionSpec(block_size=4),),
        num_blocks=40,
        hash_block_size=4,
        scheduler_block_size=4,
        max_model_len=64,
    )
    publish = publisher.publish if publisher else lambda events: None
    return EngineCore(SchedulerConfig(cache=cache), NullRunner(), publish=publish)


def replay(endpoint: str, start: int) -> list[tuple[int, bytes]]:
    """Ask a replay socket for the batches from `start`."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 10_000)
    try:
        socket.connect(endpoint)
        socket.send_multipart((b"", start.to_bytes(8, "big")))
        batches = []
        while True:
            frames = socket.recv_multipart()
            if frames[-2] == END:
                return batches
            batches.append((int.from_bytes(frames[-2], "big"), frames[-1]))
    finally:
        context.destroy(linger=0)


@contextmanager
def publisher(**options: str) -> Iterator[ZmqEventPublisher]:
    """Run a publisher on free ports."""
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint="tcp://127.0.0.1:*",
        replay_endpoint="tcp://127.0.0.1:*",
        topic="kv",
    )
    running = ZmqEventPublisher(config, **options)  # type: ignore[arg-type]
    try:
        yield running
    finally:
        running.close()


def test_requests_are_published_and_replayed() -> None:
    """What the engine stores and clears comes out of the replay socket in order, numbered from 0."""
    with publisher() as out:
        metrics = EngineMetrics("null")
        loop = EngineLoop(core(out), metrics)
        loop.start()
        outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        for name in ("a", "b"):
            loop.submit(Request(name, list(range(10)), hasher=HASHER, max_tokens=3), outputs.put)
            got = [outputs.get(timeout=10)]
            while not got[-1].finished:
                got.append(outputs.get(timeout=10))
            assert sum(len(output.token_ids) for output in got) == 3
        assert loop.reset_prefix_cache().result(10) is True
        assert loop.close()
        assert out.replay_endpoint is not None
        batches = replay(out.replay_endpoint, 0)
        while len(batches) < 4:  # the replay socket is served between batches
            batches = replay(out.replay_endpoint, 0)
        assert [number for number, _ in batches] == list(range(len(batches)))
        events = [event for _, payload in batches for event in decode_batch(payload).events]
        stored = [event for event in events if isinstance(event, BlockStored)]
        assert next(event.block_hashes for event in stored) == tuple(HASHER.chain(list(range(10))).external())
        assert events[-1] == AllBlocksCleared()
        assert replay(out.replay_endpoint, 1)[0][0] == 1
    text = metrics.render().decode()
    assert 'vllm:prefix_cache_queries_total{engine="0",model_name="null"} 20.0' in text
    assert 'vllm:prefix_cache_hits_total{engine="0",model_name="null"} 8.0' in text
    assert (
        'vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="null",source="device"} 8.0' in text
    )


def test_subscriber_sees_topic_sequence_and_payload() -> None:
    """A live subscriber gets three frames for each batch."""
    with publisher(release="0.11.0") as out:
        context = zmq.Context()
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVTIMEO, 100)
        socket.setsockopt(zmq.SUBSCRIBE, b"kv")
        socket.connect(out.endpoint)
        try:
            for _ in range(100):  # a subscription takes effect some time after the connection
                out.publish([AllBlocksCleared()])
                try:
                    topic, number, payload = socket.recv_multipart()
                    break
                except zmq.Again:
                    continue
            assert (topic, len(number)) == (b"kv", 8)
            assert decode_batch(payload).events == (AllBlocksCleared(),)
        finally:
            context.destroy(linger=0)


def test_abort_through_the_loop_frees_blocks() -> None:
    """A client that goes away frees its blocks, and the engine goes on."""
    loop = EngineLoop(core())
    loop.start()
    first = Event()
    loop.submit(Request("a", [1] * 8, hasher=HASHER, max_tokens=50), lambda output: first.set())
    assert first.wait(10)
    loop.abort("a")
    assert loop.reset_prefix_cache().result(10) is True
    assert loop.close()


def test_kv_events_config_has_the_defaults_of_vllm() -> None:
    """An enabled configuration publishes over ZeroMQ on port 5557; unknown fields and values are refused."""
    config = KVEventsConfig.from_json('{"enable_kv_cache_events": true}')
    assert (config.publishes, config.endpoint, config.replay_endpoint) == (True, "tcp://*:5557", None)
    assert not KVEventsConfig.from_json("{}").publishes
    for text in ('{"endpiont": "x"}', '{"publisher": "kafka"}', "{", '{"hwm": "many"}'):
        with pytest.raises(KvHashError, match="--kv-events-config"):
            KVEventsConfig.from_json(text)


def test_each_rank_has_its_own_port() -> None:
    """The port is offset by the data-parallel rank; a port of 0 is the system's to choose."""
    assert offset_endpoint("tcp://*:5557", 0) == "tcp://*:5557"
    assert offset_endpoint("tcp://*:5557", 2) == "tcp://*:5559"
    assert offset_endpoint("tcp://*:0", 2) == "tcp://*:0"
    assert offset_endpoint("inproc://cache", 1) == "inproc://cache_dp1"
    with pytest.raises(KvHashError):
        offset_endpoint("ipc:///tmp/x", 1)


def test_hit_rate_forgets_old_requests() -> None:
    """The rate is over the last window of requests, in tokens."""
    rate = HitRate(2)
    assert rate.value == 0.0
    rate.observe(1, 100, 0)
    rate.observe(1, 100, 100)
    assert rate.value == 0.5
    rate.observe(1, 100, 100)
    assert rate.value == 1.0
