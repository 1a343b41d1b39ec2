"""What callers give: every public function of the index, in every form, says what was wrong and where."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import redis
import redis.asyncio

from kvhash import InvalidHashError, KvHashError, UsageError
from kvhash._backend import native_module
from kvhash.events import BlockRemoved, BlockStored, EventBatch, encode_batch, hash_key
from kvhash.events.records import BadMessage, Batch, Confirmed, Gap, Lost, Recovered, Restart, Stale
from kvhash.index import EngineSettings, GroupSettings, ResidencyIndex
from kvhash.index.shared import SharedResidencyIndex
from kvhash.index.types import MAX_BLOCK_TOKENS

from ..interop.toolchain import need
from .build import CLEARED, SIZE, batch, record, removed, stored
from .redis_server import RedisServer

H = list(range(101, 111))
FORMS = ("python", "native", "shared")
#: Nothing of this is text, a list, a record, a batch, settings ...
ODD: list[Any] = [None, True, -1, 0, 5, 1 << 63, 1 << 64, 1.5, math.nan, "abc", "", "\ud800", b"abc", b"", [],
                  [None], {}, ["abc", None], [[]], {"a": 1}, {1, 2}, object(), int, np.zeros((2, 2)),
                  (x for x in ())]  # fmt: skip


@pytest.fixture(params=FORMS)
def index(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return an index of each form whose engine `a` holds three blocks."""
    if request.param == "native" and native_module() is None:
        need("a build of kvhash._native")
    if request.param == "shared":
        running: RedisServer = request.getfixturevalue("server")
        made: Any = SharedResidencyIndex(running.client(), retry_s=0.0, clock=lambda: 5.0)
    else:
        monkeypatch.setenv("KVHASH_BACKEND", request.param)
        made = ResidencyIndex(clock=lambda: 5.0)
    made.apply_record("a", record(0, stored(H[:3])))
    return made


def seen(index: Any) -> Any:
    """Return all that shows of an index."""
    engines = index.engines()
    return (
        engines,
        [
            (index.holdings(name), index.knowledge(name), index.ranks(name), index.position(name, 0))
            for name in engines
        ],
        index.longest_prefix(H),
        index.stats(),
    )


def refused(call: Callable[[], Any], at: str) -> None:
    """Hold a call to raising a UsageError that says where."""
    with pytest.raises(UsageError) as caught:
        call()
    assert caught.value.at is not None
    assert caught.value.at.startswith(at), caught.value
    assert "expected" in caught.value.message


def test_engines_have_names(index: Any) -> None:
    """What is no text that UTF-8 can carry is no engine's name, in any call; nothing changes."""
    before = seen(index)
    payload = encode_batch(batch(stored(H[:1])))
    for name in ODD:
        if isinstance(name, str) and name != "\ud800":
            continue
        calls = [
            lambda name=name: index.configure(name, EngineSettings()),
            lambda name=name: index.apply(name, batch(CLEARED)),
            lambda name=name: index.apply_record(name, record(1)),
            lambda name=name: index.remove(name),
            lambda name=name: index.ranks(name),
            lambda name=name: index.knowledge(name),
            lambda name=name: index.position(name, 0),
            lambda name=name: index.holdings(name),
            lambda name=name: index.blocks_by_tier(name),
        ]
        calls.append(lambda name=name: index.apply_payloads(name, [payload]))
        if not isinstance(index, ResidencyIndex):
            calls.append(lambda name=name: index.apply_records(name, [record(1)]))
        for call in calls:
            refused(call, "$.engine")
    assert seen(index) == before


def test_an_engine_that_is_not_known_is_empty(index: Any) -> None:
    """Asking for it is no mistake: nothing is held, it was never heard of, and removing it says so."""
    assert index.remove("zzz") is False
    assert index.ranks("zzz") == []
    assert index.holdings("zzz") == index.blocks_by_tier("zzz") == {}
    assert index.knowledge("zzz").reasons == ("never-heard",)
    assert index.knowledge("a", 7).reasons == ("never-heard",)
    assert index.position("zzz", 0) is index.position("a", 7) is None
    assert index.longest_prefix(H, ["zzz"])["zzz"].blocks == 0
    assert index.engines() == ["a"]


def test_lookups_say_what_is_wrong(index: Any) -> None:
    """Hashes that are no list of hashes, engines that are no list of names, a number of tokens that is none."""
    for value in ODD:
        if isinstance(value, list) and not value:
            assert index.longest_prefix(value)["a"].blocks == 0
        elif not hasattr(value, "__next__"):
            refused(lambda value=value: index.longest_prefix(value), "$.hashes")
            if value is not None and (not isinstance(value, np.ndarray)):
                refused(lambda value=value: index.longest_prefix(H, value), "$.engines")
        if value is not None and (
            isinstance(value, (bool, np.ndarray)) or not isinstance(value, int) or value < 0
        ):
            refused(lambda value=value: index.longest_prefix(H, num_tokens=value), "$.num_tokens")
    for bad in (None, True, 1.5, "ab", b"", b"1234567", bytes(65), [5], np.bool_(True), bytearray(32)):
        for place in (0, 1, 2):
            hashes = [*H[:place], bad, *H[place + 1 : 3]]
            with pytest.raises(InvalidHashError) as caught:
                index.longest_prefix(hashes)
            assert caught.value.at == f"$.hashes[{place}]"
        refused(lambda bad=bad: index.longest_prefix(iter([bad])), "$.hashes[0]")


def test_hashes_of_every_kind_are_the_same_block(index: Any) -> None:
    """Integers of any width and sign, bytes of 8 to 64, NumPy's scalars; generators of them and of names."""
    wide = [value | 7 << 200 for value in H]
    for hashes in (
        wide,
        [value.to_bytes(8, "big") for value in H],
        [bytes(56) + value.to_bytes(8, "big") for value in H],
        [np.uint64(value) for value in H],
        [np.int64(value) for value in H],
        (value for value in H),
        [value - (1 << 64) for value in H],
    ):
        found = index.longest_prefix(hashes, (name for name in ["b", "a"]), num_tokens=np.int64(100))
        assert [(name, match.blocks) for name, match in found.items()] == [("b", 0), ("a", 3)]


def test_ranks_and_limits(index: Any) -> None:
    """A rank is an integer of 64 bits or None; True is none, though Python takes it for 1."""
    for value in ODD:
        rank = value is None or (isinstance(value, int) and not isinstance(value, bool) and value < 1 << 64)
        if not rank and not isinstance(value, np.ndarray):
            refused(lambda value=value: index.position("a", value), "$.rank")
            refused(lambda value=value: index.knowledge("a", value), "$.rank")
        if isinstance(index, ResidencyIndex) and (type(value) is not int or value < 0 or value > 1 << 62):
            refused(lambda value=value: index.hottest_prefixes(value), "$.limit")


def test_settings_and_batches_and_records(index: Any) -> None:
    """What is no settings, no batch, no record, no payload or no snapshot changes nothing."""
    before = seen(index)
    for value in ODD:
        refused(lambda value=value: index.configure("a", value), "$.settings")
        refused(lambda value=value: index.apply("a", value), "$.batch")
        refused(lambda value=value: index.apply_record("a", value), "$.record")
        if not (isinstance(value, list) and not value) and not hasattr(value, "__next__"):
            refused(lambda value=value: index.apply_payloads("a", value), "$")
        if isinstance(index, ResidencyIndex):
            if isinstance(value, bytes):
                with pytest.raises(KvHashError):
                    index.load(value)
            else:
                refused(lambda value=value: index.load(value), "$.data")
        elif not isinstance(value, (list, str, bytes, dict)) and not hasattr(value, "__next__"):
            refused(lambda value=value: index.apply_records("a", value), "$.record")
    assert seen(index) == before


def with_fields(event: Any, **fields: Any) -> Any:
    """Return an event with fields that may be anything."""
    return msgspec.structs.replace(event, **fields)


BAD_FIELDS = [
    (BlockStored, "block_hashes", [None, 5, "ab", (None,), ("ab",), (True,), (b"short",), (1.5,), (5, bytes(32))]),
    (BlockStored, "parent_block_hash", ["ab", True, b"short", 1.5, bytes(32)]),
    (BlockStored, "token_ids", [None, 5, "ab", ("a",), (1.5,), (True,), ((1, 2, 3),), ((1, 2), 3), ((1, "a"),)]),
    (BlockStored, "block_size", [None, "4", 1.5, True, -1, 1 << 64]),
    (BlockStored, "lora_id", ["4", 1.5, True, 1 << 64, -(1 << 63) - 1]),
    (BlockStored, "group_idx", ["4", 1.5, True, 1 << 64, [0]]),
    (BlockStored, "kv_cache_spec_sliding_window", ["4", 1.5, True, 1 << 64]),
    (BlockStored, "medium", [5, b"GPU", ["GPU"], "\ud800"]),
    (BlockStored, "locality", [5, b"LOCAL"]),
    (BlockStored, "lora_name", [5, b"a"]),
    (BlockStored, "kv_cache_spec_kind", [5, b"mamba"]),
    (BlockStored, "extra_keys", [5, "ab", (5,), ("ab",)]),
    (BlockStored, "lookahead_token_ids", [5, "ab", (5,)]),
    (BlockRemoved, "block_hashes", [None, 5, (None,), (b"short",)]),
    (BlockRemoved, "medium", [5, b"GPU"]),
    (BlockRemoved, "group_idx", ["4", 1.5, True]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "values"), BAD_FIELDS, ids=lambda value: getattr(value, "__name__", None)
)
def test_batches_made_by_hand(index: Any, kind: type, name: str, values: list[Any]) -> None:
    """A field of a wrong type or range is named, by `apply` and by `apply_record`; nothing is applied."""
    before = seen(index)
    good = stored(H[3:4], H[2]) if kind is BlockStored else removed(H[:1])
    for value in values:
        wrong = batch(stored(H[5:6]), with_fields(good, **{name: value}))
        refused(lambda wrong=wrong: index.apply("a", wrong), "$.batch.events[1].")
        by_hand = Batch("e", 0, 1, b"", 0, wrong, b"")
        refused(lambda by_hand=by_hand: index.apply_record("a", by_hand), "$.record.batch.events[1].")
    assert seen(index) == before


def test_odd_values_that_a_batch_may_have(index: Any) -> None:
    """Integers as wide as a message carries them, hashes wider than that, and what is not read at all: applied."""
    index.configure("a", EngineSettings(tokens_per_hash=SIZE))
    event = BlockStored(
        (H[3] | 9 << 100,), H[2], (0, -5, 1 << 70, -(1 << 90)), SIZE, lora_id=(1 << 64) - 1,
        kv_cache_spec_sliding_window=-(1 << 63), extra_keys=((object(),),), lookahead_token_ids=((object(),),),
        ownership=object(), extra={"x": object()},
    )  # fmt: skip
    index.apply_record("a", record(1, event, CLEARED, stored(H[:2]), BlockStored((), None, (), 1 << 63)))
    index.apply("a", batch(stored(H[2:3], H[1]), ts=-math.inf))
    assert index.longest_prefix(H)["a"].blocks == 3
    assert index.position("a", 0) == (1 if isinstance(index, ResidencyIndex) else 2)


def test_records_with_values_that_no_record_has(index: Any) -> None:
    """Numbers outside 64 bits, ranks that are none: refused before they get where a snapshot cannot keep them."""
    before = seen(index)
    good = record(1)
    for seq in (-1, 1 << 64, None, "1", 1.0, True):
        records = [
            Batch("e", 0, seq, b"", 0, good.batch, b""),  # type: ignore[arg-type]
            Gap("e", 0, seq, 5),  # type: ignore[arg-type]
            Gap("e", 0, 1, seq),  # type: ignore[arg-type]
            Lost("e", 0, 1, seq, "no-replay"),  # type: ignore[arg-type]
            Recovered("e", 0, seq, 3),  # type: ignore[arg-type]
        ]
        if seq is not None:
            records += [Stale("e", 0, seq), BadMessage("e", 0, seq, 0, "?", ())]  # type: ignore[arg-type]
            records += [Restart("e", 0, seq), Confirmed("e", 0, seq)]  # type: ignore[arg-type]
        for one in records:
            refused(lambda one=one: index.apply_record("a", one), "$.record.")
    for rank in ("0", 1.5, True, 1 << 64, -(1 << 63) - 1):
        refused(lambda rank=rank: index.apply_record("a", Restart("e", rank, None)), "$.record.rank")  # type: ignore[arg-type]
        refused(lambda rank=rank: index.apply("a", EventBatch(1.0, (), rank)), "$.batch.data_parallel_rank")  # type: ignore[arg-type]
    for ts in ("1", None, True, 1 << 2000):
        refused(lambda ts=ts: index.apply("a", EventBatch(ts, ())), "$.batch.ts")
    assert seen(index) == before
    last = (1 << 64) - 1
    index.apply_record("a", record(last, ts=9.0))
    index.apply_record("a", Gap("e", 0, 1, last))
    if isinstance(index, ResidencyIndex):
        again = ResidencyIndex()
        again.load(bytearray(index.snapshot()))
        assert again.position("a", 0) == last


def test_settings_are_sound_from_the_beginning() -> None:
    """A field of a wrong type or range is named where the value is made; what is given is copied and normalised."""
    sizes: list[Any] = [0, -1, MAX_BLOCK_TOKENS + 1, 1 << 64, "4", 1.5, True, [4], b"4"]
    for size in (*sizes, None):
        refused(lambda size=size: GroupSettings(block_size=size), "$.block_size")
    for size in sizes:
        for name in ("sliding_window", "attention_chunk_size"):
            refused(lambda size=size, name=name: GroupSettings(block_size=4, **{name: size}), f"$.{name}")
        for name in ("tokens_per_hash", "offload_chunk_blocks"):
            refused(lambda size=size, name=name: EngineSettings(**{name: size}), f"$.{name}")
    group = GroupSettings(block_size=4)
    for name, values in {
        "groups": [None, 5, [], [(0, group)], {"0": group}, {-1: group}, {0: 4}, {0: None}, {True: group},
                   {1 << 32: group}, dict.fromkeys(range(65), group)],
        "use_eagle": [None, 0, "yes"],
        "reports_reuse": [None, 1, "no"],
        "verify_blocks": [None, -1, "1", 1.5, True, 1 << 63],
        "hashing": [5, "sha256", [], {1: 2}, {"algorithm": "md5"}, {"algorithms": "sha256"}, {"block_size": "x"},
                    {"block_size": 1 << 20, "decode_context_parallel_size": 1 << 20}, {"lora_paths": "x"},
                    {"lora_paths": {"a": 5}}, {"max_blocks": None}, {"vllm": 5}, {"hash_seed": 5}],
    }.items():  # fmt: skip
        for value in values:
            with pytest.raises(UsageError) as caught:
                EngineSettings(**{name: value})
            assert (caught.value.at or "").startswith(f"$.{name}"), (name, value, caught.value)
    with pytest.raises(UsageError) as caught:
        GroupSettings(block_size=4, kind=5)  # type: ignore[arg-type]
    assert caught.value.at == "$.kind"
    groups = {np.int64(0): group}
    settings = EngineSettings(tokens_per_hash=np.int64(4), groups=groups)  # type: ignore[arg-type]
    groups.clear()
    assert settings == EngineSettings(tokens_per_hash=4, groups={0: group})
    assert type(settings.tokens_per_hash) is int


def test_options_are_sound_from_the_beginning(server: RedisServer) -> None:
    """Bounds, tiers, settings, clocks, clients and times to live: what cannot be used is refused when it is given."""
    for name, values in {
        "max_blocks": [0, -1, "5", 1.5, True],
        "tiers": [None, {}, 5, "GPU", {"GPU": 5}, {5: "GPU"}, {"\ud800": "GPU"}],
        "settings": [5, [], {"a": None}, {5: EngineSettings()}],
        "clock": [None, 5.0],
    }.items():
        for value in values:
            refused(lambda name=name, value=value: ResidencyIndex(**{name: value}), f"$.{name}")
            if name != "max_blocks":
                client = server.client()
                refused(
                    lambda name=name, value=value, client=client: SharedResidencyIndex(
                        client, **{name: value}
                    ),
                    f"$.{name}",
                )
    for client in (None, "redis://", redis.Redis, redis.asyncio.Redis(), redis.Redis(decode_responses=True)):
        refused(lambda client=client: SharedResidencyIndex(client), "$.client")
    for name, values in {
        "ttl_s": [None, 0, -1.0, math.nan, math.inf, 1e-4, 1e300, "5", True],
        "retry_s": [None, -1.0, math.nan, math.inf, "5"],
        "max_pending": [None, 0, 1.5, True],
    }.items():
        for value in values:
            client = server.client()
            refused(
                lambda name=name, value=value, client=client: SharedResidencyIndex(client, **{name: value}),
                f"$.{name}",
            )


def test_a_key_is_made_of_a_hash_only() -> None:
    """An integer, or 8 to 64 bytes: what else is given is no hash, and no key is made up for it."""
    assert hash_key(bytes(24) + b"\xff" * 8) == hash_key(-1) == hash_key((1 << 64) - 1) == (1 << 64) - 1
    assert hash_key(np.uint64(5)) == hash_key(bytes(7) + b"\x05") == 5  # type: ignore[arg-type]
    wrong: Any
    for wrong in (None, True, 1.5, "ab", b"", b"1234567", bytes(65), [5], np.bool_(True), bytearray(8)):
        with pytest.raises(InvalidHashError):
            hash_key(wrong)
