"""Block hashers and growing chains: what always holds, and what went wrong for people who did this by hand."""

from __future__ import annotations

import array
import hashlib
import pickle
from typing import Any

import cbor2
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvhash import (
    AlgorithmError,
    BlockHasher,
    FeatureNotInReleaseError,
    InvalidBlockSizeError,
    InvalidSeedError,
    InvalidTokenError,
    KvHashError,
    UnknownRootError,
    parse_request,
)
from kvhash.block_hash import external_hash, low64

from .strategies import requests


def cbor_hasher(**settings: Any) -> BlockHasher:
    """Return a hasher of known settings, some of them changed."""
    return BlockHasher(
        **{"vllm": "0.33.0", "algorithm": "sha256_cbor", "hash_seed": "0", "block_size": 4, **settings}
    )


# --- properties -----------------------------------------------------------------------------------------------


@given(requests(), st.data())
def test_any_split_of_appends_gives_the_same_chain(line: dict[str, Any], data: st.DataObject) -> None:
    """A chain grown by any appends equals the chain made at once, keys and all."""
    request = parse_request(line)
    whole = request.chain()
    grown = request.hasher().chain(
        lora=request.lora,
        cache_salt=request.cache_salt,
        multimodal=request.multimodal,
        prompt_embeds=request.prompt_embeds,
    )
    position, returned = 0, []
    while position < len(request.tokens):
        step = data.draw(st.integers(1, len(request.tokens) - position))
        returned += grown.append(request.tokens[position : position + step])
        position += step
    assert grown.block_hashes == whole.block_hashes == returned
    assert grown.extra_keys() == whole.extra_keys()
    assert grown.num_tokens == len(request.tokens)


@given(requests(), st.data())
def test_a_changed_token_changes_every_later_hash_and_no_earlier_one(
    line: dict[str, Any], data: st.DataObject
) -> None:
    """The chain: block k and all after it depend on token i of block k, none before it does."""
    request = parse_request(line)
    if not request.tokens:
        return
    before = request.chain().block_hashes
    at = data.draw(st.integers(0, len(request.tokens) - 1))
    tokens = list(request.tokens)
    tokens[at] = data.draw(st.integers(0, 1 << 32).filter(lambda token: token != tokens[at]))
    after = request.with_(tokens=tuple(tokens)).chain().block_hashes
    span, lookahead = request.hasher().span, request.lookahead
    for k, (a, b) in enumerate(zip(before, after, strict=True)):
        assert (a != b) == (at < (k + 1) * span + lookahead), k


@given(requests())
def test_a_hash_is_the_digest_of_the_independent_serialization(line: dict[str, Any]) -> None:
    """Each hash is the digest of the preimage as cbor2 or CPython's pickler writes it, computed without our writers."""
    request = parse_request(line)
    hasher = request.hasher()
    chain = request.chain()
    parent: Any = hasher.none_hash
    shared: dict[int, Any] = {}
    for k, (value, keys) in enumerate(zip(chain.block_hashes, chain.extra_keys(), strict=True)):
        tokens = tuple(request.tokens[k * hasher.span : (k + 1) * hasher.span])
        preimage = (parent, tokens, _objects(keys, shared))
        algorithm = hasher.contract.algorithm(request.algorithm)
        data = (
            cbor2.dumps(preimage, canonical=True)
            if algorithm.serialization == "cbor"
            else pickle.dumps(preimage, protocol=5)
        )
        digest = (
            hashlib.sha256(data).digest() if algorithm.digest == "sha256" else xxhash.xxh3_128_digest(data)
        )
        if hasher.contract.chain_values == "int":
            parent = int.from_bytes(digest, "big") & ((1 << (64 if algorithm.keeps == "low64" else 256)) - 1)
        else:
            parent = digest
        assert value == parent


def _objects(value: Any, shared: dict[int, Any]) -> Any:
    from kvhash.serialize import Ref

    if isinstance(value, Ref):
        return shared.setdefault(id(value), value.value)
    if isinstance(value, tuple):
        return tuple([_objects(item, shared) for item in value])
    if isinstance(value, str):
        return value.encode().decode()
    return bytes(bytearray(value)) if isinstance(value, bytes) else value


@given(requests(), st.integers(2, 4))
def test_a_coarser_view_is_the_hash_at_its_last_fine_boundary(line: dict[str, Any], factor: int) -> None:
    """A view at a multiple of the block size follows the chain and holds each factor-th hash."""
    chain = parse_request(line).chain()
    view = chain.view(chain.hasher.span * factor)
    hashes = chain.block_hashes
    assert list(view) == hashes[factor - 1 :: factor]
    assert len(view) == len(hashes) // factor
    chain.append(range(chain.hasher.span * factor * 2))
    assert list(view) == chain.block_hashes[factor - 1 :: factor]


# --- tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens",
    [
        (1, 2, 3, 4),
        array.array("I", [1, 2, 3, 4]),
        array.array("q", [1, 2, 3, 4]),
        np.array([1, 2, 3, 4], dtype=np.uint32),
        np.array([1, 2, 3, 4], dtype=np.int64),
        [np.int64(1), np.uint8(2), np.int32(3), 4],
        range(1, 5),
        memoryview(np.array([1, 2, 3, 4], dtype=np.uint32)),
        iter([1, 2, 3, 4]),
    ],
    ids=repr,
)
def test_every_kind_of_token_sequence_hashes_alike(tokens: Any) -> None:
    """Lists, tuples, arrays, NumPy arrays and NumPy integers give the hash of the plain integers."""
    assert cbor_hasher().hash_tokens(tokens) == cbor_hasher().hash_tokens([1, 2, 3, 4])
    assert BlockHasher(block_size=4).hash_tokens([np.int64(5)] * 4) == BlockHasher(block_size=4).hash_tokens(
        [5] * 4
    )


@pytest.mark.parametrize(
    ("tokens", "where"),
    [
        ([1, True, 3], "$.tokens[1]"),
        ([1, np.bool_(True)], "$.tokens[1]"),
        ([1, -1], "$.tokens[1]"),
        ([1 << 64], "$.tokens[0]"),
        ([1, 2.0], "$.tokens[1]"),
        ([1, "2"], "$.tokens[1]"),
        ([1, None], "$.tokens[1]"),
        ([[1, 2]], "$.tokens[0]"),
        (np.array([[1, 2]]), "$.tokens"),
        (np.array([1.5]), "$.tokens[0]"),
        (np.array([True]), "$.tokens[0]"),
        ("1234", "$.tokens"),
        (b"1234", "$.tokens"),
        ({1: 2}, "$.tokens"),
        (7, "$.tokens"),
    ],
    ids=repr,
)
def test_what_is_no_token_is_refused_with_its_place(tokens: Any, where: str) -> None:
    """A bool, a float, text, a negative or a too large id is a typed error that says where; never another hash."""
    with pytest.raises(InvalidTokenError) as caught:
        cbor_hasher(block_size=1).hash_tokens(tokens)
    assert caught.value.at == where
    assert caught.value.code == "invalid-token"


def test_a_refused_append_leaves_the_chain_as_it_was() -> None:
    """An error in the middle of an append loses and adds nothing."""
    chain = cbor_hasher().chain([1, 2, 3])
    with pytest.raises(InvalidTokenError):
        chain.append([4, 5, True])
    assert chain.num_tokens == 3
    assert chain.append([4]) == cbor_hasher().hash_tokens([1, 2, 3, 4])


def test_a_copy_goes_its_own_way() -> None:
    """Two continuations of one prefix do not disturb each other."""
    chain = cbor_hasher().chain([1, 2, 3, 4, 5], cache_salt="s")
    other = chain.copy()
    chain.append([6, 7, 8])
    other.append([9, 9, 9])
    assert chain.block_hashes == cbor_hasher().hash_tokens([1, 2, 3, 4, 5, 6, 7, 8], cache_salt="s")
    assert other.block_hashes == cbor_hasher().hash_tokens([1, 2, 3, 4, 5, 9, 9, 9], cache_salt="s")


# --- roots, seeds, algorithms ---------------------------------------------------------------------------------


def test_three_seeds_three_roots() -> None:
    """Seed "0", the empty seed and no seed are three roots: an empty seed is a seed."""
    roots = {cbor_hasher(hash_seed=seed).none_hash for seed in ("0", "", None)}
    assert len(roots) == 3
    assert cbor_hasher(hash_seed=None).none_hash == hashlib.sha256(cbor2.dumps("vllm-none-hash")).digest()


@pytest.mark.parametrize(
    ("vllm", "algorithm"),
    [
        ("0.28.0", "sha256"),
        ("0.28.0", "sha256_cbor"),
        ("0.33.0", "xxhash"),
        ("0.33.0", "xxhash_cbor"),
        ("0.9.2", "sha256"),
    ],
)
def test_an_unknown_root_is_refused(vllm: str, algorithm: str) -> None:
    """Where vLLM draws NONE_HASH at random the error says what to set; with a seed the same settings work."""
    with pytest.raises(UnknownRootError, match="PYTHONHASHSEED") as caught:
        BlockHasher(vllm=vllm, algorithm=algorithm)
    assert caught.value.code == "unknown-root"
    assert BlockHasher(vllm=vllm, algorithm=algorithm, hash_seed="0").none_hash


@pytest.mark.parametrize("seed", [0, 42, True, b"0", 1.0])
def test_a_seed_that_is_no_text_is_refused(seed: Any) -> None:
    """VLLM hashes the seed as text; a number would give another root."""
    with pytest.raises(InvalidSeedError, match="text"):
        cbor_hasher(hash_seed=seed)


def test_builtin_cannot_be_reproduced() -> None:
    """Python's hash() is refused with its own code, in every release."""
    for vllm in ("0.9.2", "0.10.1", "latest"):
        with pytest.raises(AlgorithmError) as caught:
            BlockHasher(vllm=vllm, algorithm="builtin", hash_seed="0")
        assert caught.value.code == "algorithm-not-reproducible"


@pytest.mark.parametrize(
    ("vllm", "algorithm", "code"),
    [
        ("0.14.0", "sha256_cbor_64bit", "algorithm-not-in-release"),
        ("0.12.0", "xxhash", "algorithm-not-in-release"),
        ("0.33.0", "md5", "unknown-algorithm"),
        ("0.33.0", None, "unknown-algorithm"),
        ("0.33.0", ["sha256"], "unknown-algorithm"),
    ],
)
def test_an_algorithm_that_the_release_lacks_is_refused(vllm: str, algorithm: Any, code: str) -> None:
    """The error names the valid set."""
    with pytest.raises(AlgorithmError) as caught:
        BlockHasher(vllm=vllm, algorithm=algorithm, hash_seed="0")
    assert caught.value.code == code
    if isinstance(algorithm, str):
        assert "sha256, sha256_cbor" in str(caught.value)
    assert BlockHasher(vllm="0.10.0", algorithm="sha256_cbor_64bit", hash_seed="0").none_hash


def test_integer_and_bytes_chains_share_their_root_and_nothing_else() -> None:
    """Their roots have equal low 64 bits; every block differs, since its parent is encoded otherwise."""
    old = BlockHasher(vllm="0.10.1", algorithm="sha256_cbor_64bit", hash_seed="0", block_size=4)
    new = BlockHasher(vllm="0.10.2", algorithm="sha256_cbor", hash_seed="0", block_size=4)
    assert old.none_hash == low64(new.none_hash)
    a, b = old.hash_tokens(range(8)), new.hash_tokens(range(8))
    assert all(isinstance(value, int) for value in a)
    assert all(x != low64(y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("size", [0, -1, True, 1.0, "16", None, 1 << 40])
def test_a_block_size_that_is_none_is_refused(size: Any) -> None:
    """Zero, negative, bool, text: a typed error."""
    with pytest.raises(InvalidBlockSizeError) as caught:
        cbor_hasher(block_size=size)
    assert caught.value.code == "invalid-block-size"


# --- look-ahead, context parallelism, several groups ----------------------------------------------------------


def test_lookahead_needs_its_tokens() -> None:
    """33 tokens in blocks of 16 with L=1 make two hashes, 32 make one: the second waits for token 32."""
    hasher = cbor_hasher(block_size=16, lookahead=1)
    chain = hasher.chain(range(32))
    assert len(chain) == 1
    assert len(chain.append([32])) == 1
    assert chain.extra_keys() == [(None, 16), (None, 32)]
    assert chain.event_extra_keys() == [None, None]


def test_lookahead_counts_an_image_that_starts_behind_the_block() -> None:
    """An image in the look-ahead tokens is in the key, its offset still counted from the block's start."""
    item = {"identifier": "image", "offset": 4, "length": 2}
    chain = cbor_hasher(lookahead=1).chain(range(9), multimodal=[item])
    assert chain.event_extra_keys() == [(("image", 4),), (("image", 0),)]
    assert cbor_hasher().chain(range(9), multimodal=[item]).event_extra_keys() == [None, (("image", 0),)]


def test_lookahead_before_its_release_is_refused() -> None:
    """A feature that the release lacks is a typed error, not ignored."""
    with pytest.raises(FeatureNotInReleaseError):
        cbor_hasher(vllm="0.32.0", lookahead=1)


def test_context_parallelism_hashes_wider_blocks() -> None:
    """Block size 16 with decode context parallel size 2 hashes 32 tokens at a time."""
    wide = cbor_hasher(block_size=16, decode_context_parallel_size=2)
    assert wide.span == 32
    assert wide.hash_tokens(range(100)) == cbor_hasher(block_size=32).hash_tokens(range(100))


# --- extra keys -----------------------------------------------------------------------------------------------


def test_salts_separate_and_are_in_block_0_only() -> None:
    """Salt "a", "b" and none are three chains; the key is block 0's alone, yet every later hash differs."""
    hasher = cbor_hasher()
    chains = [hasher.chain(range(12), cache_salt=salt) for salt in ("a", "b", None)]
    for k in range(3):
        assert len({chain.block_hashes[k] for chain in chains}) == 3
    assert chains[0].extra_keys()[1:] == [None, None]
    assert hasher.hash_tokens(range(12), cache_salt="") == chains[2].block_hashes


def test_adapter_x_collides_with_salt_x_before_tags() -> None:
    """Before 0.31 an adapter's first block equals the base model's under a salt of that name; from 0.31 it does not."""
    for vllm, collides in (("0.30.0", True), ("0.31.0", False)):
        hasher = cbor_hasher(vllm=vllm)
        lora = hasher.hash_tokens(range(4), lora={"name": "X", "path": "p"})
        assert (lora == hasher.hash_tokens(range(4), cache_salt="X")) == collides


def test_the_adapter_path_counts_from_0_31() -> None:
    """One name at two paths: one hash at 0.30, two at 0.31, and no path is an error there."""
    for vllm, equal in (("0.30.0", True), ("0.31.0", False)):
        hasher = cbor_hasher(vllm=vllm)
        a, b = (hasher.hash_tokens(range(4), lora={"name": "sql", "path": path}) for path in ("/a", "/b"))
        assert (a == b) == equal
    for vllm, lora, where in (
        ("0.31.0", {"name": "sql"}, "$.lora.path"),
        ("0.30.0", {"path": "/a"}, "$.lora.name"),
        ("0.11.0", {"name": "sql", "path": "/a"}, "$.lora.id"),
    ):
        with pytest.raises(KvHashError) as caught:
            cbor_hasher(vllm=vllm).chain([], lora=lora)
        assert (caught.value.code, caught.value.at) == ("invalid-lora", where)


def test_a_multimodal_item_changes_its_block_and_all_later_ones() -> None:
    """Items h1 and h3 at 0, h2 at 3: the second block differs although its own item is the same."""
    hasher = cbor_hasher(block_size=3)
    first, second = (
        hasher.hash_tokens(
            range(6),
            multimodal=[
                {"identifier": h, "offset": 0, "length": 3},
                {"identifier": "h2", "offset": 3, "length": 3},
            ],
        )
        for h in ("h1", "h3")
    )
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_two_items_in_one_block_share_their_tag() -> None:
    """From 0.31 the second "mm" tag of a block is a back-reference in pickle, equal identifiers are not."""
    hasher = BlockHasher(vllm="0.31.0", algorithm="sha256", hash_seed="0", block_size=8)
    items = [{"identifier": "same-image", "offset": i, "length": 1} for i in (1, 5)]
    chain = hasher.chain(range(8), multimodal=items)
    data = hasher.hash_function.serialize((hasher.none_hash, tuple(range(8)), chain.extra_keys()[0]))
    assert data.count(b"\x8c\x02mm") == 1
    assert data.count(b"same-image") == 2
    assert b"h\x02" in data


@pytest.mark.parametrize(
    ("items", "where"),
    [
        (
            [{"identifier": "a", "offset": 4, "length": 2}, {"identifier": "b", "offset": 1, "length": 1}],
            "$.multimodal[1].offset",
        ),
        (
            [{"identifier": "a", "offset": 1, "length": 3}, {"identifier": "b", "offset": 3, "length": 1}],
            "$.multimodal[1].offset",
        ),
        ([{"identifier": "a", "offset": 6, "length": 3}], "$.multimodal[0].length"),
        ([{"identifier": "a", "offset": -1, "length": 3}], "$.multimodal[0].offset"),
        ([{"identifier": "a", "offset": 0, "length": 0}], "$.multimodal[0].length"),
        ([{"identifier": 7, "offset": 0, "length": 1}], "$.multimodal[0].identifier"),
        ([{"identifier": "a", "offset": True, "length": 1}], "$.multimodal[0].offset"),
        ([{"identifier": "a", "offset": 0}], "$.multimodal[0]"),
        ([{"identifier": "a", "offset": 0, "length": 1, "lenght": 2}], "$.multimodal[0]"),
        (["a"], "$.multimodal[0]"),
        ("a", "$.multimodal"),
        (7, "$.multimodal"),
    ],
)
def test_bad_multimodal_items_are_refused(items: Any, where: str) -> None:
    """Overlapping, unsorted, out of the prompt, or of the wrong type: a typed error that says where."""
    with pytest.raises(KvHashError) as caught:
        cbor_hasher().chain(range(8), multimodal=items)
    assert (caught.value.code, caught.value.at) == ("invalid-multimodal", where)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"shape": [7, 2]}, "$.prompt_embeds.data"),
        ({"shape": [7, 2], "data": "00" * 28}, "$.prompt_embeds.shape[0]"),
        ({"shape": [8]}, "$.prompt_embeds.shape"),
        ({"shape": "82"}, "$.prompt_embeds.shape"),
        ({"shape": [8, 0]}, "$.prompt_embeds.shape[1]"),
        ({"dtype": "int8"}, "$.prompt_embeds.dtype"),
        ({"dtype": None}, "$.prompt_embeds.dtype"),
        ({"data": "00" * 31}, "$.prompt_embeds.data"),
        ({"data": "zz" * 32}, "$.prompt_embeds.data"),
        ({"data": 7}, "$.prompt_embeds.data"),
        ({"rows": 8}, "$.prompt_embeds"),
    ],
)
def test_bad_prompt_embeds_are_refused(change: dict[str, Any], where: str) -> None:
    """Too few rows, an unknown dtype, data of the wrong length: a typed error that says where."""
    good = {"shape": [8, 2], "dtype": "float16", "data": "00" * 32}
    assert cbor_hasher().chain(range(8), prompt_embeds=good)
    with pytest.raises(KvHashError) as caught:
        cbor_hasher().chain(range(8), prompt_embeds={**good, **change})
    assert (caught.value.code, caught.value.at) == ("invalid-prompt-embeds", where)


def test_prompt_embeds_from_numpy_and_their_releases() -> None:
    """A NumPy matrix is its bytes; absent before 0.11.1, raw from there, digested from 0.17, tagged from 0.31."""
    rows = np.arange(16, dtype=np.float32).reshape(8, 2)
    block = rows[:4].tobytes()
    for vllm, expected in (
        ("0.11.0", None),
        ("0.11.1", (block,)),
        ("0.17.0", (hashlib.sha256(block).digest(),)),
    ):
        assert cbor_hasher(vllm=vllm).chain([0] * 8, prompt_embeds=rows).extra_keys()[0] == expected
    tagged = cbor_hasher(vllm="0.31.0").chain([0] * 8, prompt_embeds=rows)
    assert tagged.event_extra_keys()[0] == (hashlib.sha256(block).digest(),)


def test_generated_tokens_lie_beyond_the_embeddings() -> None:
    """A block of generated tokens has no rows: as vLLM's slice, its key is the digest of nothing."""
    chain = cbor_hasher().chain([0] * 4, prompt_embeds=np.zeros((4, 2), dtype=np.float16))
    chain.append([5, 6, 7, 8])
    assert chain.event_extra_keys()[1] == (hashlib.sha256(b"").digest(),)


def test_text_that_utf8_cannot_carry_is_refused() -> None:
    """A lone surrogate has no UTF-8 form; it is an error and not an exception from deep inside."""
    for fields in ({"cache_salt": "\ud800"}, {"lora": {"name": "\udfff", "path": "p"}}):
        with pytest.raises(KvHashError, match="surrogate"):
            cbor_hasher().chain(range(4), **fields)
    with pytest.raises(KvHashError, match="surrogate"):
        cbor_hasher(hash_seed="\ud800")


def test_wrong_halves_of_a_digest() -> None:
    """The published value is the last 8 bytes, big-endian: not the first 8, not little-endian."""
    digest = bytes(range(8)) + bytes(16) + bytes(range(0xF8, 0x100))
    assert external_hash(digest) == 17940646550795321087
    assert external_hash(digest, "int64") == 17940646550795321087 - (1 << 64)
    assert external_hash(digest, "bytes") == digest
    assert int.from_bytes(digest[:8], "big") == 283686952306183
