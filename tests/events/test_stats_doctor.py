"""Counting a stream, telling its release range, and the doctor's findings."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from typing import Any

import pytest

from kvhash import BlockHasher, InvalidRequestError, KvHashError, Release
from kvhash.block_hash import low64
from kvhash.contract import CHANGES
from kvhash.events.decode import decode_batch
from kvhash.events.doctor import Doctor, Expectation, HttpProbe
from kvhash.events.encode import encode_batch
from kvhash.events.schema import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kvhash.events.stats import PublisherStats
from kvhash.events.wire_range import WireRange

from ..data_files import CAPTURES, capture


def _frames(name: str) -> list[bytes]:
    return [bytes.fromhex(payload) for _topic, _seq, payload in capture(name)["frames"]]


def _doctor(payloads: Iterable[bytes], **options: Any) -> Doctor:
    doctor = Doctor(**options)
    for payload in payloads:
        batch = decode_batch(payload)
        publisher = doctor.stats.publisher("tcp://engine:5557", batch.data_parallel_rank)
        doctor.see_batch(publisher, batch, payload, received=batch.ts + 0.01)
    return doctor


def _codes(doctor: Doctor, *levels: str) -> set[str]:
    return {finding.code for finding in doctor.findings(waited_s=1) if not levels or finding.level in levels}


def _stored(tokens: list[int], hasher: BlockHasher, **fields: Any) -> BlockStored:
    chain = hasher.chain(tokens, **{k: v for k, v in fields.items() if k in ("lora", "cache_salt")})
    event = {k: v for k, v in fields.items() if k not in ("lora", "cache_salt")}
    return BlockStored(
        block_hashes=tuple(low64(value) for value in chain.block_hashes),
        parent_block_hash=None,
        token_ids=tuple(tokens),
        block_size=hasher.block_size,
        medium="GPU",
        **event,
    )


def _payload(*events: Any, release: str = "0.33.0", rank: int | None = None) -> bytes:
    return encode_batch(EventBatch(1700000000.0, tuple(events), rank), release)


HASHER = BlockHasher(vllm="0.33.0", algorithm="sha256_cbor", hash_seed="0", block_size=16)
TOKENS = list(range(500, 564))


# --- release range --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: str(change.since))
def test_a_full_event_narrows_the_range_to_its_release(change: Any) -> None:
    """Events of a release leave a range that holds that release, and none before the last change of the format."""
    release = str(change.since)
    seen = WireRange()
    seen.see(
        _payload(BlockStored((1,), None, (1, 2), 2), BlockRemoved((1,)), AllBlocksCleared(), release=release)
    )
    assert any(
        first <= change.since and (before is None or change.since < before) for first, before in seen.ranges
    )


def test_optional_fields_of_a_map_raise_the_lower_bound() -> None:
    """A session id is written from 0.30 on, so nothing older remains."""
    seen = WireRange()
    seen.see(_payload(BlockStored((1,), None, (1,), 1, session_id="s")))
    assert seen.ranges == ((Release(0, 30, 0), None),)
    assert seen.text == "0.30.0 and later"


def test_what_no_release_writes() -> None:
    """Events of two layouts leave nothing; rubbish is passed over."""
    seen = WireRange()
    for payload in (b"", b"\xff", b"\x93\x00\x00\x00", b"\xc0"):
        seen.see(payload)
    assert len(seen.ranges) == 1
    seen.see(_payload(AllBlocksCleared(), release="0.33.0"))
    seen.see(_payload(AllBlocksCleared(), release="0.14.0"))
    assert seen.ranges == ()
    assert seen.text == "no vLLM release"


# --- stats ----------------------------------------------------------------------------------------------------


def test_counts_and_held_blocks() -> None:
    """Stored, removed and cleared blocks by tier and group; a removal in one group leaves the other's block."""
    stats = PublisherStats("e", 0)
    events = (
        BlockStored((1, 2), None, (1, 2), 1, medium="gpu", group_idx=0),
        BlockStored((2, 3), None, (1, 2), 1, medium="GPU", group_idx=1),
        BlockStored((1,), None, (), 0, medium="CPU"),
        BlockRemoved((2,), medium="GPU", group_idx=1),
    )
    stats.see(EventBatch(10.0, events), received=10.5)
    assert (stats.stored, stats.removed, stats.held, stats.lag_s) == (5, 1, 4, 0.5)
    assert stats.held_by() == {("CPU", None): 1, ("GPU", 0): 2, ("GPU", 1): 1}
    stats.see(EventBatch(11.0, (AllBlocksCleared(),)), received=11.0)
    assert (stats.held, stats.clears) == (0, 1)
    assert stats.to_json(now=11.0)["rate"] == 0.6


def test_memory_stays_flat_over_many_events() -> None:
    """Storing and removing again and again keeps nothing."""
    stats = PublisherStats("e", 0)

    def churn(start: int, count: int) -> None:
        for i in range(start, start + count):
            pair = (BlockStored((i,), None, (), 0), BlockRemoved((i,)))
            stats.see(EventBatch(i * 1e-4, pair), received=i * 1e-4)

    churn(0, 20_000)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    churn(20_000, 40_000)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert stats.stored == 60_000
    assert stats.held == 0
    assert grown < 80_000


# --- doctor ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CAPTURES)
def test_a_healthy_recorded_server_has_no_problem(name: str) -> None:
    """Each recorded server's stream is recognised: release range, hash form, algorithm, seed, block size."""
    run = capture(name)
    doctor = _doctor(_frames(name), lora_paths={"sql": "adapters/sql"})
    findings = {finding.code: finding for finding in doctor.findings(waited_s=1)}
    assert not {f.code for f in findings.values() if f.level == "problem"}
    assert "0.32" in findings["wire"].seen or "and later" in findings["wire"].seen
    assert f"algorithm {run['algo']}," in findings["settings"].seen
    seed = "unset" if run["hash_seed"] is None else repr(run["hash_seed"])
    assert f"PYTHONHASHSEED {seed}, 32 tokens a block" in findings["settings"].seen


def test_silence_lists_its_causes_in_order() -> None:
    """Nothing received: the causes are named, events being off first."""
    (finding,) = Doctor().findings(waited_s=5)
    assert (finding.level, finding.code) == ("problem", "silence")
    assert finding.advice is not None
    order = ["kv-events-config", "no request ran", "topic", "both sides connect", "wildcard", "next step"]
    places = [finding.advice.index(cause) for cause in order]
    assert places == sorted(places)


def test_http_and_foreign_messages() -> None:
    """An engine that does not answer, and a port that sends something else, are said first."""
    down = Doctor().findings(HttpProbe(False, "connection refused"), waited_s=1)
    assert down[0].code == "http-unreachable"
    doctor = Doctor()
    doctor.see_bad_message()
    up = doctor.findings(
        HttpProbe(True, version="0.33.0", models=("m",), prefix_cache_queries=10.0, prefix_cache_hits=5.0),
        waited_s=1,
    )
    assert [finding.code for finding in up] == ["http", "prefix-cache", "no-batches"]


def test_an_unknown_root_names_the_seed() -> None:
    """Hashes of a seed that was not tried: PYTHONHASHSEED is named as the cause."""
    other = BlockHasher(vllm="0.33.0", algorithm="xxhash", hash_seed="someone's own", block_size=16)
    doctor = _doctor([_payload(_stored(TOKENS, other))])
    (finding,) = [f for f in doctor.findings(waited_s=1) if f.level == "problem"]
    assert finding.code == "unknown-root"
    assert "PYTHONHASHSEED" in (finding.advice or "")
    told = _doctor([_payload(_stored(TOKENS, other))], hash_seeds=["someone's own"])
    assert "not-collision-resistant" in _codes(told)
    assert not _codes(told, "problem")


@pytest.mark.parametrize(
    ("expect", "code"),
    [
        ({"algorithm": "sha256"}, "expected-algorithm"),
        ({"hash_seed": "42"}, "expected-hash_seed"),
        ({"hash_seed": None}, "expected-hash_seed"),
        ({"block_size": 64}, "expected-block_size"),
        ({"hash_form": "bytes"}, "expected-hash_form"),
        ({"ranks": [0, 1]}, "expected-ranks"),
        ({"vllm": "0.9.2"}, "expected-vllm"),
        ({"vllm": "0.20.0"}, "expected-vllm"),
    ],
)
def test_each_setting_that_differs_is_named(expect: dict[str, Any], code: str) -> None:
    """A router's settings held against the stream: what differs is a problem of its own, what agrees is none."""
    payload = _payload(_stored(TOKENS, HASHER), rank=0)
    doctor = _doctor([payload], expect=Expectation.of(expect))
    assert _codes(doctor, "problem") == {code}
    right = {
        "algorithm": "sha256_cbor",
        "hash_seed": "0",
        "block_size": 16,
        "hash_form": "int",
        "ranks": [0],
        "vllm": "0.33.0",
    }
    assert not _codes(_doctor([payload], expect=Expectation.of(right)), "problem")


@pytest.mark.parametrize(
    "settings",
    [
        [],
        {"algo": "sha256"},
        {"block_size": "16"},
        {"block_size": True},
        {"algorithm": "md5"},
        {"vllm": "x"},
        {"hash_form": "hex"},
    ],
)
def test_a_router_setting_that_is_none_is_refused(settings: Any) -> None:
    """A misspelt or wrong expectation must not pass as one that agrees."""
    with pytest.raises(KvHashError):
        Expectation.of(settings)
    assert issubclass(InvalidRequestError, KvHashError)


def test_an_adapter_path_that_is_not_known() -> None:
    """A LoRA block cannot be recomputed from its event from 0.31 on; with the path it can."""
    event = _stored(
        TOKENS, HASHER, lora={"name": "sql", "path": "/a"}, lora_name="sql", extra_keys=(("sql",),) * 4
    )
    assert _codes(_doctor([_payload(event)]), "warning") == {"lora-path-unknown"}
    assert not _codes(_doctor([_payload(event)], lora_paths={"sql": "/a"}), "warning", "problem")


def test_the_health_of_a_stream() -> None:
    """Clears beyond stores, a tier without removals, gaps, restarts, lag and undecodable events are each said."""
    doctor = _doctor([_payload(_stored(TOKENS, HASHER), *[AllBlocksCleared()] * 5)])
    assert "clears" in _codes(doctor, "warning")
    offload = _doctor([_payload(BlockStored(tuple(range(1500)), None, (), 0, medium="CPU"))])
    assert {"no-removals", "no-tokens"} <= _codes(offload)
    publisher = next(iter(doctor.stats))
    publisher.gaps, publisher.lost, publisher.lag_s, publisher.undecodable = 2, 7, 9.0, 1
    publisher.restart()
    assert {"gaps", "restarts", "lag", "undecodable"} <= _codes(doctor)


def test_groups_and_their_kinds() -> None:
    """Several KV cache groups are listed with their kinds."""
    events = [
        BlockStored((i + 1,), None, (1,), 1, medium="GPU", group_idx=i, kv_cache_spec_kind=kind)
        for i, kind in enumerate(("full_attention", "sliding_window"))
    ]
    findings = {f.code: f for f in _doctor([_payload(*events)]).findings(waited_s=1)}
    assert findings["groups"].seen == "KV cache groups 0: full_attention, 1: sliding_window"
