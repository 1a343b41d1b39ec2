"""Ratios of our pure Python path to what vLLM itself does for the same blocks, in one run (`make bench`).

The peer is the call that vLLM makes for each block: ``cbor2.dumps(..., canonical=True)`` or ``pickle.dumps(...,
protocol=5)`` of (parent, tokens, None), then hashlib or xxhash. Rounds alternate between peer and ours, and medians
are compared, so that a change of the machine's speed meets both.
"""

from __future__ import annotations

import hashlib
import pickle
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import cbor2
import xxhash

import kvhash

NUM_TOKENS = 100_000
ROUNDS = 5

_Serialize = Callable[[Any], bytes]
PEERS: dict[str, tuple[_Serialize, _Serialize]] = {
    "sha256": (lambda value: pickle.dumps(value, protocol=5), lambda data: hashlib.sha256(data).digest()),
    "sha256_cbor": (
        lambda value: cbor2.dumps(value, canonical=True),
        lambda data: hashlib.sha256(data).digest(),
    ),
    "xxhash": (lambda value: pickle.dumps(value, protocol=5), xxhash.xxh3_128_digest),
    "xxhash_cbor": (lambda value: cbor2.dumps(value, canonical=True), xxhash.xxh3_128_digest),
}


def peer(algorithm: str, root: Any, tokens: list[int], block_size: int) -> list[bytes]:
    """Hash as vLLM does, block by block."""
    serialize, digest = PEERS[algorithm]
    hashes, parent = [], root
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = digest(serialize((parent, tuple(tokens[start : start + block_size]), None)))
        hashes.append(parent)
    return hashes


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def commit() -> str:
    """Return the commit that is checked out, or "unknown"."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def machine() -> str:
    """Return the processor's name."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    """Print the table."""
    print(
        f"machine: {machine()}; python {platform.python_version()}; cbor2 {_version('cbor2')}; commit {commit()}"
    )
    print(
        f"kvhash {kvhash.__version__} (backend: {kvhash.backend()}); {NUM_TOKENS} tokens, median of {ROUNDS} rounds"
    )
    print(
        f"{'algorithm':<12} {'block':>5} {'vocabulary':>10} {'vLLM call':>10} {'kvhash':>10} {'kvhash/vLLM':>12}"
    )
    generator = random.Random(0)
    for algorithm in PEERS:
        for block_size, vocabulary in ((16, 24), (16, 32_000), (16, 152_000), (256, 152_000)):
            tokens = [generator.randrange(vocabulary) for _ in range(NUM_TOKENS)]
            hasher = kvhash.BlockHasher(
                vllm="0.33.0", algorithm=algorithm, block_size=block_size, hash_seed="0"
            )
            theirs, ours = [], []
            for _ in range(ROUNDS):
                seconds, expected = _timed(lambda: peer(algorithm, hasher.none_hash, tokens, block_size))  # noqa: B023
                theirs.append(seconds)
                seconds, got = _timed(lambda: hasher.hash_tokens(tokens))  # noqa: B023
                ours.append(seconds)
                if got != expected:
                    sys.exit(f"{algorithm}: the hashes differ")
            a, b = statistics.median(theirs), statistics.median(ours)
            cells = f"{algorithm:<12} {block_size:>5} {vocabulary:>10}"
            print(f"{cells} {a * 1e3:>7.1f} ms {b * 1e3:>7.1f} ms {b / a:>11.2f}x")


def _version(name: str) -> str:
    from importlib.metadata import version

    return version(name)


if __name__ == "__main__":
    main()
