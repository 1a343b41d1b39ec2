"""What the native core is compared with: vLLM's way to a request's block hashes, and Dynamo's."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from typing import Any

import cbor2
import xxhash

__all__ = ["VLLM", "as_vllm_does", "as_vllms_hasher_does", "dynamo"]

_Serialize = Callable[[Any], bytes]


def _pickle(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _cbor(value: Any) -> bytes:
    return cbor2.dumps(value, canonical=True)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


VLLM: dict[str, tuple[_Serialize, _Serialize]] = {
    "sha256": (_pickle, _sha256),
    "sha256_cbor": (_cbor, _sha256),
    "xxhash": (_pickle, xxhash.xxh3_128_digest),
    "xxhash_cbor": (_cbor, xxhash.xxh3_128_digest),
}


def as_vllm_does(algorithm: str, root: Any, tokens: list[int], block_size: int) -> list[Any]:
    """Hash block by block with vLLM's calls."""
    serialize, digest = VLLM[algorithm]
    hashes, parent = [], root
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = digest(serialize((parent, tuple(tokens[start : start + block_size]), None)))
        hashes.append(parent)
    return hashes


class _TokenView:
    """A request's tokens as vLLM hands them to its hasher: a list behind a read-only view."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __getitem__(self, item: slice) -> list[int]:
        return self._tokens[item]


class _Request:
    """What vLLM's hasher looks at in a plain request."""

    def __init__(self, tokens: list[int]) -> None:
        self.all_token_ids = _TokenView(tokens)
        self.num_tokens = len(tokens)
        self.lora = self.cache_salt = self.prompt_embeds = None
        self.multimodal: list[Any] = []


def _lora_keys(request: _Request) -> list[Any]:
    return [] if request.lora is None else [request.lora]


def _multimodal_keys(request: _Request, start: int, end: int, first: int) -> tuple[list[Any], int]:
    keys: list[Any] = []
    if not request.multimodal:
        return keys, first
    return [item for item in request.multimodal if start <= item < end], first


def _embeds_keys(request: _Request, start: int, end: int) -> list[Any]:
    return [] if request.prompt_embeds is None else [request.prompt_embeds[start:end]]


def _extra_keys(request: _Request, start: int, end: int, first: int) -> tuple[tuple[Any, ...] | None, int]:
    multimodal, first = _multimodal_keys(request, start, end, first)
    salt = [request.cache_salt] if start == 0 and request.cache_salt else []
    keys = _lora_keys(request) + multimodal + salt + _embeds_keys(request, start, end)
    return (tuple(keys) if keys else None), first


def as_vllms_hasher_does(algorithm: str, root: Any, tokens: list[int], block_size: int) -> list[Any]:
    """Hash block by block with vLLM's calls and the Python around them."""
    serialize, digest = VLLM[algorithm]

    def hash_function(value: Any) -> bytes:
        return digest(serialize(value))

    def hash_block(parent: Any, block: list[int], keys: tuple[Any, ...] | None) -> bytes:
        return hash_function((parent or root, tuple(block), keys))

    request = _Request(tokens)
    hashes: list[Any] = []
    parent, start, first = None, 0, 0
    while (end := start + block_size) <= request.num_tokens:
        keys, first = _extra_keys(request, start, end, first)
        parent = hash_block(parent, request.all_token_ids[start:end], keys)
        hashes.append(parent)
        start = end
    return hashes


def dynamo() -> Callable[[list[int], int], Any] | None:
    """Return Dynamo's function of token ids and block size, or None where its package is not installed."""
    try:
        from dynamo._core import compute_block_hash_for_seq
    except ImportError:
        return None
    found: Callable[[list[int], int], Any] = compute_block_hash_for_seq
    return found
