"""Reading batches: every release's, SGLang's, and hostile ones."""

from __future__ import annotations

import struct
import time
import tracemalloc
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhash.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventDecodeError,
    UndecodableEvent,
    UnknownEvent,
    decode_batch,
    decode_raw,
)
from kvhash.events import decode as decode_module
from kvhash.events._split import split_array

from .wire import CAPTURES, RELEASES, frames, plain, wire_lines

pack = msgspec.msgpack.encode
STORED: list[Any] = ["BlockStored", [11, 12], None, list(range(8)), 4, None]


def one(event: Any) -> Any:
    """Return the one event of a batch with only `event`."""
    return decode_batch(pack([1.5, [event], 0])).events[0]


@pytest.mark.parametrize("release", RELEASES)
def test_recorded_batches_decode_to_what_they_mean(release: str) -> None:
    """Each release's recorded batches give the recorded fields, and all other fields are None."""
    lines = wire_lines(release)
    assert lines
    for line in lines:
        batch = decode_batch(bytes.fromhex(line["payload"]))
        assert (batch.ts, batch.data_parallel_rank) == (line["ts"], line["data_parallel_rank"])
        assert len(batch.events) == len(line["events"])
        for event, recorded in zip(batch.events, line["events"], strict=True):
            assert type(event).__name__ == recorded["type"]
            for name in event.__struct_fields__:
                assert getattr(event, name) == plain(recorded.get(name)), name
            assert set(recorded) - {"type"} <= set(event.__struct_fields__)


@pytest.mark.parametrize("release", RELEASES)
def test_the_fast_and_the_careful_reader_agree(release: str) -> None:
    """The typed decoder takes all recorded batches, and the field-by-field one reads the same from them."""
    for line in wire_lines(release):
        payload = bytes.fromhex(line["payload"])
        assert decode_module._fast(payload) == decode_module._careful_batch(payload) == decode_batch(payload)


@pytest.mark.parametrize("name", CAPTURES)
def test_every_captured_frame_decodes(name: str) -> None:
    """A live server's messages hold known events only."""
    for _, _, payload in frames(name):
        for event in decode_batch(payload).events:
            assert isinstance(event, (BlockStored, BlockRemoved, AllBlocksCleared))


@pytest.mark.parametrize("tail", [[], [None], [3]])
def test_rank_present_nil_or_missing(tail: list[Any]) -> None:
    """The rank may be missing, nil or a number."""
    assert decode_batch(pack([1.5, [], *tail])).data_parallel_rank == (tail[0] if tail else None)


def test_batch_as_a_map() -> None:
    """A batch may be a map, with either engine's name for the rank, unknown fields kept."""
    batch = decode_batch(pack({"ts": 2, "events": [STORED], "attn_dp_rank": 1, "new": "x"}))
    assert (batch.ts, batch.data_parallel_rank, batch.extra) == (2.0, 1, {"new": "x"})
    assert isinstance(batch.events[0], BlockStored)


def test_layouts_are_told_apart() -> None:
    """Array, map and mixed batches say so."""
    as_map = {"type": "BlockRemoved", "block_hashes": [1]}
    assert decode_batch(pack([1, [STORED], 0])).layout == "array"
    assert decode_batch(pack([1, [as_map], 0])).layout == "map"
    mixed = decode_batch(pack([1, [STORED, as_map], 0]))
    assert mixed.layout == "mixed"
    assert [type(event) for event in mixed.events] == [BlockStored, BlockRemoved]
    assert decode_batch(pack([1, [], 0])).layout is None


def test_missing_trailing_fields_are_none() -> None:
    """Every prefix of the array from the block size on reads; what is not there is None, never shifted."""
    full = [*STORED[:5], 7, "GPU", "sql", [None, None], 0, "full_attention", 128]
    names = ["lora_id", "medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"]
    names.append("kv_cache_spec_sliding_window")
    for length in range(5, len(full) + 1):
        event = one(full[:length])
        present = names[: length - 5]
        for i, name in enumerate(names):
            assert getattr(event, name) == (plain(full[5 + i]) if name in present else None)


def test_nil_in_the_middle_keeps_its_place() -> None:
    """A nil field does not move the ones behind it."""
    event = one([*STORED, None, "sql"])
    assert (event.medium, event.lora_name) == (None, "sql")


def test_a_field_is_not_guessed_from_its_values_type() -> None:
    """A number where the medium stands is a bad medium, not some other field."""
    event = one([*STORED, 5])
    assert isinstance(event, UndecodableEvent)
    assert event.path == "$.events[0].medium"


def test_extra_positions_and_names_are_kept() -> None:
    """Fields that no release has are kept by place or name, in arrays, maps and batches."""
    places = len(BlockStored.__struct_fields__) - 2
    event = one([*STORED, *[None] * (places - 5), "new", 2, [3]])
    assert event.extra == {places + 1: "new", places + 2: 2, places + 3: [3]}
    event = one({"type": "BlockRemoved", "block_hashes": [1], "new": 5, "*extra": 1})
    assert event.extra == {"new": 5, "*extra": 1}
    assert decode_batch(pack([1.5, [], 0, "more"])).extra == {3: "more"}
    assert one({"type": "AllBlocksCleared", "tier": "CPU"}).extra == {"tier": "CPU"}
    assert one(["AllBlocksCleared", "CPU"]).extra == {1: "CPU"}


@pytest.mark.parametrize("size", [8, 16, 32])
def test_bytes_hashes(size: int) -> None:
    """Hashes of 8, 16 and 32 bytes are kept as they are, and so is their parent."""
    event = one(["BlockStored", [b"a" * size], b"p" * size, [1], 1, None])
    assert event.block_hashes == (b"a" * size,)
    assert event.parent_block_hash == b"p" * size


def test_signed_hashes_are_kept() -> None:
    """A signed integer is read as such, not refused."""
    assert one(["BlockRemoved", [-5]]).block_hashes == (-5,)


@pytest.mark.parametrize(
    ("event", "path"),
    [
        (["BlockStored", ["x"], None, [1], 1, None], "$.events[0].block_hashes[0]"),
        (["BlockStored", [1, b"a" * 32], None, [1, 2], 1, None], "$.events[0].block_hashes[1]"),
        (["BlockStored", [b"a" * 32], 5, [1], 1, None], "$.events[0].parent_block_hash"),
        (["BlockRemoved", [b"short"]], "$.events[0].block_hashes[0]"),
        (["BlockRemoved", None], "$.events[0].block_hashes"),
        (["BlockStored", [1], None, [1, True], 1, None], "$.events[0].token_ids[1]"),
        (["BlockStored", [1], None, [[1, 2], 3], 1, None], "$.events[0].token_ids[1]"),
        (["BlockStored", [1], None, [1, [2, 3]], 1, None], "$.events[0].token_ids[1]"),
        (["BlockStored", [1], None, [[1, 2, 3]], 1, None], "$.events[0].token_ids[0]"),
        (["BlockStored", [1], None, [1], -1, None], "$.events[0].block_size"),
        (["BlockStored", [1], None, [1]], "$.events[0]"),
        ({"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1}, "$.events[0]"),
        ({"type": "BlockRemoved", "block_hashes": [1], "medium": 3}, "$.events[0].medium"),
        ({"type": 5}, "$.events[0].type"),
        ({}, "$.events[0]"),
        ([], "$.events[0]"),
        ([5], "$.events[0][0]"),
        (None, "$.events[0]"),
        ("BlockStored", "$.events[0]"),
    ],
)
def test_a_bad_event_says_where(event: Any, path: str) -> None:
    """A bad event names the place of what is wrong and keeps its bytes."""
    bad = one(event)
    assert isinstance(bad, UndecodableEvent)
    assert (bad.path, bad.raw) == (path, pack(event))
    assert bad.message


def test_one_bad_event_does_not_lose_its_batch() -> None:
    """Good events around an unknown and a bad one are all there, in order."""
    batch = decode_batch(pack([1.5, [STORED, ["Later", 1], ["BlockRemoved", 5], ["BlockRemoved", [12]]], 2]))
    kinds = [type(event) for event in batch.events]
    assert kinds == [BlockStored, UnknownEvent, UndecodableEvent, BlockRemoved]
    assert batch.events[1] == UnknownEvent("Later", pack(["Later", 1]))
    assert batch.events[2].path == "$.events[2].block_hashes"  # type: ignore[union-attr]


def test_a_too_deeply_nested_event_does_not_lose_its_batch() -> None:
    """Nesting that no reader should follow costs that event only, in bounded time."""
    deep = b"\x91" * 200_000 + b"\xc0"
    payload = b"\x93" + pack(1.5) + b"\x93" + pack(STORED) + deep + pack(["BlockRemoved", [1]]) + b"\x00"
    batch = decode_batch(payload)
    assert [type(event) for event in batch.events] == [BlockStored, UndecodableEvent, BlockRemoved]
    assert batch.data_parallel_rank == 0


@pytest.mark.parametrize("place", ["extra_keys", "map in extra_keys", "later", "list", "key"])
@pytest.mark.parametrize("past", [False, True])
def test_the_bound_of_nesting_is_the_same_everywhere(place: str, past: bool) -> None:
    """128 arrays and maps within each other are read, one more is not, whatever an interpreter could follow."""
    outer = {"extra_keys": 2, "map in extra_keys": 4}.get(
        place, 1
    )  # what the event itself and its field nest
    deep = b"\x91" * (128 - outer + past) + b"\xc0"
    fields = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1, 2]}
    event = pack({**fields, "block_size": 2, "lora_id": None})
    keys = b"\xaaextra_keys\x91"
    name = {"extra_keys": keys, "map in extra_keys": keys + b"\x91\x81\xa1k", "later": b"\xa5later"}.get(
        place, b""
    )
    event = bytes([event[0] + 1]) + event[1:] + name + deep
    if place == "list":
        event = b"\x92\xa5Later" + deep
    elif place == "key":  # a map within the unknown event, whose key nests
        event = b"\x92\xa5Later\x81" + deep.replace(b"\x91", b"", 1) + b"\x01"
    payload = b"\x92" + pack(1.5) + b"\x92" + event + pack(["BlockRemoved", [1]])
    for batch in (decode_batch(payload), decode_raw(payload).decode()):
        first, second = batch.events
        assert isinstance(second, BlockRemoved)
        assert isinstance(first, UndecodableEvent) == past
        assert not isinstance(first, UndecodableEvent) or first.message == "nested too deeply"
    for n in (200, 400, 600, 800, 950, 1200, 5000):
        payload = b"\x91" + b"\x91" * n + b"\xc0"
        for decode in (decode_batch, decode_raw):
            with pytest.raises(EventDecodeError):
                decode(payload)


@pytest.mark.parametrize("depth", [129, 800, 950, 5000, 200_000])
@pytest.mark.parametrize("container", ["array", "map"])
def test_an_event_nested_however_deeply_never_loses_its_batch(depth: int, container: str) -> None:
    """In a batch of either form such an event is unreadable in its place, and the one after it is read."""
    events = b"\x92" + b"\x91" * depth + b"\xc0" + pack(["BlockRemoved", [1]])
    if container == "array":
        payload = b"\x92" + pack(1.5) + events
    else:
        payload = (
            b"\x83" + pack("events") + events + pack("ts") + pack(1.5) + pack("data_parallel_rank") + pack(3)
        )
    for batch in (decode_batch(payload), decode_raw(payload).decode()):
        first, second = batch.events
        assert isinstance(first, UndecodableEvent)
        assert first.message == "nested too deeply"
        assert isinstance(second, BlockRemoved)
    if container == "map":
        assert batch.data_parallel_rank == 3
        for broken, message in ((payload[:-1], "truncated"), (payload + b"\x00", "more bytes after the map")):
            with pytest.raises(EventDecodeError, match=message if depth > 900 else "truncated|trailing"):
                decode_batch(broken)
        wrong = b"\x84\x05\xc0" + payload[1:]
        with pytest.raises(EventDecodeError, match="Expected `str`, got `int` - at `key`"):
            decode_batch(wrong)


def test_sglang_maps() -> None:
    """SGLang's map has a cache salt of its own and no extra keys."""
    fields = {"block_hashes": [-7], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2}
    event = one({"type": "BlockStored", **fields, "lora_id": None, "cache_salt": "t", "session_id": "s"})
    assert (event.cache_salt, event.session_id, event.extra_keys) == ("t", "s", None)


def test_sglang_arrays_of_both_lengths() -> None:
    """SGLang's array may end with the medium or with an object of named fields."""
    short = ["BlockStored", [-7], None, [1, 2], 2, None, "GPU"]
    assert one(short).cache_salt is None
    event = one([*short, {"cache_salt": "t", "new": 1}])
    assert (event.cache_salt, event.lora_name, event.extra) == ("t", None, {"new": 1})


def test_bigram_pairs_are_kept_and_marked() -> None:
    """EAGLE's pairs stay pairs."""
    event = one(["BlockStored", [1], None, [[1, 2], [2, 3]], 2, None])
    assert event.token_ids == ((1, 2), (2, 3))
    assert event.bigram
    assert not one(STORED).bigram


def test_tierless_store_without_tokens() -> None:
    """A CPU tier's store without tokens and with block size 0 reads."""
    event = one(["BlockStored", [1, 2], None, [], 0, None, "CPU"])
    assert (event.token_ids, event.block_size, event.medium) == ((), 0, "CPU")


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"", "invalid-batch"),
        (pack(5), "invalid-batch"),
        (pack([1.5]), "invalid-batch"),
        (pack(["now", [], 0]), "invalid-batch"),
        (pack([1.5, {}, 0]), "invalid-batch"),
        (pack([1.5, [], "zero"]), "invalid-batch"),
        (pack({"ts": 1.5}), "invalid-batch"),
        (pack([1.5, [STORED], 0])[:-3], "invalid-msgpack"),
        (pack([1.5, [STORED], 0]) + b"\x00", "invalid-msgpack"),
        (b"\xc1", "invalid-msgpack"),
        (b"\x93" + pack(1.5) + b"\xdd\xff\xff\xff\xff", "invalid-msgpack"),
        (b"\xdd\xff\xff\xff\xff\x01", "invalid-msgpack"),
        (b"\x91" * 100_000, "invalid-msgpack"),
        (b"\x94\x01\x90\x00" + b"\x91" * 100_000 + b"\xc0", "nested-too-deeply"),
    ],
)
def test_what_is_no_batch_is_a_typed_error(payload: bytes, code: str) -> None:
    """A payload that is no batch raises one error type, with a stable code and a place."""
    with pytest.raises(EventDecodeError) as caught:
        decode_batch(payload)
    assert caught.value.code == code
    assert caught.value.at


@pytest.mark.parametrize(
    "head", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"], ids=["array", "map", "str", "bin", "ext"]
)
def test_huge_declared_lengths_cost_nothing(head: bytes) -> None:
    """A declared length of 4 billion in any place is refused without memory or time for it."""
    big = head + b"\xff\xff\xff\xff"
    places = [big, b"\x93" + big, b"\x93" + pack(1.5) + big, b"\x93" + pack(1.5) + b"\x91" + big]
    places.append(b"\x93" + pack(1.5) + b"\x91\x92" + pack("BlockRemoved") + big)
    tracemalloc.start()
    started = time.monotonic()
    for payload in places:
        with pytest.raises(EventDecodeError):
            decode_batch(payload)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000
    assert time.monotonic() - started < 5


def test_every_truncation_of_a_frame_is_an_error() -> None:
    """No prefix of a frame reads as a batch."""
    payload = frames(CAPTURES[0])[0][2]
    for length in range(len(payload)):
        with pytest.raises(EventDecodeError):
            decode_batch(payload[:length])


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_batch_or_a_typed_error(data: bytes) -> None:
    """No bytes raise anything else."""
    with suppress(EventDecodeError):
        decode_batch(data)


_LEAF = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=40),
    st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "block_hashes", "type"]),
)
_VALUE = st.recursive(
    _LEAF,
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)
_FIELDS = [*BlockStored.__struct_fields__, "type"]
_EVENT = st.one_of(
    _VALUE,
    st.lists(_VALUE, max_size=18).map(lambda rest: ["BlockStored", *rest]),
    st.lists(_VALUE, max_size=8).map(lambda rest: ["BlockRemoved", *rest]),
    st.dictionaries(st.sampled_from(_FIELDS), _VALUE).map(lambda rest: {**rest, "type": "BlockStored"}),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(_EVENT, max_size=5), st.sampled_from([[], [None], [3]]))
def test_any_events_decode_in_place(events: list[Any], tail: list[Any]) -> None:
    """Whatever stands in a batch's list, there is one event for each, and both readers give the same."""
    payload = pack([1.5, events, *tail])
    batch = decode_batch(payload)
    assert len(batch.events) == len(events)
    # repr: a NaN in an unknown field equals nothing, itself neither
    assert repr(batch) == repr(decode_module._careful_batch(payload))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 71), st.integers(0, 1 << 16), st.integers(1, 255))
def test_a_flipped_byte_gives_a_batch_or_a_typed_error(which: int, where: int, change: int) -> None:
    """Damage to a real frame never raises anything but the typed error."""
    payload = bytearray(frames("vllm-0.32.0-sha256_cbor")[which][2])
    payload[where % len(payload)] ^= change
    with suppress(EventDecodeError):
        decode_batch(bytes(payload))


@settings(deadline=None)
@given(st.lists(_VALUE, max_size=6))
def test_splitting_without_recursion_equals_packing_each(values: list[Any]) -> None:
    """The splitter used for deep nesting cuts where msgpack's values end."""
    assert split_array(pack(values)) == [pack(value) for value in values]


def test_splitter_knows_every_head() -> None:
    """Each first byte of msgpack is passed over as msgspec does, and the unused one is refused."""
    for first in range(256):
        data = b"\x91" + bytes([first]) + struct.pack(">I", 0) + bytes(16)
        for length in range(2, len(data)):
            try:
                msgspec.msgpack.decode(data[:length], type=list[msgspec.Raw])
                good = True
            except msgspec.MsgspecError:
                good = False
            try:
                split_array(data[:length])
                ours = True
            except ValueError:
                ours = False
            assert ours == good, (hex(first), length)
