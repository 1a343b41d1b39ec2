"""Events go out as vLLM's do: shape, order, sequence numbers, replay, nothing lost at shutdown."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine_ref.build import make_engine
from engine_ref.event_config import KVEventsConfig
from engine_ref.loop import EngineLoop
from engine_ref.metrics import EngineMetrics, HitRate
from engine_ref.patient import PatientHasher
from engine_ref.publisher import EventPublisher
from engine_ref.report import EngineRequest, EngineStats, StepReport
from kvhash import BlockHasher, KvHashError
from kvhash.events.decode import decode_batch
from kvhash.events.records import Batch
from kvhash.events.schema import AllBlocksCleared, BlockRemoved, BlockStored
from kvhash.events.subscriber import Source, Subscriber

from ..ports import free_base
from .running import DEADLINE_S, small_options

HASHER = BlockHasher(block_size=4, algorithm="sha256_cbor", hash_seed="0")


def batches(out: EventPublisher | Any, count: int) -> list[Batch]:
    """Return the first `count` batches of a publisher, by replay and live."""
    found: list[Batch] = []
    endpoint, replay = out.endpoints if hasattr(out, "endpoints") else (out.endpoint, out.replay_endpoint)
    with Subscriber(Source(endpoint, replay), from_seq="start") as subscriber:
        while len(found) < count:
            record = subscriber.poll(DEADLINE_S)
            assert record is not None, f"{len(found)} of {count} batches came"
            if isinstance(record, Batch):
                found.append(record)
    return found


@contextmanager
def publisher(release: str = "latest", **options: Any) -> Iterator[EventPublisher]:
    """Run a publisher on free ports."""
    given: dict[str, Any] = {
        "endpoint": "tcp://127.0.0.1:*",
        "replay_endpoint": "tcp://127.0.0.1:*",
        "topic": "kv",
    }
    config = KVEventsConfig(enable_kv_cache_events=True, **{**given, **options})
    running = EventPublisher(config, release=release)
    try:
        yield running
    finally:
        running.close()


def run_to_end(engine: Any, reports: queue.SimpleQueue[StepReport], request: EngineRequest) -> list[int]:
    """Run a request; returns its tokens."""
    engine.add(request)
    tokens: list[int] = []
    while True:
        for output in reports.get(timeout=DEADLINE_S).outputs:
            tokens += output.token_ids
            if output.finish_reason:
                assert output.error is None
                return tokens


def test_requests_are_published_and_replayed() -> None:
    """What the engine stores and clears comes out in order, numbered from 0, and all of it before it is closed."""
    reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
    engine = make_engine(small_options(), reports.put)
    engine.start()
    for name in ("a", "b"):
        request = EngineRequest(request_id=name, prompt_token_ids=list(range(10)), max_tokens=3)
        assert len(run_to_end(engine, reports, request)) == 3
    assert engine.reset_prefix_cache().result(DEADLINE_S) is True
    # a's prompt, a's last block, b's last block, the reset
    got = batches(engine, 4)
    assert [batch.seq for batch in got] == [0, 1, 2, 3]
    events = [event for batch in got for event in batch.batch.events]
    assert [type(event) for event in events] == [BlockStored] * 3 + [AllBlocksCleared]
    assert isinstance(events[0], BlockStored)
    assert events[0].block_hashes == tuple(HASHER.chain(list(range(10))).external())
    assert engine.close()


def test_closing_publishes_everything_that_is_queued() -> None:
    """A subscriber that is connected gets every batch of an engine that ends, the last one too."""
    with publisher(replay_endpoint=None) as out, Subscriber(out.endpoint) as subscriber:
        for number in range(1000):  # a subscription takes effect some time after the connection
            out.publish([BlockRemoved(block_hashes=(number,), medium="GPU")])
            if (first := subscriber.poll(0.01)) is not None:
                break
        assert isinstance(first, Batch)
        for number in range(500):
            out.publish([BlockRemoved(block_hashes=(number,), medium="GPU")])
        assert out.close() == 0
        seqs = [first.seq]
        while seqs[-1] < first.seq + 500:
            record = subscriber.poll(DEADLINE_S)
            assert isinstance(record, Batch)
            seqs.append(record.seq)
        assert seqs == list(range(first.seq, first.seq + len(seqs)))


def test_batches_have_the_shape_of_the_emulated_release() -> None:
    """Fields that the release does not have are left out; its own layout is written."""
    event = BlockStored(
        block_hashes=(1,), parent_block_hash=None, token_ids=(1, 2), block_size=2, medium="GPU", group_idx=0
    )
    with publisher(release="0.11.0") as out:
        out.publish([event])
        (batch,) = batches(out, 1)
    assert batch.payload.count(b"BlockStored") == 1
    assert b"group_idx" not in batch.payload
    (read,) = decode_batch(batch.payload).events
    assert isinstance(read, BlockStored)
    assert (read.block_hashes, read.medium, read.group_idx) == ((1,), "GPU", None)


def test_a_batch_that_cannot_be_written_is_counted_and_the_engine_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whole digests at a release that has only integers: said in the log, nothing raised."""
    with publisher(release="0.10.1") as out:
        out.publish([BlockRemoved(block_hashes=(bytes(32),), medium="GPU")])
        assert out.failed == 1
        out.publish([BlockRemoved(block_hashes=(1,), medium="GPU")])
        assert [batch.seq for batch in batches(out, 1)] == [0]
    assert "cannot be published" in caplog.text


def test_an_endpoint_that_names_a_host_is_connected_to(caplog: pytest.LogCaptureFixture) -> None:
    """tcp://127.0.0.1:PORT connects as in vLLM: a subscriber that binds there gets the batches; the log says so."""
    caplog.set_level(logging.INFO)
    port = free_base()
    with (
        Subscriber(f"tcp://127.0.0.1:{port}", bind=True) as subscriber,
        publisher(endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=None, topic="") as out,
    ):
        for _ in range(1000):
            out.publish([AllBlocksCleared()])
            if (record := subscriber.poll(0.01)) is not None:
                break
        assert isinstance(record, Batch)
    assert "CONNECTED" in caplog.text
    with publisher(endpoint="tcp://127.0.0.1:*"):
        assert "bound to tcp://127.0.0.1:" in caplog.text


def test_an_endpoint_in_use_is_a_typed_error() -> None:
    """A port that is taken is said, and nothing is left open."""
    with publisher() as out, pytest.raises(KvHashError, match="cannot use"):
        EventPublisher(
            KVEventsConfig(
                enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:*", replay_endpoint=out.replay_endpoint
            )
        )


def test_abort_through_the_loop_frees_blocks() -> None:
    """A client that goes away frees its blocks, whether the request runs already or not, and the engine goes on."""
    reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
    engine = make_engine(small_options(max_model_len=100_000, num_gpu_blocks=25_002), reports.put)
    engine.start()
    engine.add(EngineRequest(request_id="a", prompt_token_ids=[1] * 8, max_tokens=90_000))
    while not reports.get(timeout=DEADLINE_S).outputs:
        pass
    engine.abort("a")
    engine.add(EngineRequest(request_id="b", prompt_token_ids=[1] * 8, max_tokens=90_000))
    engine.abort("b")
    engine.abort("c")
    ended: dict[str, str] = {}
    while len(ended) < 2:
        report = reports.get(timeout=DEADLINE_S)
        ended |= {
            output.request_id: output.finish_reason for output in report.outputs if output.finish_reason
        }
    assert ended == {"a": "abort", "b": "abort"}
    assert report.stats.kv_cache_usage == 0
    assert engine.reset_prefix_cache().result(DEADLINE_S) is True
    assert engine.close()


def test_a_request_that_cannot_be_hashed_is_refused_alone() -> None:
    """A bad salt that got so far ends its request with an error; the next request is served."""
    reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
    engine = make_engine(small_options(), reports.put)
    engine.start()
    engine.add(EngineRequest(request_id="a", prompt_token_ids=[1], cache_salt=5))  # type: ignore[arg-type]
    (refused,) = reports.get(timeout=DEADLINE_S).outputs
    assert (refused.finish_reason, refused.refused) == ("error", True)
    assert "salt" in str(refused.error)
    assert len(run_to_end(engine, reports, EngineRequest(request_id="a", prompt_token_ids=[1]))) == 16
    assert engine.close()


def test_a_failing_step_ends_every_request_with_an_error() -> None:
    """Nobody waits for ever for an engine that has failed."""
    reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
    engine = make_engine(small_options(), reports.put)
    core = engine._loop.core

    def fail(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    core.runner.execute = fail  # type: ignore[method-assign]
    assert isinstance(engine._loop, EngineLoop)
    engine.start()
    engine.add(EngineRequest(request_id="a", prompt_token_ids=[1]))
    (output,) = reports.get(timeout=DEADLINE_S).outputs
    assert (output.finish_reason, output.refused) == ("error", False)
    assert not engine.alive
    assert engine.close()


def test_patient_hashing_gives_the_same_chain() -> None:
    """A long prompt hashed in slices has the hashes, and the errors, of one hashed at once; it pauses when asked."""
    tokens = [number % 1000 for number in range(5000)]
    asked: list[bool] = []

    def busy() -> bool:
        asked.append(True)
        return len(asked) == 1

    patient = PatientHasher(HASHER, busy)
    keys: dict[str, Any] = {
        "cache_salt": "a",
        "multimodal": [{"identifier": "i", "offset": 1000, "length": 2000}],
    }
    assert patient.chain(tokens, **keys).block_hashes == HASHER.hash_tokens(tokens, **keys)
    assert len(asked) == 4
    keys["multimodal"][0]["length"] = 4001
    with pytest.raises(KvHashError, match="multimodal"):
        patient.chain(tokens, **keys)


def test_kv_events_config_has_the_defaults_of_vllm() -> None:
    """An enabled configuration publishes over ZeroMQ on port 5557; unknown fields and values are refused."""
    config = KVEventsConfig.from_json('{"enable_kv_cache_events": true}')
    assert (config.publishes, config.endpoint, config.replay_endpoint) == (True, "tcp://*:5557", None)
    assert not KVEventsConfig.from_json("{}").publishes
    assert not KVEventsConfig.from_json('{"enable_kv_cache_events": true, "publisher": "null"}').publishes
    for text in ('{"endpiont": "x"}', '{"publisher": "kafka"}', "{", '{"hwm": "many"}'):
        with pytest.raises(KvHashError, match="--kv-events-config"):
            KVEventsConfig.from_json(text)


def test_each_rank_has_its_own_ports() -> None:
    """The ports are offset by the data-parallel rank."""
    base = free_base(1, 2, 3)
    config = KVEventsConfig(
        enable_kv_cache_events=True, endpoint=f"tcp://*:{base}", replay_endpoint=f"tcp://*:{base + 2}"
    )
    ranks = [EventPublisher(config, rank=rank) for rank in (0, 1)]
    ports = [(rank.endpoint.rsplit(":")[-1], str(rank.replay_endpoint).rsplit(":")[-1]) for rank in ranks]
    assert ports == [(str(base), str(base + 2)), (str(base + 1), str(base + 3))]
    for rank in ranks:
        rank.close()


def test_hit_rate_forgets_old_requests() -> None:
    """The rate is over the last window of requests, in tokens."""
    rate = HitRate(2)
    assert (rate.value, rate.empty) == (0.0, True)
    rate.observe(1, 100, 0)
    rate.observe(1, 100, 100)
    assert rate.value == 0.5
    rate.observe(1, 100, 100)
    assert rate.value == 1.0


def test_the_log_line_says_what_vllms_says() -> None:
    """Throughput, queue, usage and hit rate, in vLLM's words; an idle engine falls silent."""
    metrics = EngineMetrics("null")
    metrics.observe(
        0, EngineStats(running=2, waiting=1, kv_cache_usage=0.25, requests=1, queries=100, hits=75)
    )
    line = str(metrics.ranks[0].line())
    for part in (
        "Running: 2 reqs",
        "Waiting: 1 reqs",
        "KV cache usage: 25.0%",
        "Prefix cache hit rate: 75.0%",
    ):
        assert part in line
    metrics.observe(0, EngineStats())
    assert metrics.ranks[0].line() is not None
    assert metrics.ranks[0].line() is None
