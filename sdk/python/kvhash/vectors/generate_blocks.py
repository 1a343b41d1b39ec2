"""Makes the vectors below a request: serializations, published forms, coarser views, and the accumulated digests."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from typing import Any

import cbor2

from kvhash import BlockHasher, BlockHashView, KvHashError, resolve_block_sizes
from kvhash.block_hash import external_hash, json_hash, make_block_hash_with_group_id
from kvhash.contract import ALGORITHMS, CHANGES, Contract
from kvhash.digest import sha256, xxh3_128
from kvhash.serialize import encode_cbor, encode_pickle5

from .inputs import byte_stream, tokens
from .record import vector
from .releases import OLDEST_TEXT
from .values import from_json, plain_from_json

__all__ = ["accumulated", "make_blocks", "serialized"]

_PARENT = {"bytes": sha256(b"parent").hex()}
_SHORT_PARENT = {"bytes": xxh3_128(b"parent").hex()}
#: Serializations longer than this are given by their length and digests alone.
_MAX_HEX = 2048


def _number(value: int) -> dict[str, str]:
    return {"int": str(value)}


def _ids(*values: int) -> list[dict[str, str]]:
    return [_number(value) for value in values]


def _values() -> Iterator[tuple[str, str, list[str], Any]]:
    """Yield (slug, name, flags, value) of every value to serialize."""
    edges = sorted(
        {0, 1, 22, 23, 24, 25, 127, 128, 254, 255, 256, 257, 32767, 32768, 65534, 65535, 65536, 65537}
        | {(1 << n) + d for n in (23, 24, 31, 32, 40, 48, 53, 63, 64, 127, 128, 255, 256) for d in (-1, 0, 1)}
    )
    for value in edges:
        yield f"int-{value}", f"integer {value}", ["integer-widths"], _number(value)
    for value in (
        1,
        23,
        24,
        25,
        127,
        128,
        129,
        255,
        256,
        257,
        32768,
        65535,
        65536,
        65537,
        (1 << 31) - 1,
        1 << 31,
        (1 << 31) + 1,
        1 << 32,
        1 << 63,
        (1 << 63) + 1,
        1 << 64,
        (1 << 64) + 1,
        1 << 256,
    ):
        yield f"int-minus-{value}", f"integer -{value}", ["integer-widths"], _number(-value)
    yield "none", "null", ["tuple-widths"], None
    for length in (0, 1, 2, 3, 4, 22, 23, 24, 25, 254, 255, 256, 257, 1000):
        yield f"tuple-{length}", f"a tuple of {length} ids", ["tuple-widths"], _ids(*range(1, length + 1))
        repeated = {"repeat": "é" if length % 2 else "t", "count": length}
        if length != 1:
            yield f"text-{length}", f"text of {length} characters", ["text-widths"], repeated
        if length != 1:
            yield f"bytes-{length}", f"{length} bytes", ["text-widths"], {"bytes": "5a" * length}
    for length in (65535, 65536, 65537):
        yield (
            f"text-{length}",
            f"text of {length} characters",
            ["text-widths", "frames"],
            [{"repeat": "t", "count": length}, _number(1)],
        )
    for text in ("größe", "\U0001f511\U0001f511", "日本語", "a\0b", "e\u0301", '"\\'):
        slug = text.encode().hex()
        yield f"text-utf8-{slug}", f"text {text!r}", ["not-ascii"], {"text": text}
    for count in (3, 4, 16, 23, 24, 255, 256):
        spec = {"tokens": {"seed": f"block-{count}", "count": count, "vocabulary": 150000}}
        yield f"block-{count}", f"a block of {count} tokens", ["tokens"], [_PARENT, spec, None]
        yield (
            f"block-short-parent-{count}",
            "the same, 16-byte parent",
            ["tokens"],
            [_SHORT_PARENT, spec, None],
        )
    yield (
        "block-int-parent",
        "a block with an integer parent",
        ["tokens"],
        [_number((1 << 255) + 5), _ids(1, 2, 3, 4), None],
    )
    yield (
        "block-int64-parent",
        "a block with a 64-bit parent",
        ["tokens"],
        [_number((1 << 63) + 5), _ids(1, 2, 3, 4), None],
    )
    yield "block-empty", "a block of no tokens", ["tuple-widths"], [_PARENT, [], None]
    # Frames: before each value the pickler closes a frame that holds 64 KiB.
    for count in (13100, 13106, 13107, 13108, 13110, 16384, 21830, 21845, 21846, 21850, 32768, 32769, 65536):
        for vocabulary, kind in ((150000, "mixed"), (256, "one-byte"), (1 << 32, "wide")):
            spec = {"tokens": {"seed": "frames", "count": count, "vocabulary": vocabulary}}
            yield (
                f"frame-{kind}-{count}",
                f"a block of {count} {kind} ids",
                ["frames", "large"],
                [_PARENT, spec, None],
            )
    mm = {"same": 1, "text": "mm"}

    def image(name: str, offset: int, tag: Any = None) -> list[Any]:
        return [mm if tag is None else tag, {"text": name}, _number(offset)]

    block: list[Any] = [_PARENT, _ids(1, 2, 3, 4)]
    yield "one-image", "one tagged image", ["multimodal"], [*block, [image("img-a", 0)]]
    yield (
        "two-images",
        "two images: the tag is one object",
        ["aliasing"],
        [*block, [image("img-a", 0), image("img-b", 2)]],
    )
    yield (
        "two-equal-images",
        "equal identifiers are two objects",
        ["aliasing"],
        [*block, [image("img-a", 0), image("img-a", 2)]],
    )
    yield (
        "four-images",
        "three back-references",
        ["aliasing"],
        [*block, [image(f"img-{i}", i) for i in range(4)]],
    )
    yield (
        "tags-not-shared",
        "tags that are two objects",
        ["aliasing"],
        [*block, [image("img-a", 0, {"text": "mm"}), image("img-b", 2, {"text": "mm"})]],
    )
    one = {"same": 2, "text": "img-a"}
    yield (
        "identifier-shared",
        "one identifier object in two places",
        ["aliasing"],
        [*block, [[mm, one, _number(0)], [mm, one, _number(2)]]],
    )
    yield (
        "negative-offsets",
        "images that go on",
        ["continuation", "aliasing"],
        [*block, [image("img-a", -1), image("img-b", 3)]],
    )
    yield (
        "far-offset",
        "an image that began long before",
        ["continuation"],
        [*block, [image("img-a", -100000)]],
    )
    yield (
        "many-images",
        "a block with more than 256 memo numbers",
        ["aliasing"],
        [*block, [image(f"img-{i:03}", i) for i in range(140)]],
    )
    for index in (255, 256, 257):
        # The parent has memo number 0, the tokens' tuple 1, and every text the next.
        texts = [{"text": f"t{i}"} for i in range(index - 2)]
        yield (
            f"back-reference-{index}",
            f"a back-reference to memo number {index}",
            ["aliasing"],
            [*block, [*texts, mm, mm]],
        )
    for length in (65535, 65536):
        yield (
            f"bytes-{length}",
            f"{length} bytes, as a block's embeddings are before 0.17",
            ["text-widths", "frames"],
            [{"bytes": "5a" * length}, _number(1)],
        )
    keys = [
        [{"same": 3, "text": "lora"}, {"text": "sql"}, {"text": "adapters/sql"}],
        image("img-a", 0),
        [{"same": 4, "text": "cache_salt"}, {"text": "tenant"}],
        [{"same": 5, "text": "prompt_embeds"}, {"bytes": sha256(b"rows").hex()}],
    ]
    yield "every-key", "every tagged key", ["mixture"], [*block, keys]
    yield (
        "untagged-keys",
        "every key untagged",
        ["mixture"],
        [
            *block,
            [{"text": "sql"}, [{"text": "img-a"}, _number(-3)], {"text": "tenant"}, {"bytes": "00" * 64}],
        ],
    )
    yield "lora-id", "an adapter's integer id", ["lora"], [*block, [_number(3)]]
    yield (
        "identifiers",
        "images by identifier alone",
        ["multimodal"],
        [*block, [{"text": "img-a"}, {"text": "img-b"}]],
    )
    yield "salt-alone", "a salt", ["salt"], [*block, [{"text": "tenant"}]]
    yield "empty-texts", "the empty text is one object", ["aliasing"], [*block, [{"text": ""}, {"text": ""}]]
    yield "lookahead", "look-ahead without keys", ["lookahead"], [*block, [None, *_ids(5)]]
    yield (
        "lookahead-keys",
        "look-ahead with keys",
        ["lookahead"],
        [*block, [[image("img-a", 4)], *_ids(5, 6, 7)]],
    )
    big = {"repeat": "r", "count": 70000}
    yield (
        "large-text-in-key",
        "a text of more than 64 KiB leaves the frame",
        ["frames"],
        [*block, [[{"same": 4, "text": "cache_salt"}, big]]],
    )
    yield "two-large-texts", "two of them, one after the other", ["frames"], [*block, [big, big, _number(1)]]
    yield "after-large-text", "values after it open a new frame", ["frames"], [big, _ids(1, 2), None]


def serialized(serialization: str, value: Any) -> bytes:
    """Return the bytes of a JSON preimage, by the SDK."""
    encode = encode_cbor if serialization == "cbor" else encode_pickle5
    return encode(from_json(value))


def _serialization_vectors() -> Iterator[dict[str, Any]]:
    for slug, name, flags, value in _values():
        for serialization in ("cbor", "pickle5"):
            data = serialized(serialization, value)
            plain = plain_from_json(value)
            other = (
                cbor2.dumps(plain, canonical=True)
                if serialization == "cbor"
                else pickle.dumps(plain, protocol=5)
            )
            if data != other:
                raise AssertionError(f"{slug}: the SDK and {serialization} of another library disagree")
            yield vector(
                f"serialization/{serialization}-{slug}/{OLDEST_TEXT}",
                name,
                flags=flags,
                since=OLDEST_TEXT,
                input={"serialization": serialization, "value": value},
                serialized=data.hex() if len(data) <= _MAX_HEX else None,
                serialized_length=len(data),
                digests={"sha256": sha256(data).hex(), "xxh3_128": xxh3_128(data).hex()},
            )


def _external_vectors() -> Iterator[dict[str, Any]]:
    since = str(next(change.since for change in CHANGES if change.hashes.get("chain_values") == "bytes"))
    digests = {
        "counting": bytes(range(8)) + bytes(16) + bytes(range(0xF8, 0x100)),
        "zero": bytes(32),
        "ones": b"\xff" * 32,
        "high-bit": bytes(24) + b"\x80" + bytes(7),
        "max-signed": bytes(24) + b"\x7f" + b"\xff" * 7,
        "above-2-53": bytes(24) + (10362225831949560093).to_bytes(8, "big"),
        "head-only": b"\x01" * 8 + bytes(24),
        "xxh-counting": bytes(range(16)),
        "xxh-ones": b"\xff" * 16,
        **{f"random-{i}": sha256(str(i).encode()) for i in range(8)},
        **{f"xxh-random-{i}": xxh3_128(str(i).encode()) for i in range(8)},
    }
    for slug, digest in digests.items():
        number = int.from_bytes(digest[-8:], "big")
        value: Any = digest
        yield vector(
            f"external/{slug}/{since}",
            f"published forms of digest {slug}",
            flags=["external", *(["external-high-bit"] if number >> 63 else [])],
            since=since,
            input={"digest": digest.hex()},
            expected={
                "uint64": str(external_hash(value)),
                "int64": str(external_hash(value, "int64")),
                "bytes": digest.hex(),
            },
            wrong={
                name: str(item)
                for name, item in (
                    ("external-first-8-bytes", int.from_bytes(digest[:8], "big")),
                    ("external-little-endian", int.from_bytes(digest[-8:], "little")),
                    ("external-signed-overflow", number - (1 << 64) if number >> 63 else number),
                    ("external-rounded-to-double", int(float(number))),
                )
                if item != number
            },
        )
    for slug in ("counting", "xxh-counting", "ones"):
        for group in (0, 1, 255, 256, 65536, (1 << 32) - 1):
            joined: Any = digests[slug]
            yield vector(
                f"external/group-{slug}-{group}/{since}",
                f"digest {slug} with group id {group}",
                flags=["group-id"],
                since=since,
                input={"digest": digests[slug].hex(), "group_id": group},
                expected={"with_group_id": make_block_hash_with_group_id(joined, group).hex()},
            )
    for slug, number in {"small": 5, "64-bit": (1 << 64) - 1, "256-bit": (1 << 255) + 12345}.items():
        yield vector(
            f"external/int-{slug}/{OLDEST_TEXT}",
            "an integer of the chain is published as it is",
            flags=["external"],
            since=OLDEST_TEXT,
            until=since,
            input={"int": str(number)},
            expected={"uint64": str(external_hash(number))},
        )


def _block_size_vectors() -> Iterator[dict[str, Any]]:
    hasher = BlockHasher(algorithm="sha256_cbor", block_size=16, hash_seed="0")
    fine = hasher.hash_tokens(tokens("views", 16 * 12 + 5, 150000))
    for factor in (1, 2, 3, 4, 5, 12, 13):
        for count in (0, 1, 5, 11, 12):
            view = BlockHashView(fine[:count], factor)
            yield vector(
                f"block_size/view-{factor}-of-{count}/{OLDEST_TEXT}",
                f"{count} hashes seen {factor} at a time",
                flags=["block-size"],
                since=OLDEST_TEXT,
                input={"hashes": [json_hash(value) for value in fine[:count]], "factor": factor},
                expected={"hashes": [json_hash(value) for value in view]},
            )
    groups: list[tuple[list[int], int | None, int, list[int]]] = [
        ([16], None, 1, []),
        ([16], None, 2, []),
        ([16, 64], None, 1, []),
        ([16, 24], None, 1, []),
        ([64, 96], None, 1, []),
        ([16, 64], 8, 1, []),
        ([16, 64], 16, 1, []),
        ([16, 64], 32, 1, []),
        ([16], 8, 1, []),
        ([16, 768], None, 2, [1]),
        ([528, 16], None, 1, []),
        ([16, 16], None, 4, []),
        ([7, 13], None, 1, []),
        ([], None, 1, []),
        ([16, 0], None, 1, []),
        ([16], None, 0, []),
        ([256, 64, 32], 32, 1, []),
        ([3840, 768], None, 1, []),
    ]
    for number, (sizes, override, parallel, unscaled) in enumerate(groups):
        try:
            found = resolve_block_sizes(
                sizes,
                hash_block_size=override,
                decode_context_parallel_size=parallel,
                unscaled_groups=unscaled,
            )
            expected: dict[str, Any] = {
                "groups": list(found.groups),
                "hash_block_size": found.hash_block_size,
                "scheduler_block_size": found.scheduler_block_size,
            }
        except KvHashError as error:
            expected = {"error": {"codes": [error.code]}}
        yield vector(
            f"block_size/resolve-{number}/{OLDEST_TEXT}",
            f"groups {sizes}, override {override}, {parallel} ranks",
            flags=["block-size", *(["context-parallel"] if parallel != 1 else [])],
            since=OLDEST_TEXT,
            result="invalid" if "error" in expected else "valid",
            input={
                "groups": sizes,
                "hash_block_size": override,
                "decode_context_parallel_size": parallel,
                "unscaled_groups": unscaled,
            },
            expected=expected,
        )


_CHAINS, _BLOCKS, _BLOCK = 1000, 100, 16


def accumulated(algorithm: str, release: str, chains: int = _CHAINS) -> str:
    """Return the SHA-256 over the chain values of `chains` chains of 100 blocks of 16 tokens, in order.

    Chain k: seed is k in decimal; salt ``salt-k`` where k is odd; adapter id k, name ``lora-k``, path ``path-k``
    where k is a multiple of 3 (above 0); tokens are the next 1,600 of one generated stream. A chain value that is
    an integer counts as its decimal text.
    """
    stream = byte_stream(f"accumulated-{algorithm}")
    contract = Contract.for_vllm(release)
    total = hashlib.sha256()
    for k in range(chains):
        data = b"".join(next(stream) for _ in range(_BLOCKS * _BLOCK // 8))
        ids = [int.from_bytes(data[i : i + 4], "big") % 150000 for i in range(0, len(data), 4)]
        hasher = BlockHasher(vllm=contract, algorithm=algorithm, block_size=_BLOCK, hash_seed=str(k))
        lora = {"id": k, "name": f"lora-{k}", "path": f"path-{k}"} if k and k % 3 == 0 else None
        for value in hasher.hash_tokens(ids, cache_salt=f"salt-{k}" if k % 2 else None, lora=lora):
            total.update(str(value).encode() if isinstance(value, int) else value)
    return total.hexdigest()


def _accumulated_vectors() -> Iterator[dict[str, Any]]:
    for algorithm in ALGORITHMS:
        having = [change for change in CHANGES if algorithm in Contract.for_vllm(change.since).algorithms]
        release = str(having[-1].since)
        ends = [change.since for change in CHANGES if change.since > having[-1].since]
        for chains in (10, _CHAINS):
            yield vector(
                f"accumulated/{algorithm.replace('_', '-')}-{chains * _BLOCKS}/{release}",
                f"{chains * _BLOCKS} blocks of {algorithm} into one digest",
                flags=["accumulated"],
                since=release,
                until=str(ends[0]) if ends else None,
                input={
                    "algorithm": algorithm,
                    "vllm": [release],
                    "chains": chains,
                    "blocks": _BLOCKS,
                    "block_size": _BLOCK,
                    "stream": f"accumulated-{algorithm}",
                    "vocabulary": 150000,
                },
                digest=accumulated(algorithm, release, chains),
            )


def make_blocks() -> dict[str, list[dict[str, Any]]]:
    """Return the vectors below a request, by kind."""
    return {
        "serialization": list(_serialization_vectors()),
        "external": list(_external_vectors()),
        "block_size": list(_block_size_vectors()),
        "accumulated": list(_accumulated_vectors()),
    }
