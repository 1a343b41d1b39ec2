"""Ratios of the native core to what others do for the same blocks, each pair side by side in one run.

Peers:

* **vLLM hash call**: what vLLM calls for each block, ``cbor2.dumps(..., canonical=True)`` or
  ``pickle.dumps`` of (parent, tokens, None), then hashlib or xxhash;
* **vLLM hasher**: that call and the Python around it: the slice of the request's token view, the extra keys
  of each kind (none here), the tuple, the call of the hash function by its name;
* **bare chain**: SHA-256 alone over messages of the same sizes, each with the digest before it inside, in
  native code;
* **Dynamo**: ``compute_block_hash_for_seq`` of ai-dynamo-runtime, where that is installed (its hashes are its
  own);
* **pure**: the Python definition of this package.

Rounds alternate between the two of a pair, and medians are compared, so that a change of the machine's speed
meets both. A ratio above 1 says how many times faster kvhash is; for the bare chain, how many times slower.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pickle
import platform
import random
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import cbor2
import xxhash

import kvhash
from kvhash.serialize import encode_cbor, encode_pickle5

NUM_TOKENS = 65_536

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
OURS = {"sha256": encode_pickle5, "sha256_cbor": encode_cbor}


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


def _backend(name: str, **options: Any) -> kvhash.BlockHasher:
    os.environ["KVHASH_BACKEND"] = name
    return kvhash.BlockHasher(vllm="0.33.0", hash_seed="0", **options)


def _medians(rounds: int, *works: Callable[[], Any]) -> list[float]:
    """Return the median seconds of each work, run in turn."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for work, seen in zip(works, times, strict=True):
            start = time.perf_counter()
            work()
            seen.append(time.perf_counter() - start)
    return [statistics.median(seen) for seen in times]


def _tokens(vocabulary: int, count: int = NUM_TOKENS) -> list[int]:
    generator = random.Random(vocabulary)
    return [generator.randrange(vocabulary) for _ in range(count)]


def _line(*cells: Any) -> None:
    widths = (12, 6, 11, 26, 12, 12, 8)
    print("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())


def _row(
    algorithm: str,
    block: int,
    vocabulary: Any,
    what: str,
    ours: float,
    theirs: float,
    *,
    slower: bool = False,
) -> None:
    ratio = ours / theirs if slower else theirs / ours
    _line(
        algorithm,
        block,
        vocabulary,
        what,
        f"{ours * 1e3:.3f} ms",
        f"{theirs * 1e3:.3f} ms",
        f"{ratio:.2f}x",
    )


def _against_bare(rounds: int) -> None:
    from kvhash import _native

    for algorithm in ("sha256_cbor", "sha256"):
        for block in (16, 32, 256):
            for vocabulary in (24, 32_000, 152_000):
                tokens = _tokens(vocabulary)
                buffer = array("I", tokens)
                hasher = _backend("native", algorithm=algorithm, block_size=block)
                lengths = [
                    len(OURS[algorithm]((bytes(32), tuple(tokens[i : i + block]), None)))
                    for i in range(0, len(tokens), block)
                ]
                ours, theirs = _medians(
                    rounds,
                    lambda: hasher.hash_tokens(buffer),  # noqa: B023
                    lambda: _native.bare_sha256_chain(lengths),  # noqa: B023
                )
                _row(algorithm, block, vocabulary, "bare chain (buffer)", ours, theirs, slower=True)


def _against_vllm(rounds: int) -> None:
    for algorithm in VLLM:
        for block, vocabulary in ((16, 24), (16, 32_000), (16, 152_000), (32, 152_000), (256, 152_000)):
            tokens = _tokens(vocabulary)
            hasher = _backend("native", algorithm=algorithm, block_size=block)
            pure = _backend("python", algorithm=algorithm, block_size=block)
            expected = hasher.hash_tokens(tokens)
            for theirs_too in (as_vllm_does, as_vllms_hasher_does):
                if theirs_too(algorithm, hasher.none_hash, tokens, block) != expected:
                    sys.exit(f"{algorithm}: the hashes differ")
            ours, theirs, around, defined = _medians(
                max(3, rounds // 8),
                lambda: hasher.hash_tokens(tokens),  # noqa: B023
                lambda: as_vllm_does(algorithm, hasher.none_hash, tokens, block),  # noqa: B023
                lambda: as_vllms_hasher_does(algorithm, hasher.none_hash, tokens, block),  # noqa: B023
                lambda: pure.hash_tokens(tokens),  # noqa: B023
            )
            _row(algorithm, block, vocabulary, "vLLM hash call (list)", ours, theirs)
            _row(algorithm, block, vocabulary, "vLLM hasher (list)", ours, around)
            if vocabulary == 152_000:
                _row(algorithm, block, vocabulary, "pure Python path (list)", ours, defined)


def _against_dynamo(rounds: int) -> None:
    try:
        from dynamo._core import compute_block_hash_for_seq
    except ImportError:
        print("Dynamo: ai-dynamo-runtime is not installed (pip install ai-dynamo-runtime)")
        return
    for algorithm in ("sha256", "sha256_cbor", "xxhash"):
        for block in (16, 32, 256):
            tokens = _tokens(152_000)
            hasher = _backend("native", algorithm=algorithm, block_size=block)
            ours, theirs = _medians(
                rounds,
                lambda: hasher.hash_tokens(tokens),  # noqa: B023
                lambda: compute_block_hash_for_seq(tokens, block),  # noqa: B023
            )
            _row(algorithm, block, 152_000, "Dynamo (list)", ours, theirs)


def _batches(rounds: int) -> None:
    for algorithm in ("sha256", "sha256_cbor"):
        hasher = _backend("native", algorithm=algorithm, block_size=16)
        for count in (1, 8, 64):
            prompts = [_tokens(152_000 + i, 4096) for i in range(count)]
            for kind, given in (("lists", prompts), ("buffers", [array("I", prompt) for prompt in prompts])):
                two, one = _medians(
                    rounds,
                    lambda: hasher.hash_batch(given, threads=2),  # noqa: B023
                    lambda: hasher.hash_batch(given, threads=1),  # noqa: B023
                )
                _row(algorithm, 16, 152_000, f"{count} {kind}, 1 thread", two, one)


def _appends() -> None:
    hasher = _backend("native", algorithm="sha256_cbor", block_size=16)
    long, short = hasher.chain(_tokens(152_000, 100_000)), hasher.chain(_tokens(152_000, 100))
    ours, theirs = _medians(20_001, lambda: long.append([1]), lambda: short.append([1]))
    _row("sha256_cbor", 16, 152_000, "append: 100,000 to 100", ours, theirs, slower=True)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _describe() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            text = file.read()
        processor = next(
            line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")
        )
        sha = "with SHA-NI" if " sha_ni" in text else "without SHA-NI"
    except (OSError, StopIteration):
        processor, sha = platform.processor() or platform.machine(), "SHA extensions unknown"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    libraries = [f"{name} {_version(name)}" for name in ("cbor2", "xxhash", "ai-dynamo-runtime")]
    return (
        f"{processor}, {os.cpu_count()} processors, {sha}\n"
        f"kvhash {kvhash.__version__} at commit {commit or 'unknown'}; python {platform.python_version()}; "
        f"{', '.join(libraries)}"
    )


_ROWS = 0


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=41, help="rounds of a pair; medians are compared")
    rounds = max(3, parser.parse_args().rounds)
    print(_describe())
    print(f"{NUM_TOKENS} tokens where not said otherwise\n")
    _line("algorithm", "block", "vocabulary", "compared with", "kvhash", "peer", "ratio")
    for table in (_against_bare, _against_vllm, _against_dynamo, _batches):
        table(rounds)
    _appends()


if __name__ == "__main__":
    main()
