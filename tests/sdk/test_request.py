"""Request lines: what is read, what is refused, and that one bad line harms no other."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhash import HashRequest, KvHashError, answer, answer_lines, parse_request

from .strategies import requests

GOOD = {
    "id": "g",
    "vllm": "0.33.0",
    "algorithm": "sha256_cbor",
    "hash_seed": "0",
    "block_size": 4,
    "tokens": [1, 2, 3, 4],
}
GOOD_HASH = "c9d58ba695280d69b243e1e0df813136ca9196b286fb1a021e0b2e028ef071cb"


def _lines(*lines: dict[str, Any] | bytes) -> list[bytes]:
    return [line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines]


def test_a_good_line_is_answered_in_full() -> None:
    """The answer has exactly the fields that the format promises."""
    (result,) = answer_lines(_lines(GOOD))
    assert result == {
        "id": "g",
        "none_hash": "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e",
        "block_hashes": [GOOD_HASH],
        "external": ["2164874634404590027"],
        "extra_keys": [None],
    }


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (b'{"id":"b","tokens":[1,2', "invalid-json"),
        (b"\xff\xfe{}", "invalid-utf8"),
        (b"[]", "invalid-request"),
        (b"7", "invalid-request"),
        (b'"x"', "invalid-request"),
        (b'"{\\"tokens\\":[1]}"', "invalid-request"),
        (b'{"id":"b"}', "invalid-request"),
        (b'{"tokens":[1],"tokens":[2]}', "invalid-json"),
        (b'{"tokens":[NaN]}', "invalid-json"),
        (b'{"tokens":[1e3]}', "invalid-token"),
        (b'{"tokens":[1.0]}', "invalid-token"),
        (b'{"tokens":[true]}', "invalid-token"),
        (b'{"tokens":"1"}', "invalid-token"),
        (b'{"tokens":null}', "invalid-token"),
        (b'{"tokens":[18446744073709551616]}', "invalid-token"),
        (b'{"tokens":[' + b"9" * 5000 + b"]}", "invalid-json"),
        (b"[" * 100_000, "invalid-json"),
        (b'{"tokens":[1],"cachesalt":"x"}', "invalid-request"),
        (b'{"tokens":[1],"cache_salt":7}', "invalid-salt"),
        (b'{"tokens":[1],"hash_seed":0}', "invalid-seed"),
        (b'{"tokens":[1],"vllm":0.33}', "invalid-request"),
        (b'{"tokens":[1],"vllm":"zero"}', "unknown-release"),
        (b'{"tokens":[1],"vllm":"0.8.0"}', "unknown-release"),
        (b'{"tokens":[1],"algorithm":"sha1"}', "unknown-algorithm"),
        (b'{"tokens":[1],"block_size":0}', "invalid-block-size"),
        (b'{"tokens":[1],"block_size":"16"}', "invalid-block-size"),
        (b'{"tokens":[1],"lora":"sql"}', "invalid-lora"),
        (b'{"tokens":[1],"lora":{"nmae":"sql"}}', "invalid-lora"),
        (b'{"tokens":[1],"lora":{"name":"sql","path":"","id":1}}', "invalid-lora"),
        (b'{"tokens":[1],"lora":{"name":"sql"}}', "invalid-lora"),
        (b'{"tokens":[1],"multimodal":{}}', "invalid-multimodal"),
        (b'{"tokens":[1],"prompt_embeds":[1]}', "invalid-prompt-embeds"),
        (b'{"tokens":[1],"lookahead":-1}', "invalid-request"),
        (b'{"tokens":[1],"vllm":"0.30.0","lookahead":1,"hash_seed":"0"}', "feature-not-in-release"),
        (b'{"tokens":[1],"vllm":"0.28.0"}', "unknown-root"),
        (b'{"tokens":[1],"cache_salt":"\\ud800"}', "invalid-salt"),
        (b'{"tokens":[' + b"1," * 5_000_000 + b"1]}", "line-too-long"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[:40].decode("latin-1"),
)
def test_a_bad_line_is_one_error_and_the_rest_is_answered(bad: bytes, code: str) -> None:
    """Each kind of bad line has its code, and the good lines around it are answered."""
    results = list(answer_lines([*_lines(GOOD), bad + b"\n", b"\n", *_lines(GOOD)]))
    assert [result.get("error", {}).get("code") for result in results] == [None, code, None]
    assert results[0] == results[2]
    assert results[1]["error"]["message"]


def test_the_length_is_looked_at_before_blank_lines_are_passed_over() -> None:
    """A blank line that is too long is refused, one of just the limit is passed over, whatever its end."""
    for end in (b"\n", b"\r\n"):
        assert list(answer_lines([b" " * 10 + end], max_line_bytes=10)) == []
        (result,) = answer_lines([b" " * 11 + end], max_line_bytes=10)
        assert result["error"]["code"] == "line-too-long"
        assert result["id"] is None


def test_the_id_of_a_refused_line_comes_back() -> None:
    """Any JSON id is echoed, so that the caller knows which line was refused."""
    for identity in ("b", 7, None, [1], {"a": 1}):
        (result,) = answer_lines(_lines({"id": identity, "tokens": [-1]}))
        assert result["id"] == identity


def test_defaults_fill_what_a_line_leaves_out_and_no_more() -> None:
    """A line's own value beats the default, null too where null is a value."""
    defaults = {"vllm": "0.33.0", "algorithm": "sha256_cbor", "hash_seed": "0", "block_size": 4}
    filled, own = answer_lines(
        _lines({"tokens": [1, 2, 3, 4]}, {"tokens": [1, 2, 3, 4], "hash_seed": None}), defaults
    )
    assert filled["block_hashes"] == [GOOD_HASH]
    assert own["block_hashes"] != [GOOD_HASH]


@given(requests())
def test_a_request_survives_its_json(line: dict[str, Any]) -> None:
    """Writing a request as a line and reading it again changes nothing."""
    request = parse_request(line)
    again = parse_request(json.dumps(request.to_json()))
    assert again == request
    assert answer(again) == answer(request)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    [
        "id", "vllm", "algorithm", "hash_seed", "block_size", "tokens", "lora", "cache_salt", "multimodal",
        "prompt_embeds", "lookahead", "decode_context_parallel_size",
    ]
)  # fmt: skip


@given(st.dictionaries(FIELDS, JSON, max_size=6) | JSON)
def test_any_json_gets_an_answer_or_a_typed_error(value: Any) -> None:
    """Whatever a line holds, the answer is hashes or a coded error, never an exception."""
    (result,) = answer_lines([json.dumps(value).encode()])
    assert ("error" in result) != ("block_hashes" in result)


@given(requests(), FIELDS, JSON)
def test_a_good_request_with_one_field_spoilt(line: dict[str, Any], name: str, value: Any) -> None:
    """One wrong field among good ones never escapes as anything but a typed error."""
    with contextlib.suppress(KvHashError):
        answer(
            HashRequest.of(
                {**{k: v for k, v in line.items() if k != "id"}, **({} if name == "id" else {name: value})}
            )
        )
