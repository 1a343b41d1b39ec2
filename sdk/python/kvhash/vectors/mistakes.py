"""The mistakes that hashers are known to make, each as a small, deliberately wrong hasher.

They fill the ``wrong`` values of the corpus, so that a port which fails is told what it does; and they are the
mutants that the corpus must catch.
"""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Iterable, Iterator
from typing import Any

import cbor2

from kvhash.contract import ALGORITHMS, Contract
from kvhash.serialize import Value, encode_cbor
from kvhash.serialize.pickle5 import _Writer

from . import seldom_mistakes  # noqa: F401  (its classes register by being subclasses)
from .mistake import Mistake
from .plain import shown

__all__ = ["MISTAKES", "Mistake", "wrong_values"]


# --- published values


class LittleEndianExternal(Mistake):
    """Mistake `external-little-endian`."""

    name = "external-little-endian"
    said = "reads the published 64 bits of the digest as little-endian"

    def external(self, value: Any) -> int:
        if isinstance(value, int):
            return super().external(value)
        return int.from_bytes(value[-8:], "little")


class FirstEightBytes(Mistake):
    """Mistake `external-first-8-bytes`."""

    name = "external-first-8-bytes"
    said = "publishes the first 8 bytes of the digest; right are the last 8 (its low 64 bits)"

    def external(self, value: Any) -> int:
        return super().external(value) if isinstance(value, int) else int.from_bytes(value[:8], "big")


class ExternalLow64TooEarly(Mistake):
    """Mistake `external-low-64-too-early`."""

    name = "external-low-64-too-early"
    said = "publishes 64 bits; before 0.10.2 the whole integer of the chain is published"

    def external(self, value: Any) -> int:
        return super().external(value) % (1 << 64)


class SignedExternal(Mistake):
    """Mistake `external-signed-overflow`."""

    name = "external-signed-overflow"
    said = "writes the published 64 bits as a signed integer; right is unsigned"

    def external(self, value: Any) -> int:
        number = super().external(value)
        return number - (1 << 64) if number >> 63 else number


class RoundedExternal(Mistake):
    """Mistake `external-rounded-to-double`."""

    name = "external-rounded-to-double"
    said = "passes the published 64 bits through a double, which keeps 53 bits"

    def external(self, value: Any) -> int:
        return int(float(super().external(value)))


# --- the root


class SeedAsNumber(Mistake):
    """Mistake `seed-as-number`."""

    name = "seed-as-number"
    said = "hashes PYTHONHASHSEED as a number; vLLM hashes the text"

    def seed_value(self) -> Any:
        value = super().seed_value()
        return int(value) if re.fullmatch(r"[0-9]+", value) else value


class SeedAsBytes(Mistake):
    """Mistake `seed-as-bytes`."""

    name = "seed-as-bytes"
    said = "hashes the seed as bytes; vLLM hashes text"

    def seed_value(self) -> Any:
        return super().seed_value().encode()


class EmptySeedIsUnset(Mistake):
    """Mistake `empty-seed-is-unset`."""

    name = "empty-seed-is-unset"
    said = "takes the empty seed for no seed; it is a seed"

    def seed_value(self) -> Any:
        return "vllm-none-hash" if self.seed == "" else super().seed_value()


class SeedUnserialized(Mistake):
    """Mistake `seed-not-serialized`."""

    name = "seed-not-serialized"
    said = "digests the bare bytes of the seed; right is the digest of the serialized text"

    def none_hash(self) -> Any:
        return self.keep(self.digest(self.seed_value().encode()))


class ZeroRoot(Mistake):
    """Mistake `root-zero`."""

    name = "root-zero"
    said = "starts from a NONE_HASH of zeros"

    def none_hash(self) -> Any:
        value = super().none_hash()
        return 0 if isinstance(value, int) else bytes(len(value))


class NoRoot(Mistake):
    """Mistake `first-parent-null`."""

    name = "first-parent-null"
    said = "gives block 0 no parent; its parent is NONE_HASH"

    def first_parent(self, none_hash: Any) -> Any:
        return None


class PickledRoot(Mistake):
    """Mistake `root-always-sha256-pickle`."""

    name = "root-always-sha256-pickle"
    said = "makes NONE_HASH with sha256 over pickle whatever the algorithm; from 0.10.0 it is the chosen one"

    def none_hash(self) -> Any:
        import hashlib

        digest = hashlib.sha256(pickle.dumps(self.seed_value(), protocol=5)).digest()
        return int.from_bytes(digest, "big") if self.as_int else digest


# --- the chain


class ParentTruncated(Mistake):
    """Mistake `parent-truncated-to-64-bits`."""

    name = "parent-truncated-to-64-bits"
    said = "chains only the low 64 bits of the parent; the whole digest goes in"

    def parent(self, previous: Any) -> Any:
        return previous[-8:] if isinstance(previous, bytes) else previous % (1 << 64)


class ParentAsInt(Mistake):
    """Mistake `parent-as-integer`."""

    name = "parent-as-integer"
    said = "chains the digest as an integer; from 0.10.2 the parent is its bytes"

    def parent(self, previous: Any) -> Any:
        return int.from_bytes(previous, "big") if isinstance(previous, bytes) else previous


class ParentAsBytes(Mistake):
    """Mistake `parent-as-bytes-too-early`."""

    name = "parent-as-bytes-too-early"
    said = "chains bytes; before 0.10.2 the parent is an integer"

    def parent(self, previous: Any) -> Any:
        if isinstance(previous, bytes):
            return previous
        return previous.to_bytes(8 if self.algorithm.endswith("64bit") else 32, "big")


class ParentAsHex(Mistake):
    """Mistake `parent-as-hex-text`."""

    name = "parent-as-hex-text"
    said = "chains the hex text of the parent; its raw bytes go in"

    def parent(self, previous: Any) -> Any:
        return previous.hex() if isinstance(previous, bytes) else previous


class NotChained(Mistake):
    """Mistake `not-chained`."""

    name = "not-chained"
    said = "gives every block NONE_HASH as its parent; the parent is the block before"
    cost = "equal blocks at different places are taken for each other: false hits"

    def parent(self, previous: Any) -> Any:
        return self.first_parent(self.none_hash())


class DigestReversed(Mistake):
    """Mistake `digest-little-endian`."""

    name = "digest-little-endian"
    said = "keeps the digest with its bytes reversed; it is big-endian"

    def digest(self, data: bytes) -> bytes:
        return super().digest(data)[::-1]


class High64(Mistake):
    """Mistake `chain-high-64-bits`."""

    name = "chain-high-64-bits"
    said = "keeps the high 64 bits in sha256_cbor_64bit; right are the low 64"

    def keep(self, digest: bytes) -> Any:
        if self.algorithm.endswith("64bit"):
            return int.from_bytes(digest[:8], "big")
        return super().keep(digest)


class PartialBlock(Mistake):
    """Mistake `partial-block-hashed`."""

    name = "partial-block-hashed"
    said = "hashes the last block although it is not full"
    cost = "publishes hashes that no engine has"

    def number_of_blocks(self) -> int:
        return -(-len(self.tokens) // self.span)


class ContextParallelIgnored(Mistake):
    """Mistake `context-parallel-ignored`."""

    name = "context-parallel-ignored"
    shows_in = ("decode_context_parallel_size",)
    said = "hashes per block; with decode context parallelism D a hash covers D times as many tokens"

    def context_parallel(self) -> int:
        return 1


# --- the serialization


class EmptyTuple(Mistake):
    """Mistake `empty-tuple-for-null`."""

    name = "empty-tuple-for-null"
    said = "writes an empty tuple where a block has no extra keys; right is null"

    def no_keys(self) -> Any:
        return ()


class PickleList(Mistake):
    """Mistake `tokens-as-list`."""

    name = "tokens-as-list"
    serialization = "pickle5"
    said = "pickles the tokens as a list; vLLM hashes a tuple"

    def block_tokens(self, tokens: list[int]) -> Any:
        return list(tokens)


class TokensPacked(Mistake):
    """Mistake `tokens-as-uint32-bytes`."""

    name = "tokens-as-uint32-bytes"
    said = "packs the tokens as 4-byte integers; they are an array of integers"

    def block_tokens(self, tokens: list[int]) -> Any:
        return b"".join((token % (1 << 32)).to_bytes(4, "little") for token in tokens)


class TokensRounded(Mistake):
    """Mistake `tokens-through-32-bits`."""

    name = "tokens-through-32-bits"
    said = "keeps 32 bits of a token id; ids up to 2^64 - 1 are hashed"
    cost = "misses for token ids of 2^32 and more"

    def read_tokens(self, tokens: list[int]) -> list[int]:
        return [token % (1 << 32) for token in tokens]


class WideIntegers(Mistake):
    """Mistake `cbor-integers-not-shortest`."""

    name = "cbor-integers-not-shortest"
    serialization = "cbor"
    said = "writes CBOR integers in 4 bytes always; canonical CBOR takes the shortest head"

    def serialize(self, value: Any) -> bytes:
        return _wide_cbor(value) if "cbor" in self.algorithm else super().serialize(value)


def _wide_cbor(value: Any) -> bytes:
    if isinstance(value, (tuple, list)):
        return encode_cbor(tuple([None] * len(value)))[: -len(value) or None] + b"".join(
            map(_wide_cbor, value)
        )
    if isinstance(value, int) and 0 <= value < 1 << 32:
        return b"\x1a" + value.to_bytes(4, "big")
    return cbor2.dumps(value, canonical=True)


class TextLengthInCharacters(Mistake):
    """Mistake `text-length-in-characters`."""

    name = "text-length-in-characters"
    said = "writes a text's length in characters; it is the length of its UTF-8"
    cost = "misses for salts, adapters and identifiers that are not ASCII"

    def serialize(self, value: Any) -> bytes:
        data = super().serialize(value)
        for text in _texts(value):
            encoded = text.encode()
            if len(encoded) != len(text) and len(encoded) < 24:
                short = encoded[: len(text)]
                data = data.replace(
                    bytes((0x60 | len(encoded),)) + encoded, bytes((0x60 | len(text),)) + short
                )
                data = data.replace(
                    b"\x8c" + bytes((len(encoded),)) + encoded, b"\x8c" + bytes((len(text),)) + short
                )
        return data


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _texts(item)


class NegativeOffByOne(Mistake):
    """Mistake `cbor-negative-off-by-one`."""

    name = "cbor-negative-off-by-one"
    serialization = "cbor"
    shows_in = ("multimodal",)
    said = "writes a negative CBOR integer n as -n; right is -1 - n"
    cost = "misses where an image continues from the block before"

    def serialize(self, value: Any) -> bytes:
        return super().serialize(_shift(value)) if "cbor" in self.algorithm else super().serialize(value)


def _shift(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_shift, value))
    return value - 1 if isinstance(value, int) and value < 0 else value


class PickleProtocol4(Mistake):
    """Mistake `pickle-protocol-4`."""

    name = "pickle-protocol-4"
    serialization = "pickle5"
    said = "writes pickle protocol 4; vLLM's hash uses 5"

    def serialize(self, value: Any) -> bytes:
        data = super().serialize(value)
        return data if "cbor" in self.algorithm else b"\x80\x04" + data[2:]


class PickleUnframed(Mistake):
    """Mistake `pickle-without-frame`."""

    name = "pickle-without-frame"
    serialization = "pickle5"
    said = "leaves out the frame header of pickle"

    def serialize(self, value: Any) -> bytes:
        data = super().serialize(value)
        return data[:2] + data[11:] if "cbor" not in self.algorithm and data[2:3] == b"\x95" else data


class PickleUnsigned32(Mistake):
    """Mistake `pickle-binint-unsigned`."""

    name = "pickle-binint-unsigned"
    serialization = "pickle5"
    said = "writes ids of 2^31 to 2^32 - 1 as BININT; that is signed, so they are LONG1"
    cost = "misses for token ids of 2^31 and more"

    def serialize(self, value: Any) -> bytes:
        data = super().serialize(value)
        if "cbor" in self.algorithm:
            return data
        changed = re.sub(rb"\x8a\x05(...[\x80-\xff])\x00", rb"J\1", data, flags=re.DOTALL)
        return _reframed(changed) if changed != data and data[2:3] == b"\x95" else data


def _reframed(data: bytes) -> bytes:
    return data[:3] + (len(data) - 11).to_bytes(8, "little") + data[11:]


class _OneFrame(_Writer):
    """Never closes its frame before the end."""

    ending = False

    def _close_frame(self) -> None:
        if self.ending:
            super()._close_frame()

    def finish(self) -> bytes:
        self._write(b".")
        self.ending = True
        self._close_frame()
        return bytes(self._out)


class PickleOneFrame(Mistake):
    """Mistake `pickle-one-frame`."""

    name = "pickle-one-frame"
    serialization = "pickle5"
    said = "writes one pickle frame whatever its size; a frame closes once it holds 64 KiB"
    cost = "misses with very large blocks or keys"

    def serialize(self, value: Any) -> bytes:
        data = super().serialize(value)
        if "cbor" in self.algorithm or len(data) < 1 << 16:
            return data
        writer = _OneFrame()
        writer.save(_as_value(value))
        return writer.finish()


def _as_value(value: Any) -> Value:
    return tuple(map(_as_value, value)) if isinstance(value, (tuple, list)) else value


class NoBackReference(Mistake):
    """Mistake `pickle-no-back-reference`."""

    name = "pickle-no-back-reference"
    serialization = "pickle5"
    shows_in = ("multimodal",)
    said = "writes the tag 'mm' out again for the second image of a block; pickle writes a back-reference"
    cost = "misses for blocks with two images"

    def tag(self, name: str) -> str:
        return "".join(list(name)) if "cbor" not in self.algorithm else name


class EqualTextsShared(Mistake):
    """Mistake `pickle-equal-texts-shared`."""

    name = "pickle-equal-texts-shared"
    serialization = "pickle5"
    shows_in = ("multimodal",)
    said = "writes a back-reference for an equal text; only the same object gives one"
    cost = "misses where one image stands twice in a block"

    def __init__(self, request: dict[str, Any]) -> None:
        self._texts: dict[str, str] = {}
        super().__init__(request)

    def text(self, value: str) -> str:
        return self._texts.setdefault(value, super().text(value))


# --- extra keys


class SaltEverywhere(Mistake):
    """Mistake `salt-on-every-block`."""

    name = "salt-on-every-block"
    shows_in = ("cache_salt",)
    said = "puts the cache salt into every block's key; it is in block 0's only"

    def salted(self, start: int) -> bool:
        return bool(self.request.get("cache_salt"))


class SaltDropped(Mistake):
    """Mistake `salt-dropped`."""

    name = "salt-dropped"
    shows_in = ("cache_salt",)
    said = "leaves the cache salt out"
    cost = "one tenant's blocks are taken for another's"

    def salted(self, start: int) -> bool:
        return False


class EmptySaltKept(Mistake):
    """Mistake `empty-salt-kept`."""

    name = "empty-salt-kept"
    shows_in = ("cache_salt",)
    said = "hashes an empty salt; an empty salt is none"

    def salted(self, start: int) -> bool:
        return self.request.get("cache_salt") is not None and start == 0


class LoraDropped(Mistake):
    """Mistake `lora-dropped`."""

    name = "lora-dropped"
    shows_in = ("lora",)
    said = "leaves the LoRA adapter out"
    cost = "an adapter's blocks are taken for the base model's: wrong answers"

    def lora_keys(self) -> list[Any]:
        return []


class LoraFirstBlock(Mistake):
    """Mistake `lora-on-first-block-only`."""

    name = "lora-on-first-block-only"
    shows_in = ("lora",)
    said = "puts the adapter into block 0's key only; it is in every block's"

    def key_slot(self, start: int, end: int) -> Any:
        request = self.request
        if start:
            self.request = {name: item for name, item in request.items() if name != "lora"}
        try:
            return super().key_slot(start, end)
        finally:
            self.request = request


class LoraId(Mistake):
    """Mistake `lora-by-id`."""

    name = "lora-by-id"
    shows_in = ("lora",)
    said = "hashes the adapter's id; from 0.11.1 it is the name"

    def lora_keys(self) -> list[Any]:
        lora = self.request.get("lora")
        return [lora["id"]] if lora and lora.get("id") is not None else super().lora_keys()


class LoraName(Mistake):
    """Mistake `lora-by-name-too-early`."""

    name = "lora-by-name-too-early"
    shows_in = ("lora",)
    said = "hashes the adapter's name; before 0.11.1 it is the integer id"

    def lora_keys(self) -> list[Any]:
        lora = self.request.get("lora")
        if lora and self.contract.lora_key == "id" and lora.get("name") is not None:
            return [self.text(lora["name"])]
        return super().lora_keys()


class LoraPathMissing(Mistake):
    """Mistake `lora-path-missing`."""

    name = "lora-path-missing"
    shows_in = ("lora",)
    said = "leaves the adapter's path out; from 0.31 the key is ('lora', name, path)"

    def lora_keys(self) -> list[Any]:
        return [key[:2] if isinstance(key, tuple) else key for key in super().lora_keys()]


class KeysInWrongOrder(Mistake):
    """Mistake `salt-before-other-keys`."""

    name = "salt-before-other-keys"
    shows_in = ("cache_salt",)
    said = "puts the salt first; the order is LoRA, multimodal, salt, prompt embeddings"

    def key_groups(self, start: int, end: int) -> list[list[Any]]:
        lora, multimodal, salt, embeds = super().key_groups(start, end)
        return [salt, lora, multimodal, embeds]


class Untagged(Mistake):
    """Mistake `tags-missing`."""

    name = "tags-missing"
    shows_in = ("lora", "cache_salt", "multimodal", "prompt_embeds")
    said = "hashes extra keys without their tags; from 0.31 they are tagged"

    def tagged(self) -> bool:
        return False


class TaggedTooEarly(Mistake):
    """Mistake `tags-too-early`."""

    name = "tags-too-early"
    shows_in = ("lora", "cache_salt", "multimodal", "prompt_embeds")
    said = "tags extra keys; before 0.31 they are not tagged"

    def contract_of(self, release: str) -> Contract:
        contract = super().contract_of(release)
        return dataclasses.replace(contract, tagged_keys=contract.multimodal_key == "identifier_and_offset")

    def lora_keys(self) -> list[Any]:
        lora = self.request.get("lora")
        if lora and self.tagged() and (lora.get("name") is None or lora.get("path") is None):
            return []
        return super().lora_keys()


class AbsoluteOffset(Mistake):
    """Mistake `mm-offset-from-request-start`."""

    name = "mm-offset-from-request-start"
    shows_in = ("multimodal",)
    said = "counts an image's offset from the prompt's start; it is from the block's start"

    def offset(self, item: dict[str, Any], start: int) -> int:
        return int(item["offset"])


class ClampedOffset(Mistake):
    """Mistake `mm-negative-offset-clamped`."""

    name = "mm-negative-offset-clamped"
    shows_in = ("multimodal",)
    said = "writes 0 where an image continues from the block before; the offset is negative there"

    def offset(self, item: dict[str, Any], start: int) -> int:
        return max(0, super().offset(item, start))


class MultimodalStartOnly(Mistake):
    """Mistake `mm-first-block-only`."""

    name = "mm-first-block-only"
    shows_in = ("multimodal",)
    said = "counts an image only in the block where it starts; it counts in every block that it overlaps"
    cost = "two images with equal beginnings may be taken for each other"

    def overlaps(self, item: dict[str, Any], start: int, end: int) -> bool:
        return bool(start <= item["offset"] < end)


class MultimodalEdge(Mistake):
    """Mistake `mm-edge-included`."""

    name = "mm-edge-included"
    shows_in = ("multimodal",)
    said = "counts an image in the block after its last token"

    def overlaps(self, item: dict[str, Any], start: int, end: int) -> bool:
        return bool(item["offset"] < end and item["offset"] + item["length"] >= start)


class MultimodalOffsetMissing(Mistake):
    """Mistake `mm-offset-missing`."""

    name = "mm-offset-missing"
    shows_in = ("multimodal",)
    said = "hashes an image's identifier alone; from 0.19 its offset too"

    def with_offset(self) -> bool:
        return False


class MultimodalOffsetTooEarly(Mistake):
    """Mistake `mm-offset-too-early`."""

    name = "mm-offset-too-early"
    shows_in = ("multimodal",)
    said = "hashes an image's offset; before 0.19 the identifier alone"

    def with_offset(self) -> bool:
        return True


class EmbedsRaw(Mistake):
    """Mistake `embeds-raw-bytes`."""

    name = "embeds-raw-bytes"
    shows_in = ("prompt_embeds",)
    said = "puts the rows of prompt embeddings into the key; from 0.17 it is their SHA-256"

    def embeds_form(self) -> str:
        return "bytes" if super().embeds_form() != "absent" else "absent"


class EmbedsDigestTooEarly(Mistake):
    """Mistake `embeds-digest-too-early`."""

    name = "embeds-digest-too-early"
    shows_in = ("prompt_embeds",)
    said = "puts the SHA-256 of the rows into the key; before 0.17 it is the rows"

    def embeds_form(self) -> str:
        return "sha256" if super().embeds_form() != "absent" else "absent"


class EmbedsWhole(Mistake):
    """Mistake `embeds-whole-matrix`."""

    name = "embeds-whole-matrix"
    shows_in = ("prompt_embeds",)
    said = "takes all rows of the prompt embeddings for every block; right are the block's own"

    def rows(self, start: int, end: int) -> bytes:
        return bytes.fromhex(self.request["prompt_embeds"]["data"])


# --- look-ahead


class LookaheadIgnored(Mistake):
    """Mistake `lookahead-ignored`."""

    name = "lookahead-ignored"
    shows_in = ("lookahead",)
    said = "leaves the look-ahead tokens out of the hash"

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__({**request, "lookahead": 0})


class LookaheadKeysOfBlock(Mistake):
    """Mistake `lookahead-keys-of-block-only`."""

    name = "lookahead-keys-of-block-only"
    shows_in = ("lookahead",)
    said = "takes the block's own extra keys; with look-ahead those of the tokens after it count too"
    cost = "misses where an image starts in the look-ahead tokens"

    def keys_end(self, end: int) -> int:
        return end


class LookaheadTooEarly(Mistake):
    """Mistake `lookahead-block-too-early`."""

    name = "lookahead-block-too-early"
    shows_in = ("lookahead",)
    said = "hashes a block before its look-ahead tokens exist"

    def needed(self) -> int:
        return self.span


class LookaheadNested(Mistake):
    """Mistake `lookahead-tokens-nested`."""

    name = "lookahead-tokens-nested"
    shows_in = ("lookahead",)
    said = "puts the look-ahead tokens into a tuple of their own; they follow the extra keys in one tuple"

    def key_slot(self, start: int, end: int) -> Any:
        slot = super().key_slot(start, end)
        return (slot[0], slot[1:]) if self.lookahead else slot


# --- releases


class DefaultSeedTooEarly(Mistake):
    """Mistake `default-root-too-early`."""

    name = "default-root-too-early"
    said = (
        "uses the fixed NONE_HASH without a seed; vLLM draws it at random before 0.29, and for xxhash always"
    )
    cost = "claims hashes that cannot be known"

    def seed_value(self) -> Any:
        return "vllm-none-hash" if self.seed is None else super().seed_value()


def _all(base: type[Mistake]) -> Iterator[type[Mistake]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _all(kind)


#: Requests of more tokens are left to the mistakes that need them.
_LARGE = 4096
#: Every known mistake by name.
MISTAKES: dict[str, type[Mistake]] = {kind.name: kind for kind in _all(Mistake) if kind.name}


def first_difference(right: dict[str, Any], wrong: dict[str, Any]) -> str | None:
    """Return the first value of a wrong answer that stands nowhere in the right one, as text; None without one."""
    good, bad = _values(right), _values(wrong)
    return next((value for value in bad if value not in good), None)


def _values(answer: dict[str, Any]) -> list[str]:
    return [_text(value) for value in (answer["none_hash"], *answer["block_hashes"], *answer["external"])]


def _text(value: Any) -> str:
    return str(value["int"]) if isinstance(value, dict) else str(value)


def _may_show(kind: type[Mistake], request: dict[str, Any]) -> bool:
    if kind.shows_in and not any(request.get(name) is not None for name in kind.shows_in):
        return False
    if kind.serialization and kind.serialization != ALGORITHMS[request["algorithm"]].serialization:
        return False
    # Other vectors show it, and shorter.
    return len(request["tokens"]) <= _LARGE or kind.seldom or kind in (PickleOneFrame, TokensPacked)


def wrong_values(
    request: dict[str, Any],
    right: dict[str, Any] | None,
    *,
    order: Iterable[str] | None = None,
    most: int = 1000,
) -> dict[str, str]:
    """Return for mistakes that show in this request the first value that each gives instead of a right one.

    `right` is the right answer, None where there is none (the request is to be refused). `order`: the mistakes to
    try, in order (all when left out); at most `most` are returned.
    """
    found: dict[str, str] = {}
    if right is None:
        if request.get("hash_seed") is None:
            hasher = DefaultSeedTooEarly(request)
            found[hasher.name] = _text(shown(hasher.none_hash()))
        return found
    for name in MISTAKES if order is None else order:
        kind = MISTAKES[name]
        if len(found) >= most:
            break
        if not _may_show(kind, request):
            continue
        try:
            value = first_difference(right, kind(request).answer())
        except (KeyError, AssertionError, IndexError):
            continue  # this request lacks what the mistake needs
        if value is not None:
            found[name] = value
    return found
