"""Finding out what made observed hashes."""

from __future__ import annotations

import hashlib
from typing import Any

import cbor2
import msgspec
import pytest

from kvhash import BlockHasher, HashRequest, InvalidRequestError
from kvhash.block_hash import low64, to_signed
from kvhash.identify import identify, request_from_event, seeds_from

from ..data_files import CAPTURES, capture

TOKENS = list(range(1000, 1064))


def _request(**fields: Any) -> HashRequest:
    return HashRequest.of({"tokens": TOKENS, **fields})


def _hashes(**fields: Any) -> list[Any]:
    settings = {"vllm": "0.33.0", "algorithm": "sha256_cbor", "hash_seed": "0", "block_size": 16, **fields}
    return HashRequest.of({"tokens": TOKENS, **settings}).chain().block_hashes


@pytest.mark.parametrize("name", CAPTURES)
def test_the_first_stored_event_of_a_real_server(name: str) -> None:
    """From one published event: the algorithm, the seed among the candidates, the block size and the release range."""
    run = capture(name)
    events = [
        event
        for _topic, _seq, payload in run["frames"]
        for event in msgspec.msgpack.decode(bytes.fromhex(payload))[1]
        if event["type"] == "BlockStored"
    ]
    fields, observed, parent = request_from_event(events[0])
    result = identify(
        HashRequest.of(fields), observed, parent=parent, hash_seeds=seeds_from(["0", "42", "unset"])
    )
    (match,) = result.matches
    assert (match.algorithm, match.hash_seed, match.block_size) == (
        run["algo"],
        run["hash_seed"],
        run["block_size"],
    )
    assert match.mistake is None
    assert match.matched == match.observed == len(observed)
    first, before = match.releases[-1]
    assert str(first) <= "0.32.0"
    assert before is None


@pytest.mark.parametrize("release", ["0.9.2", "0.10.1", "0.10.2", "0.28.0"])
def test_releases_are_told_apart_where_they_differ(release: str) -> None:
    """Integer chains of each kind, bytes chains, and seeds that only old releases need."""
    algorithm = "sha256_cbor_64bit" if release == "0.10.1" else "sha256"
    result = identify(_request(), _hashes(vllm=release, algorithm=algorithm))
    assert len(result.matches) == 1
    assert result.matches[0].algorithm == algorithm
    ranges = result.matches[0].release_text
    assert ("0.10.2 and later" in ranges) == (release >= "0.10.2" and release != "0.9.2")


def test_keys_narrow_the_range() -> None:
    """A salted block tells tagged keys from untagged ones."""
    for vllm, text in (("0.32.0", "0.31.0 and later"), ("0.30.0", "0.10.2 up to before 0.31.0")):
        result = identify(_request(cache_salt="t"), _hashes(vllm=vllm, cache_salt="t"))
        assert [match.release_text for match in result.matches] == [text]


def _cbor_chain(
    tokens: list[int], *, parent: Any = None, feed: Any = lambda d: d, keys: Any = lambda i: None
) -> list[bytes]:
    """Hash a chain by hand, with what a mistaken port would feed forward."""
    value = hashlib.sha256(cbor2.dumps("0")).digest() if parent is None else parent
    chain = []
    for i in range(len(tokens) // 16):
        block = tuple(tokens[i * 16 : (i + 1) * 16])
        digest = hashlib.sha256(cbor2.dumps((value, block, keys(i)), canonical=True)).digest()
        chain.append(digest)
        value = feed(digest)
    return chain


@pytest.mark.parametrize(
    ("mistake", "observed", "fields"),
    [
        ("first-8-bytes", lambda: [int.from_bytes(h[:8], "big") for h in _hashes()], {}),
        ("little-endian", lambda: [int.from_bytes(h[-8:], "little") for h in _hashes()], {}),
        ("first-8-little-endian", lambda: [int.from_bytes(h[:8], "little") for h in _hashes()], {}),
        ("parent-64-bit", lambda: _cbor_chain(TOKENS, feed=low64), {}),
        ("parent-8-bytes", lambda: _cbor_chain(TOKENS, feed=lambda digest: digest[-8:]), {}),
        ("parent-hex-text", lambda: _cbor_chain(TOKENS, feed=lambda digest: digest.hex()), {}),
        ("seed-as-number", lambda: _cbor_chain(TOKENS, parent=hashlib.sha256(cbor2.dumps(0)).digest()), {}),
        ("root-zero", lambda: _cbor_chain(TOKENS, parent=bytes(32)), {}),
        ("root-empty", lambda: _cbor_chain(TOKENS, parent=b""), {}),
        ("empty-tuple-keys", lambda: _cbor_chain(TOKENS, keys=lambda i: ()), {}),
        ("extra-leading-token", lambda: _cbor_chain(TOKENS[1:]), {}),
        ("salt-ignored", _hashes, {"cache_salt": "tenant"}),
        ("lora-ignored", _hashes, {"lora": {"name": "sql", "path": "p", "id": 1}}),
        (
            "missing-adapter-path",
            lambda: _cbor_chain(TOKENS, keys=lambda i: (("lora", "sql"),)),
            {"lora": {"name": "sql", "path": "p"}},
        ),
        ("multimodal-ignored", _hashes, {"multimodal": [{"identifier": "img", "offset": 3, "length": 30}]}),
        (
            "salt-on-every-block",
            lambda: _cbor_chain(TOKENS, keys=lambda i: ("tenant",) if i else (("cache_salt", "tenant"),)),
            {"cache_salt": "tenant"},
        ),
    ],
)  # fmt: skip
def test_known_mistakes_are_named(mistake: str, observed: Any, fields: dict[str, Any]) -> None:
    """Hashes of a port that makes a known mistake are matched, and the mistake is named."""
    result = identify(
        _request(**fields), observed(), hash_seeds=["0"], algorithms=["sha256_cbor"], block_sizes=[16, 32]
    )
    assert result.matches, result.tried_text
    assert mistake in {match.mistake[0] for match in result.matches if match.mistake}
    assert result.matches[0].block_size == 16


def test_untagged_keys_are_named_for_a_release_that_tags() -> None:
    """Asked about 0.33 only, a port with the old key shape is told that the tags are missing."""
    result = identify(_request(cache_salt="t"), _hashes(vllm="0.30.0", cache_salt="t"), releases=["0.33.0"])
    assert {match.mistake[0] for match in result.matches if match.mistake} == {"untagged-keys"}
    assert result.matches[0].release_text == "0.33.0"


def test_signed_hashes_and_group_ids_are_understood() -> None:
    """An int64 consumer's values, 8-byte blobs and digests with a group id behind them are the same hashes."""
    plain = _hashes()
    for observed in (
        [to_signed(low64(h)) & ((1 << 64) - 1) for h in plain],
        [h[-8:] for h in plain],
        [h + b"\x00\x00\x00\x01" for h in plain],
    ):
        (match,) = identify(_request(), observed, hash_seeds=["0"]).matches
        assert match.mistake is None
        assert match.matched == 4


def test_a_known_parent_needs_no_root() -> None:
    """Blocks from the middle of a prompt are identified by their parent digest alone, xxhash with a random root too."""
    hasher = BlockHasher(vllm="0.33.0", algorithm="xxhash", hash_seed="nobody knows", block_size=16)
    hashes = hasher.hash_tokens(TOKENS)
    request = HashRequest.of({"tokens": TOKENS[16:]})
    (match,) = identify(request, hashes[1:], parent=hashes[0]).matches
    assert (match.algorithm, match.seed_known, match.matched) == ("xxhash", False, 3)


def test_long_prompts_are_searched_to_their_end() -> None:
    """A hash far behind the quick pass is found."""
    tokens = list(range(16 * 300))
    hashes = BlockHasher(hash_seed="42", block_size=16).hash_tokens(tokens)
    (match,) = identify(
        HashRequest.of({"tokens": tokens}), hashes[-2:], hash_seeds=["42"], block_sizes=[16]
    ).matches
    assert match.algorithm == "sha256"


def test_no_match_says_what_was_tried() -> None:
    """Nothing found is an answer that lists the search."""
    result = identify(_request(), [12345], hash_seeds=["0", None])
    assert result.matches == ()
    assert "seeds '0', unset" in result.tried_text
    assert result.tried > 100


def test_nothing_to_compare_is_refused() -> None:
    """No hash, or too few tokens for any block size, is an error and not an empty result."""
    with pytest.raises(InvalidRequestError):
        identify(_request(), [])
    with pytest.raises(InvalidRequestError):
        identify(HashRequest.of({"tokens": [1, 2, 3]}), [1], block_sizes=[16])
    with pytest.raises(InvalidRequestError):
        request_from_event({"token_ids": [1]})
