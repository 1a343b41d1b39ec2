"""What a failure is said to be: the layer, the known mistake, and the types where the text is the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kvhash.vectors import load_corpus
from kvhash.vectors.compare import Difference, compare
from kvhash.vectors.inputs import expand
from kvhash.vectors.mistakes import MISTAKES

from .programs import CORPUS


def vector(identity: str) -> Mapping[str, Any]:
    """Return a vector of the corpus."""
    return load_corpus(CORPUS).get(identity)[1]


def with_mistake(asked: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return what a hasher with a known mistake answers to a vector."""
    request = {**expand(asked["input"]["request"]), "vllm": asked["input"]["vllm"][0]}
    return MISTAKES[name](request).answer()


def difference(asked: Mapping[str, Any], got: Mapping[str, Any]) -> Difference:
    """Return how an answer differs, which it must."""
    found = compare(asked, got)
    assert found is not None
    return found


NINE = "chains/sha256-cbor-count-9/0.10.2"
OLD = "chains/sha256-cbor-64bit-count-9/0.10.0"


def test_a_number_where_decimal_text_is_expected_is_said_so() -> None:
    """A published value as a JSON number has the same digits; the types are told, also where it was rounded."""
    asked = vector(NINE)
    right = asked["expected"]
    for number in (int(right["external"][0]), float(right["external"][0])):
        found = difference(asked, {**right, "external": [number, *right["external"][1:]]})
        assert found.layer == "external form"
        assert "expected decimal text" in found.message
        assert "got a number" in found.message


def test_a_chain_integer_in_another_form_is_of_the_protocol() -> None:
    """Before 0.10.2 a chain value is an object with decimal text; the right number otherwise is no wrong hash."""
    asked = vector(OLD)
    right = asked["expected"]
    number = int(right["none_hash"]["int"])
    for form in ({"int": number}, number, str(number), f"{number:016x}"):
        found = difference(asked, {**right, "none_hash": form})
        assert found.layer == "protocol", form
    assert "decimal text" in difference(asked, {**right, "none_hash": {"int": number}}).message


@pytest.mark.parametrize("field", ["none_hash", "block_hashes"])
def test_upper_case_hex_is_a_layer_of_its_own(field: str) -> None:
    """The digest is right and its letters are not: that is said, not a fault of the bytes."""
    asked = vector(NINE)
    right = asked["expected"]
    value = right[field]
    upper = value.upper() if isinstance(value, str) else [text.upper() for text in value]
    found = difference(asked, {**right, field: upper})
    assert found.layer == "hex case"
    assert "hex is lower case" in found.message


@pytest.mark.parametrize("identity", [NINE, "chains/sha256-count-9/0.9.2"])
def test_a_reversed_digest_is_named_without_the_preimage(identity: str) -> None:
    """Also where the vector carries no serialized bytes and no wrong values."""
    asked = vector(identity)
    got = with_mistake(asked, "digest-little-endian")
    bare = {key: asked[key] for key in asked if key not in ("serialized", "serialized_root", "wrong")}
    found = difference(bare, got)
    assert found.layer == "digest"
    assert "digest-little-endian" in found.mistakes


@pytest.mark.parametrize("algorithm", ["sha256", "sha256-cbor", "xxhash", "xxhash-cbor"])
@pytest.mark.parametrize("wrong", [True, False])
def test_an_empty_tuple_for_null_is_serialization_also_where_block_1_shows_it_first(
    algorithm: str, wrong: bool
) -> None:
    """Block 0 of a salted chain has a key, so block 1 is the first without one; its parent is right."""
    found = 0
    for file, asked in load_corpus(CORPUS):
        if not asked["id"].startswith(f"extra_keys/{algorithm}-salt") or asked["result"] != "valid":
            continue
        if len(asked["expected"]["block_hashes"]) < 2 or not asked["expected"]["extra_keys"][0]:
            continue
        got = with_mistake(asked, "empty-tuple-for-null")
        got["extra_keys"] = asked["expected"]["extra_keys"]
        bare = asked if wrong else {key: asked[key] for key in asked if key != "wrong"}
        if "serialized" not in bare and not wrong:
            continue
        told = difference(bare, got)
        assert told.layer == "serialization", (file.kind, asked["id"])
        assert told.message.startswith("block 1")
        assert "empty-tuple-for-null" in told.mistakes
        found += 1
    assert found


@pytest.mark.parametrize(
    "mistake", ["not-chained", "parent-truncated-to-64-bits", "parent-as-hex-text", "parent-as-integer"]
)
def test_a_wrong_parent_is_of_the_chain(mistake: str) -> None:
    """Where block 1's parent is what is wrong the layer is the chain."""
    asked = vector(NINE)
    got = {**with_mistake(asked, mistake), "none_hash": asked["expected"]["none_hash"]}
    got["block_hashes"][0] = asked["expected"]["block_hashes"][0]
    assert difference(asked, got).layer == "chain"


def test_true_is_not_one() -> None:
    """A truth value in the place of a number does not pass."""
    asked = next(
        v
        for f, v in load_corpus(CORPUS)
        if f.kind == "events" and v["expected"].get("batch", {}).get("data_parallel_rank") == 0
    )
    batch = asked["expected"]["batch"]
    assert compare(asked, {"batch": batch}) is None
    assert compare(asked, {"batch": {**batch, "data_parallel_rank": False}}) is not None
