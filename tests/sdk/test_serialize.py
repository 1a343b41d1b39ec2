"""Canonical CBOR and pickle protocol 5 against cbor2 and CPython's own pickler."""

from __future__ import annotations

import pickle
from typing import Any

import cbor2
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvhash.serialize import Ref, encode_cbor, encode_pickle5
from kvhash.serialize.cbor import CborTokens
from kvhash.serialize.pickle5 import PickleTokens

#: Integers around every head width of both formats, on both sides of zero.
EDGES = sorted(
    {
        sign * (1 << bits) + delta
        for bits in (0, 3, 4, 5, 7, 8, 15, 16, 31, 32, 39, 40, 63, 64, 127, 128, 255, 256)
        for delta in (-2, -1, 0, 1)
        for sign in (1, -1)
    }
    | {22, 23, 24, 25, -23, -24, -25, -26}
)
INTS = st.one_of(st.sampled_from(EDGES), st.integers(-(1 << 80), 1 << 80))
# One-character and empty strings are shared objects in CPython; the model has them apart, so two or more here.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=2, max_size=300)
BLOBS = st.binary(min_size=2, max_size=300)
LEAVES = st.one_of(st.none(), INTS, TEXTS, BLOBS)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=6).map(tuple), max_leaves=30)


def _fresh(value: Any, shared: dict[int, Any]) -> Any:
    """Return `value` as Python objects with the identities that it says: every str and bytes a new object."""
    if isinstance(value, Ref):
        return shared.setdefault(id(value), _copy(value.value))
    if isinstance(value, tuple):
        return tuple([_fresh(item, shared) for item in value])
    return _copy(value) if isinstance(value, (str, bytes)) else value


def _copy(value: str | bytes) -> str | bytes:
    if isinstance(value, bytes):
        return bytes(bytearray(value))
    return value.encode().decode()


def _by_pickle(value: Any) -> bytes:
    return pickle.dumps(_fresh(value, {}), protocol=5)


@given(VALUES)
def test_cbor_equals_cbor2(value: Any) -> None:
    """Any value of a preimage is written as cbor2's canonical encoder writes it."""
    assert encode_cbor(value) == cbor2.dumps(value, canonical=True)


@pytest.mark.parametrize("value", EDGES)
def test_integers_at_every_head_width(value: int) -> None:
    """Every width of integer head in both formats, also below zero and above 64 bits."""
    assert encode_cbor(value) == cbor2.dumps(value, canonical=True)
    assert encode_pickle5(value) == pickle.dumps(value, protocol=5)


@given(VALUES)
def test_pickle_equals_cpython(value: Any) -> None:
    """Any value with distinct objects is written as CPython's C pickler writes it."""
    assert encode_pickle5(value) == _by_pickle(value)


@given(st.lists(TEXTS | BLOBS, min_size=1, max_size=4), st.data())
def test_pickle_back_references_follow_identity(contents: list[str | bytes], data: st.DataObject) -> None:
    """An object met again is a back-reference, an equal one is not, in any arrangement."""
    refs = [Ref(content) for content in contents]
    places = data.draw(st.lists(st.sampled_from([*refs, *contents, 7, None]), min_size=1, max_size=40))
    value = tuple(places[: len(places) // 2]), tuple(places[len(places) // 2 :]), *places
    assert encode_pickle5(value) == _by_pickle(value)


@pytest.mark.parametrize("count", [255, 256, 257, 300])
def test_pickle_back_reference_widths(count: int) -> None:
    """Object number 256 and later need the long back-reference."""
    last = Ref("the last object")
    value = (*(f"object {i}" for i in range(count)), last, last)
    assert encode_pickle5(value) == _by_pickle(value)


@pytest.mark.parametrize("delta", range(-12, 13))
@pytest.mark.parametrize("as_text", [True, False])
def test_pickle_frames_at_64_kib(delta: int, as_text: bool) -> None:
    """Frames close at 64 KiB, and a payload of that size leaves its frame."""
    size = 64 * 1024 + delta
    payload: Any = "x" * size if as_text else b"x" * size
    for value in (
        (1, payload, 2),
        (payload[: size - 40], "another", "one", 3),
        (1, payload[:30000], payload[: size - 30000], "tail", (1, 2, 3), payload),
        payload,
    ):
        assert encode_pickle5(value) == _by_pickle(value)


@pytest.mark.parametrize("count", [21843, 21844, 21845, 21846, 21847, 33000, 70000])
def test_pickle_frames_of_many_integers(count: int) -> None:
    """A block of so many tokens that its integers fill several frames."""
    value = (b"\x01" * 32, tuple(300 + i % 5000 for i in range(count)), None)
    assert encode_pickle5(value) == _by_pickle(value)


@pytest.mark.parametrize("size", [255, 256, 65535, 65536, 70000])
def test_text_and_bytes_lengths(size: int) -> None:
    """Every width of length, for text whose UTF-8 is longer than its characters too."""
    for value in ("é" * size, "x" * size, b"y" * size):
        assert encode_cbor(value) == cbor2.dumps(value, canonical=True)
        assert encode_pickle5(value) == _by_pickle(value)


def test_the_empty_text_is_one_object() -> None:
    """CPython has one empty text and one empty bytes, so a second one is a back-reference."""
    value = ("", b"", "", b"", ("", 1))
    assert encode_pickle5(value) == pickle.dumps(("", b"", "", b"", ("", 1)), protocol=5)


@example([0], b"p" * 32)
@given(
    st.lists(
        st.sampled_from([v for v in EDGES if 0 <= v < 1 << 64]) | st.integers(0, (1 << 64) - 1), max_size=40
    ),
    st.binary(min_size=2, max_size=32) | st.integers(0, (1 << 256) - 1),
)
def test_fast_paths_equal_the_definition(tokens: list[int], parent: bytes | int) -> None:
    """Remembering the bytes of tokens changes nothing."""
    assert CborTokens().encode(tokens) == encode_cbor(tuple(tokens))
    assert PickleTokens().encode(parent, tokens) == encode_pickle5((parent, tuple(tokens), None))


@pytest.mark.parametrize("value", [1.5, [1], {"a": 1}, object()])
def test_what_no_preimage_holds_is_refused(value: Any) -> None:
    """Neither writer guesses an encoding for a value that vLLM never hashes."""
    with pytest.raises(TypeError):
        encode_cbor(value)
    with pytest.raises(TypeError):
        encode_pickle5((1, value))
