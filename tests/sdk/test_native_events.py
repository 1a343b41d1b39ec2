"""Raw batches: both backends read the same from every payload, which is what `decode_batch` reads."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhash import KvHashError, _backend
from kvhash.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventDecodeError,
    RawBatch,
    RawRemoved,
    RawStored,
    UndecodableEvent,
    UnknownEvent,
    decode_batch,
    decode_raw,
    hash_key,
)
from kvhash.events.raw import make_decoder

from ..interop.event_lines import damaged_payloads, recorded_payloads, sglang_payloads
from ..interop.event_payloads import random_payloads

pack = msgspec.msgpack.encode
FIELDS = [name for name in BlockStored.__struct_fields__ if name not in ("block_hashes", "token_ids")]
REMOVED_FIELDS = [name for name in BlockRemoved.__struct_fields__ if name != "block_hashes"]

Decode = Callable[[bytes], RawBatch]


@pytest.fixture(scope="module", name="native")
def _native() -> Decode:
    module, why = _backend._import()
    if module is None:
        pytest.fail(f"the native module is not built: {why}")
    return make_decoder(module)


PURE = make_decoder(None)


def _outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except KvHashError as error:
        return type(error), error.code, error.message, error.at


def _event(event: Any) -> Any:
    """Return everything that a raw event shows."""
    if isinstance(event, RawStored):
        blocks = [(value, parent, tuple(tokens)) for value, parent, tokens in event.blocks()]
        shown = {name: getattr(event, name) for name in FIELDS}
        tokens = tuple(event.token_ids)
        return "stored", event.block_hashes, event.keys(), blocks, tokens, shown, event.bigram, event.decode()
    if isinstance(event, RawRemoved):
        shown = {name: getattr(event, name) for name in REMOVED_FIELDS}
        return "removed", event.block_hashes, event.keys(), shown, event.decode()
    return event


def _seen(decode: Decode, payload: bytes) -> Any:
    batch = decode(payload)
    blocks = [(value, parent, tuple(tokens)) for value, parent, tokens in batch.blocks()]
    events = [_event(event) for event in batch.events]
    head = (batch.ts, batch.data_parallel_rank, batch.layout, batch.extra, batch.payload, len(batch))
    return head, blocks, events, batch.decode()


def _same(native: Decode, payload: bytes) -> bool:
    """Compare both backends with each other and with `decode_batch`; returns whether the payload is a batch."""
    ours, theirs = _outcome(lambda: _seen(native, payload)), _outcome(lambda: _seen(PURE, payload))
    # repr: a NaN in an unknown field equals nothing, itself neither; extension values have no other form
    if "Ext object" not in repr(theirs):
        assert repr(ours) == repr(theirs), payload.hex()
    expected = _outcome(lambda: decode_batch(payload))
    if isinstance(expected, tuple):
        assert ours == theirs == expected
        return False
    for event, mine in zip(expected.events, native(payload).events, strict=True):
        if isinstance(event, (BlockStored, BlockRemoved)):
            assert repr(mine) == f"Raw{event!r}" or "Ext object" in repr(mine)
        else:
            assert type(mine) is type(event)
    return True


def test_recorded_batches_are_read_alike(native: Decode) -> None:
    """Every release's, a live server's and SGLang's batches give equal fields on both backends."""
    payloads = [*recorded_payloads(), *sglang_payloads()]
    assert sum(_same(native, payload) for payload in payloads) > 300


def test_random_and_damaged_batches_are_read_alike(native: Decode) -> None:
    """Anything in any place: equal values, or the same error in the same words."""
    good = [payload for payload in recorded_payloads() if payload]
    payloads = [*random_payloads(1500, seed=3), *damaged_payloads(good, 1500, seed=3)]
    assert 500 < sum(_same(native, payload) for payload in payloads) < len(payloads) - 500


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10))
def test_random_and_damaged_batches_are_read_alike_at_length(native: Decode, seed: int) -> None:
    """As above, a hundred thousand in all."""
    good = [payload for payload in recorded_payloads() if payload]
    for payload in [*random_payloads(5000, seed=100 + seed), *damaged_payloads(good, 5000, seed=100 + seed)]:
        _same(native, payload)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.sampled_from(["", "93cb3ff8000000000000", "92ca3f80000091"]))
def test_any_bytes_are_read_alike(native: Decode, data: bytes, head: str) -> None:
    """No bytes raise anything but EventDecodeError, on either backend, with the same words."""
    _same(native, bytes.fromhex(head) + data)


@pytest.mark.parametrize("backend", ["native", "pure"])
def test_token_views_are_sequences(native: Decode, backend: str) -> None:
    """Length, index, slice, iteration, comparison, and an error past the end; pairs too."""
    decode = native if backend == "native" else PURE
    for tokens in ([1, 200, 70_000, 2**40, 5], [[1, 2], [2, 300], [300, 4], [4, 5], [5, 6]]):
        payload = pack([1.5, [["BlockStored", [1, 2], None, tokens, 2, None]], 0])
        expected = tuple(tuple(token) if isinstance(token, list) else token for token in tokens)
        (event,) = decode(payload).events
        assert isinstance(event, RawStored)
        views = [event.token_ids, *[view for _, _, view in event.blocks()]]
        for view, wanted in zip(views, [expected, expected[:2], expected[2:4]], strict=True):
            assert isinstance(view, Sequence)
            assert len(view) == len(wanted)
            assert view == wanted
            assert list(view) == list(wanted)
            assert hash(view) == hash(wanted)
            assert [view[i] for i in range(-len(wanted), len(wanted))] == list(wanted * 2)
            assert view[1:] == wanted[1:]
            assert view[::-1] == wanted[::-1]
            assert wanted[0] in view
            with pytest.raises(IndexError):
                view[len(wanted)]


def test_blocks_chain_and_stop_with_the_tokens(native: Decode) -> None:
    """A block's parent is the one before it; tokens may be fewer than the blocks need, or none."""
    payload = pack([1.5, [["BlockStored", [7, 8, 9], 6, [1, 2, 3], 2, None]], 0])
    for decode in (native, PURE):
        batch = decode(payload)
        blocks = [(value, parent, tuple(tokens)) for value, parent, tokens in batch.blocks()]
        assert blocks == [(7, 6, (1, 2)), (8, 7, (3,)), (9, 8, ())]


def test_keys_are_hash_keys(native: Decode) -> None:
    """All three wire forms of a hash give the key that `hash_key` gives."""
    values: list[Any] = [[-5, 2**63, 0], [b"a" * 8, b"\xff" * 32]]
    for hashes in values:
        (event,) = native(pack([1, [["BlockRemoved", hashes]]])).events
        assert isinstance(event, RawRemoved)
        assert event.keys() == [hash_key(value) for value in hashes]


def test_other_events_are_the_public_types(native: Decode) -> None:
    """What is no store and no removal is what `decode_batch` gives, in its place."""
    events = [
        ["AllBlocksCleared"],
        ["Later", 1],
        ["BlockRemoved", 5],
        7,
        {"type": "AllBlocksCleared", "x": 1},
    ]
    payload = pack([1.5, [["BlockRemoved", [1]], *events], 2])
    for decode in (native, PURE):
        first, *others = decode(payload).events
        assert isinstance(first, RawRemoved)
        assert tuple(others) == decode_batch(payload).events[1:]
    kinds = [AllBlocksCleared, UnknownEvent, UndecodableEvent, UndecodableEvent, AllBlocksCleared]
    assert [type(event) for event in others] == kinds


def test_other_buffers_are_taken(native: Decode) -> None:
    """A bytearray or a memory view is read as its bytes."""
    payload = pack([1.5, [["BlockRemoved", [1]]], 2])
    for decode in (native, PURE, decode_raw):
        for form in (bytearray(payload), memoryview(payload)):
            assert decode(form).decode() == decode_batch(payload)  # type: ignore[arg-type]


def test_token_ids_are_not_copied(native: Decode) -> None:
    """A batch of a million tokens, its blocks and its hashes cost far less memory than the tokens would."""
    payload = pack([1.5, [["BlockStored", [1, 2], None, [150_000] * 1_000_000, 500_000, None]], 0])
    tracemalloc.start()
    batch = native(payload)
    blocks = batch.blocks()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(blocks) == 2
    assert batch.payload is payload
    assert peak < 100_000


@pytest.mark.parametrize("backend", ["native", "python"])
def test_the_environment_chooses_the_decoder(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """`KVHASH_BACKEND` forces one of the two."""
    from kvhash.events import raw_decoder

    monkeypatch.setenv("KVHASH_BACKEND", backend)
    raw_decoder.cache_clear()
    try:
        batch = decode_raw(pack([1.5, [], 0]))
        assert type(batch).__module__ == ("kvhash._native" if backend == "native" else "kvhash.events.raw")
        with pytest.raises(EventDecodeError):
            decode_raw(b"\x93")
    finally:
        raw_decoder.cache_clear()
