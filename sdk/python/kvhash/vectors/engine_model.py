"""What an engine's published events must agree with: the hashes of what it was sent, and hits that follow from them.

The engine vectors were made by a reference engine. This module derives the same from the requests and the payloads
alone: which hashes can be published, what is resident, and how much of the next prompt is cached.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvhash import BlockHasher, external_hash
from kvhash.events import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch, hash_key

__all__ = ["check_engine", "resident_after"]

_KEYS = ("cache_salt", "lora", "multimodal")


def _group_of(event: BlockStored | BlockRemoved) -> str:
    return str(event.group_idx or 0)


class _Residency:
    """How many copies of each block are there, by KV cache group and the low 64 bits of the hash."""

    def __init__(self) -> None:
        self.copies: dict[str, Counter[int]] = {}

    def apply(self, payload: bytes) -> None:
        """Apply one batch."""
        for event in decode_batch(payload).events:
            if isinstance(event, AllBlocksCleared):
                self.copies = {}
            elif isinstance(event, BlockStored):
                self.copies.setdefault(_group_of(event), Counter()).update(map(hash_key, event.block_hashes))
            elif isinstance(event, BlockRemoved):
                self.copies.setdefault(_group_of(event), Counter()).subtract(
                    map(hash_key, event.block_hashes)
                )

    def has(self, key: int) -> bool:
        """Whether group 0 holds the block."""
        return self.copies.get("0", Counter())[key] > 0

    def resident(self) -> dict[str, list[str]]:
        """Return the blocks that are there, by group, as the vectors carry them."""
        found = {
            group: [str(key) for key, count in sorted(copies.items()) if count > 0]
            for group, copies in sorted(self.copies.items())
        }
        return {group: keys for group, keys in found.items() if keys}


def resident_after(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return what is resident after the payloads of all steps."""
    state = _Residency()
    for step in steps:
        for payload in step["payloads"]:
            state.apply(bytes.fromhex(payload))
    return state.resident()


def check_engine(vector: Mapping[str, Any]) -> Iterator[str]:
    """Yield what in an engine vector does not follow from its requests and its payloads."""
    asked, expected = vector["input"], vector["expected"]
    settings, groups = asked["engine"], asked["engine"].get("groups")
    sizes = [settings["block_size"]] if groups is None else [group["block_size"] for group in groups]
    hasher = BlockHasher(
        vllm=settings["vllm"],
        algorithm=settings["algorithm"],
        hash_seed=settings["hash_seed"],
        block_size=math.gcd(*sizes),
        decode_context_parallel_size=settings.get("decode_context_parallel_size", 1),
        lookahead=settings.get("lookahead", 0),
    )
    state = _Residency()
    may_be_published: set[int] = set()
    for number, (step, seen) in enumerate(zip(asked["steps"], expected["steps"], strict=True)):
        if "reset_prefix_cache" in step:
            state.copies = {}  # at once, though AllBlocksCleared goes out only with the next batch
        requests = step.get("requests", [])
        for request, answer in zip(requests, seen["requests"], strict=True):
            keys = {name: request[name] for name in _KEYS if name in request}
            chain = hasher.chain(request["tokens"], **keys)
            prompt = [external_hash(value) for value in chain.block_hashes]
            if len(requests) == 1 and groups is None:
                hit = 0
                # The last token is always computed anew, so that there is something to sample from.
                for index, key in enumerate(prompt):
                    if not state.has(int(key)) or (index + 1) * hasher.span > len(request["tokens"]) - 1:
                        break
                    hit += hasher.span
                hit = 0 if request.get("skip_reading_prefix_cache") else hit
                if hit != answer["cached_tokens"]:
                    yield f"step {number}: {answer['cached_tokens']} tokens cached; from the events {hit}"
            chain.append(request["output"])
            may_be_published.update(int(external_hash(value)) for value in chain.block_hashes)
        for payload in seen["payloads"]:
            for event in decode_batch(bytes.fromhex(payload)).events:
                hashes = event.block_hashes if isinstance(event, (BlockStored, BlockRemoved)) else ()
                if not {hash_key(value) for value in hashes} <= may_be_published:
                    yield f"step {number}: a published hash is none of a request's"
            state.apply(bytes.fromhex(payload))
    if state.resident() != expected["resident"]:
        yield f"resident are {state.resident()}"
