"""A second, independent hasher: the recipe in one page, over `cbor2` and the standard `pickle`.

It shares no serializer, key builder or chain with the SDK, so an equal answer confirms both. Every step is a
method, so that a known mistake is one method done wrongly (`kvhash.vectors.mistakes`).
"""

from __future__ import annotations

import hashlib
import pickle
from functools import lru_cache
from typing import Any

import cbor2
import xxhash

from kvhash.contract import Contract, Release

__all__ = ["PlainHasher", "fresh"]

# One object each, as the constants in vLLM's code are.
TAGS = {name: name for name in ("lora", "mm", "cache_salt", "prompt_embeds")}


#: What a request hashes a block when it does not say.
_BLOCK_SIZE = 16


@lru_cache(maxsize=64)
def _contract(release: str) -> Contract:
    return Contract.for_vllm(Release.parse(release))


def fresh(text: str) -> str:
    """Return an equal text that is another object (CPython shares texts of fewer than two characters)."""
    return "".join(list(text))


class PlainHasher:
    """Answers one request (already checked) as a request-line program does."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.contract = self.contract_of(request["vllm"])
        self.algorithm = request["algorithm"]
        self.tokens: list[int] = self.read_tokens(request["tokens"])
        self.seed: str | None = request.get("hash_seed")
        self.span: int = (request.get("block_size") or _BLOCK_SIZE) * self.context_parallel()
        self.lookahead: int = request.get("lookahead") or 0
        self.as_int = self.contract.chain_values == "int"

    # --- steps, each of which a mistake may get wrong

    def contract_of(self, release: str) -> Contract:
        """Return the contract of a release."""
        return _contract(release)

    def read_tokens(self, tokens: list[int]) -> list[int]:
        """Return the token ids as they are hashed."""
        return list(tokens)

    def context_parallel(self) -> int:
        """Return how many ranks share a block."""
        value = self.request.get("decode_context_parallel_size") or 1
        assert isinstance(value, int)
        return value

    def serialize(self, value: Any) -> bytes:
        """Return the bytes that are digested."""
        if "cbor" in self.algorithm:
            return cbor2.dumps(value, canonical=True)
        return pickle.dumps(value, protocol=5)

    def digest(self, data: bytes) -> bytes:
        """Return the digest, most significant byte first."""
        if self.algorithm.startswith("xxhash"):
            return xxhash.xxh3_128_digest(data)
        return hashlib.sha256(data).digest()

    def keep(self, digest: bytes) -> Any:
        """Return what of a digest goes into the chain."""
        if not self.as_int:
            return digest
        return int.from_bytes(digest[-8:] if self.algorithm.endswith("64bit") else digest, "big")

    def seed_value(self) -> Any:
        """Return what is hashed for NONE_HASH."""
        seed = self.contract.default_seed if self.seed is None else self.seed
        assert seed is not None
        return fresh(seed)

    def none_hash(self) -> Any:
        """Return NONE_HASH."""
        return self.hash(self.seed_value())

    def hash(self, value: Any) -> Any:
        """Return the chain value of a preimage."""
        return self.keep(self.digest(self.serialize(value)))

    def first_parent(self, none_hash: Any) -> Any:
        """Return the parent of block 0."""
        return none_hash

    def parent(self, previous: Any) -> Any:
        """Return what stands for the block before."""
        return previous

    def block_tokens(self, tokens: list[int]) -> Any:
        """Return the token ids of a block as they stand in the preimage."""
        return tuple(tokens)

    def text(self, value: str) -> str:
        """Return a text of the request as an object of its own."""
        return fresh(value)

    def tag(self, name: str) -> str:
        """Return a tag, the same object each time."""
        return TAGS[name]

    def tagged(self) -> bool:
        """Whether extra keys are tagged."""
        return self.contract.tagged_keys

    def lora_keys(self) -> list[Any]:
        """Return the adapter's key."""
        lora = self.request.get("lora")
        if not lora:
            return []
        if self.contract.lora_key == "id":
            return [lora["id"]]
        if self.contract.lora_key == "name" or not self.tagged():
            return [self.text(lora["name"])]
        return [(self.tag("lora"), self.text(lora["name"]), self.text(lora["path"]))]

    def overlaps(self, item: dict[str, Any], start: int, end: int) -> bool:
        """Whether an image counts in a block."""
        return bool(item["offset"] < end and item["offset"] + item["length"] > start)

    def offset(self, item: dict[str, Any], start: int) -> int:
        """Return an image's offset as hashed."""
        return int(item["offset"]) - start

    def with_offset(self) -> bool:
        """Whether an image's offset is hashed."""
        return self.contract.multimodal_key == "identifier_and_offset"

    def multimodal_keys(self, start: int, end: int) -> list[Any]:
        """Return the images' keys."""
        keys: list[Any] = []
        for item in self.request.get("multimodal") or []:
            if not self.overlaps(item, start, end):
                continue
            identifier = self.text(item["identifier"])
            if not self.with_offset():
                keys.append(identifier)
            elif self.tagged():
                keys.append((self.tag("mm"), identifier, self.offset(item, start)))
            else:
                keys.append((identifier, self.offset(item, start)))
        return keys

    def salted(self, start: int) -> bool:
        """Whether the salt counts in the block at `start`."""
        return bool(self.request.get("cache_salt")) and start == 0

    def salt_keys(self, start: int) -> list[Any]:
        """Return the salt's key."""
        if not self.salted(start):
            return []
        salt = self.text(self.request["cache_salt"])
        return [(self.tag("cache_salt"), salt)] if self.tagged() else [salt]

    def rows(self, start: int, end: int) -> bytes:
        """Return the bytes of a block's embeddings."""
        embeds = self.request["prompt_embeds"]
        width = embeds["shape"][1] * {"float32": 4, "float16": 2, "bfloat16": 2}[embeds["dtype"]]
        data = bytes.fromhex(embeds["data"])
        return data[start * width : end * width]

    def embeds_form(self) -> str:
        """Return how embeddings are hashed: absent, bytes or sha256."""
        return self.contract.prompt_embeds_key

    def embeds_keys(self, start: int, end: int) -> list[Any]:
        """Return the embeddings' key."""
        form = self.embeds_form()
        if not self.request.get("prompt_embeds") or form == "absent":
            return []
        rows = self.rows(start, end)
        content = rows if form == "bytes" else hashlib.sha256(rows).digest()
        return [(self.tag("prompt_embeds"), content)] if self.tagged() else [content]

    def key_groups(self, start: int, end: int) -> list[list[Any]]:
        """Return the keys by kind, in their order."""
        return [
            self.lora_keys(),
            self.multimodal_keys(start, end),
            self.salt_keys(start),
            self.embeds_keys(start, end),
        ]

    def no_keys(self) -> Any:
        """Return what stands for no keys."""
        return None

    def keys_end(self, end: int) -> int:
        """Return the end of the tokens whose keys count."""
        return end + self.lookahead

    def key_slot(self, start: int, end: int) -> Any:
        """Return the third value of the preimage."""
        groups = self.key_groups(start, self.keys_end(end))
        keys: Any = tuple(key for group in groups for key in group) or self.no_keys()
        return (keys, *self.following(self.tokens[end : end + self.lookahead])) if self.lookahead else keys

    def following(self, tokens: list[int]) -> list[int]:
        """Return the look-ahead tokens of a block as they are hashed."""
        return tokens

    def needed(self) -> int:
        """Return how many tokens a block needs to be hashed."""
        return self.span + self.lookahead

    def number_of_blocks(self) -> int:
        """Return how many blocks are hashed."""
        return max(0, (len(self.tokens) - self.needed()) // self.span + 1)

    def external(self, value: Any) -> int:
        """Return a chain value as published."""
        # Before 0.10.2 the integer of the chain is published as it is, all 256 bits of it.
        number: int = value if isinstance(value, int) else int.from_bytes(value[-8:], "big")
        return number

    # --- the walk

    def preimages(self) -> list[tuple[Any, Any]]:
        """Return (preimage, chain value) of every block."""
        result = []
        previous: Any = self.first_parent(self.none_hash())
        for i in range(self.number_of_blocks()):
            start, end = i * self.span, (i + 1) * self.span
            preimage = (
                self.parent(previous),
                self.block_tokens(self.tokens[start:end]),
                self.key_slot(start, end),
            )
            previous = self.hash(preimage)
            result.append((preimage, previous))
        return result

    def answer(self) -> dict[str, Any]:
        """Return the answer object, without ``id``."""
        blocks = self.preimages()
        return {
            "none_hash": shown(self.none_hash()),
            "block_hashes": [shown(value) for _, value in blocks],
            "external": [str(self.external(value)) for _, value in blocks],
            "extra_keys": [as_json(preimage[2]) for preimage, _ in blocks],
        }


def shown(value: Any) -> Any:
    """Return a chain value as answers carry it."""
    return {"int": str(value)} if isinstance(value, int) else value.hex()


def as_json(value: Any) -> Any:
    """Return extra keys as answers carry them."""
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    return [as_json(item) for item in value] if isinstance(value, (tuple, list)) else value
