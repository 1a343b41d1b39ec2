"""Explanations cover every byte; differences name their reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from kvhash import HashRequest, InvalidRequestError, parse_request
from kvhash.diff import diff_hashes, diff_requests
from kvhash.explain import explain_block

from .strategies import requests

BASE = {
    "vllm": "0.33.0",
    "algorithm": "sha256_cbor",
    "hash_seed": "0",
    "block_size": 4,
    "tokens": list(range(100, 120)),
}


def _request(**fields: Any) -> HashRequest:
    return parse_request({**BASE, **fields})


@given(requests())
def test_segments_cover_the_preimage_and_name_every_part(line: dict[str, Any]) -> None:
    """The segments joined are the preimage, its hash is the block's, and no leaf is without a meaning."""
    request = parse_request(line)
    hashes = request.chain().block_hashes
    for index in range(len(hashes)):
        e = explain_block(request, index)
        assert b"".join(segment.data for segment in e.segments) == e.preimage
        assert [s.offset for s in e.segments] == [
            sum(len(x.data) for x in e.segments[:i]) for i in range(len(e.segments))
        ]
        assert e.block_hash == hashes[index]
        assert all(segment.meaning for segment in e.segments if segment.encoding != "array of 0"), e.segments
        tokens = [s for s in e.segments if s.meaning.startswith("token ")]
        assert [s.meaning for s in tokens] == [f"token {i}" for i in range(e.start, e.end)]


def test_an_explanation_in_both_serializations() -> None:
    """Parent, tokens and tagged keys are named where they stand."""
    for algorithm in ("sha256", "sha256_cbor"):
        e = explain_block(
            _request(algorithm=algorithm, lora={"name": "sql", "path": "/p"}, cache_salt="t"), 0
        )
        meanings = [segment.meaning for segment in e.segments]
        assert "parent: NONE_HASH" in meanings
        for meaning in (
            "extra key 0: tag",
            "extra key 0: adapter name",
            "extra key 0: adapter path",
            "extra key 1: cache salt",
        ):
            assert meaning in meanings
        assert explain_block(_request(algorithm=algorithm), -1).segments[0].offset == 0
        assert "parent: hash of block 3" in [s.meaning for s in explain_block(_request(), -1).segments]


def test_a_block_that_is_not_there() -> None:
    """The error says how many blocks there are."""
    with pytest.raises(InvalidRequestError, match="20 tokens fill 5 blocks"):
        explain_block(_request(), 5)


@pytest.mark.parametrize(
    ("fields", "reason", "first"),
    [
        ({"tokens": [*range(100, 110), 7, *range(111, 120)]}, "token", 2),
        ({"tokens": [1, *range(100, 120)]}, "leading-token", 0),
        ({"tokens": list(range(101, 121))}, "leading-token", 0),
        ({"cache_salt": "t"}, "cache-salt", 0),
        ({"lora": {"name": "sql", "path": "/a"}}, "lora-name", 0),
        ({"hash_seed": "42"}, "root", 0),
        ({"hash_seed": None}, "root", 0),
        ({"algorithm": "sha256"}, "algorithm", 0),
        ({"block_size": 8}, "block-size", 0),
        ({"lookahead": 1}, "lookahead", 0),
        ({"multimodal": [{"identifier": "i", "offset": 9, "length": 2}]}, "multimodal", 2),
    ],
)
def test_the_reason_of_a_difference(fields: dict[str, Any], reason: str, first: int) -> None:
    """Each way in which two requests part is named first among the reasons, with its block."""
    result = diff_requests(_request(), _request(**fields))
    assert not result.equal
    assert (result.first_block, result.common_blocks) == (first, first)
    assert result.reasons[0][0] == reason


def test_two_adapter_paths() -> None:
    """The same adapter name at two paths is named as that."""
    a, b = (_request(lora={"name": "sql", "path": path}) for path in ("/a", "/b"))
    assert diff_requests(a, b).reasons[0][0] == "lora-path"


def test_settings_that_make_no_difference_are_no_difference() -> None:
    """Two releases that hash alike are equal; an unset seed and its spelled-out text too."""
    assert diff_requests(_request(vllm="0.28.0"), _request(vllm="0.33.0")).equal
    assert diff_requests(_request(hash_seed=None), _request(hash_seed="vllm-none-hash")).equal


def test_a_prefix_and_nothing() -> None:
    """A longer continuation differs only in length; prompts without a full block have nothing to compare."""
    result = diff_requests(_request(), _request(tokens=list(range(100, 112))))
    assert (result.equal, result.first_block, result.reasons[0][0]) == (False, None, "length")
    assert diff_requests(_request(tokens=[1]), _request(tokens=[2])).reasons[0][0] == "no-full-block"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda h: [*h[:2], b"\0" * 32, *h[3:]], "from-the-middle"),
        (lambda h: [x[::-1] for x in h], "from-the-start"),
        (lambda h: h[1::2], "block-size"),
        (lambda h: [x[:16] for x in h], "algorithm"),
        (lambda h: h[1:], "order"),
        (lambda h: h[:3], "length"),
    ],
)
def test_lists_of_hashes(change: Any, reason: str) -> None:
    """Two observed lists, without their requests, still tell a likely reason."""
    hashes = _request().chain().block_hashes
    result = diff_hashes(hashes, change(hashes))
    assert not result.equal
    assert result.reasons[0][0] == reason


def test_a_list_of_integers_equals_its_digests() -> None:
    """Published 64-bit values and digests are compared by their low 64 bits."""
    chain = _request().chain()
    assert diff_hashes(chain.block_hashes, chain.external()).equal  # type: ignore[arg-type]
