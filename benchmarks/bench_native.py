"""Ratios of the native core to what others do for the same blocks, each pair side by side in one run.

Peers:

* **vLLM hasher**: all that vLLM does for a request's blocks: the slice of the request's token view, the extra keys
  of each kind (none here), the tuple, the hash function by its name, its serialization and its digest;
* **vLLM hash call**: of that only the serialization (``cbor2.dumps(..., canonical=True)`` or ``pickle.dumps``) of
  (parent, tokens, None) and the digest (hashlib or xxhash);
* **bare chain**: SHA-256 alone over messages of the same sizes, each with the digest before it inside, in native
  code; **padded**: the same in place and padded beforehand, the least that a chain can cost on this machine;
* **Dynamo**: ``compute_block_hash_for_seq`` of ai-dynamo-runtime, where that is installed (its hashes are its own
  and not chained);
* **pure**: the Python definition of this package.

Rounds alternate between the works of a row, and medians are compared, so that a change of the machine's speed meets
all. What runs on one thread is measured in that thread's processor time, so that other processes do not count. What
runs on two is measured by the clock, beside two bare chains on two threads: **limit** says how these scaled, and
rounds in which they did not, because the second processor was busy, are left out as long as enough others are left.
The processor time of both threads together, against that of one thread, says what dividing the work costs.

A ratio above 1 says how many times faster kvhash is; for the bare chain and for processor time, how many times more it
takes. Where vLLM is the peer, **limit** is the ratio that a kvhash would have that takes no time but SHA-256's: the
padded chain's. The last table sets what the project asks of itself beside what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from peers import VLLM, as_vllm_does, as_vllms_hasher_does, dynamo

import kvhash
from kvhash.serialize import encode_cbor, encode_pickle5

NUM_TOKENS = 65_536
VOCABULARIES = (24, 32_000, 152_000)
BLOCKS = (16, 32, 256)
#: Two bare chains that scale so far had two processors.
FREE = 1.8
#: The longest that a row waits for rounds in which both processors are free.
PATIENCE = 20.0
WRITERS = {"sha256": encode_pickle5, "sha256_cbor": encode_cbor}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison: seconds of both for the same work, and the ratio that the words of `peer` ask for."""

    algorithm: str
    block: int
    vocabulary: int
    prompts: int
    given: str
    peer: str
    ours: float
    theirs: float
    ratio: float
    limit: float | None = None

    def __str__(self) -> str:
        limit = "" if self.limit is None else f"{self.limit:.2f}x"
        cells = (
            self.algorithm, self.block, self.vocabulary, self.prompts, self.given, self.peer,
            f"{self.ours * 1e3:.3f} ms", f"{self.theirs * 1e3:.3f} ms", f"{self.ratio:.2f}x", limit,
        )  # fmt: skip
        return _aligned(*cells)


def _aligned(*cells: Any) -> str:
    widths = (11, 5, 10, 7, 7, 27, 10, 11, 8, 6)
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def _backend(name: str, **options: Any) -> kvhash.BlockHasher:
    os.environ["KVHASH_BACKEND"] = name
    return kvhash.BlockHasher(vllm="0.33.0", hash_seed="0", **options)


def _medians(rounds: int, *works: Callable[[], Any]) -> list[float]:
    """Return the median seconds of processor time of each work, run in turn."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for work, seen in zip(works, times, strict=True):
            start = time.thread_time()
            work()
            seen.append(time.thread_time() - start)
    return [statistics.median(seen) for seen in times]


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _tokens(vocabulary: int, count: int = NUM_TOKENS) -> list[int]:
    generator = random.Random(vocabulary)
    return [generator.randrange(vocabulary) for _ in range(count)]


def _lengths(algorithm: str, tokens: list[int], block: int) -> list[int]:
    """Return the length of each preimage."""
    write = WRITERS[algorithm]
    return [len(write((bytes(32), tuple(tokens[i : i + block]), None))) for i in range(0, len(tokens), block)]


class Bench:
    """The comparisons; each prints its rows as it goes."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.rows: list[Row] = []
        from kvhash import _native

        self._bare = _native.bare_sha256_chain

    def _add(self, algorithm: str, block: int, vocabulary: int, **rest: Any) -> None:
        rest.setdefault("prompts", 1)
        row = Row(algorithm=algorithm, block=block, vocabulary=vocabulary, **rest)
        self.rows.append(row)
        print(row, flush=True)

    def bare(self) -> None:
        """From a uint32 buffer, against SHA-256 alone."""
        for algorithm in ("sha256_cbor", "sha256"):
            for block in BLOCKS:
                for vocabulary in VOCABULARIES:
                    tokens = _tokens(vocabulary)
                    buffer = array("I", tokens)
                    hasher = _backend("native", algorithm=algorithm, block_size=block)
                    lengths = _lengths(algorithm, tokens, block)
                    ours, plain, padded = _medians(
                        self.rounds,
                        lambda: hasher.hash_tokens(buffer),  # noqa: B023
                        lambda: self._bare(lengths),  # noqa: B023
                        lambda: self._bare(lengths, padded=True),  # noqa: B023
                    )
                    for peer, theirs in (("bare chain", plain), ("bare chain, padded", padded)):
                        self._add(
                            algorithm, block, vocabulary,
                            given="buffer", peer=peer, ours=ours, theirs=theirs, ratio=ours / theirs,
                        )  # fmt: skip

    def vllm(self) -> None:
        """From a list, against vLLM and the pure path."""
        for algorithm in VLLM:
            for block, vocabulary in (*((16, size) for size in VOCABULARIES), (32, 152_000), (256, 152_000)):
                tokens = _tokens(vocabulary)
                hasher = _backend("native", algorithm=algorithm, block_size=block)
                pure = _backend("python", algorithm=algorithm, block_size=block)
                expected = hasher.hash_tokens(tokens)
                for theirs_too in (as_vllm_does, as_vllms_hasher_does):
                    if theirs_too(algorithm, hasher.none_hash, tokens, block) != expected:
                        sys.exit(f"{algorithm}: the hashes differ")
                lengths = _lengths(algorithm, tokens, block) if algorithm in WRITERS else []
                ours, whole, call, defined, padded = _medians(
                    max(5, self.rounds // 4),
                    lambda: hasher.hash_tokens(tokens),  # noqa: B023
                    lambda: as_vllms_hasher_does(algorithm, hasher.none_hash, tokens, block),  # noqa: B023
                    lambda: as_vllm_does(algorithm, hasher.none_hash, tokens, block),  # noqa: B023
                    lambda: pure.hash_tokens(tokens),  # noqa: B023
                    lambda: self._bare(lengths, padded=True),  # noqa: B023
                )
                for peer, theirs in (("vLLM hasher", whole), ("vLLM hash call", call), ("pure", defined)):
                    self._add(
                        algorithm, block, vocabulary,
                        given="list", peer=peer, ours=ours, theirs=theirs, ratio=theirs / ours,
                        limit=theirs / padded if lengths else None,
                    )  # fmt: skip

    def dynamo(self) -> None:
        """From a list, against Dynamo's private hashes."""
        peer = dynamo()
        if peer is None:
            print("Dynamo: ai-dynamo-runtime is not installed (pip install ai-dynamo-runtime)")
            return
        for algorithm in ("sha256_cbor", "sha256", "xxhash"):
            for block in BLOCKS:
                tokens = _tokens(152_000)
                hasher = _backend("native", algorithm=algorithm, block_size=block)
                ours, theirs = _medians(
                    self.rounds,
                    lambda: hasher.hash_tokens(tokens),  # noqa: B023
                    lambda: peer(tokens, block),  # noqa: B023
                )
                self._add(
                    algorithm, block, 152_000,
                    given="list", peer="Dynamo", ours=ours, theirs=theirs, ratio=theirs / ours,
                )  # fmt: skip

    def batches(self) -> None:
        """Many prompts in one call, over two threads against one, beside two bare chains on two threads."""
        for algorithm in ("sha256_cbor", "sha256"):
            hasher = _backend("native", algorithm=algorithm, block_size=16)
            for count in (1, 8, 64):
                prompts = [_tokens(152_000 + i, 4096) for i in range(count)]
                for given, batch in (("lists", prompts), ("buffers", [array("I", ids) for ids in prompts])):
                    two, one, limit, spent, alone = self._on_two_threads(
                        lambda threads: hasher.hash_batch(batch, threads=threads),  # noqa: B023
                        lengths=[117] * (128 * count),
                    )
                    self._add(
                        algorithm, 16, 152_000, prompts=count,
                        given=given, peer="kvhash on one thread", ours=two, theirs=one, ratio=one / two, limit=limit,
                    )  # fmt: skip
                    self._add(
                        algorithm, 16, 152_000, prompts=count,
                        given=given, peer="its processor time on one", ours=spent, theirs=alone, ratio=spent / alone,
                    )  # fmt: skip

    def _on_two_threads(
        self, work: Callable[[int], Any], *, lengths: list[int]
    ) -> tuple[float, float, float, float, float]:
        """Return the median seconds of `work` on two threads and on one, and how two bare chains scaled meanwhile.

        Last the processor time of both threads together and of the one.
        """

        def bare() -> None:
            self._bare(lengths, padded=True)

        def bare_twice() -> None:
            other = threading.Thread(target=bare)
            other.start()
            bare()
            other.join()

        seen: list[tuple[float, float, float, float, float]] = []
        started = time.monotonic()
        while len(seen) < 5 * self.rounds and time.monotonic() - started < PATIENCE:
            before = _seconds(bare) / _seconds(bare_twice)
            processor = time.process_time()
            two = _seconds(lambda: work(2))
            spent, processor = time.process_time() - processor, time.process_time()
            one = _seconds(lambda: work(1))
            alone = time.process_time() - processor
            scaled = 2 * min(before, _seconds(bare) / _seconds(bare_twice))
            seen.append((two, one, scaled, spent, alone))
            if sum(scaled >= FREE for _, _, scaled, _, _ in seen) >= self.rounds:
                break
        free = [times for times in seen if times[2] >= FREE]
        kept = free if len(free) >= 3 else seen
        two, one, scaled, spent, alone = (statistics.median(column) for column in zip(*kept, strict=True))
        return two, one, scaled, spent, alone

    def appends(self) -> None:
        """One token to a long chain, against one to a short chain."""
        hasher = _backend("native", algorithm="sha256_cbor", block_size=16)
        long, short = hasher.chain(_tokens(152_000, 100_000)), hasher.chain(_tokens(152_000, 100))
        ours, theirs = _medians(20_001, lambda: long.append([1]), lambda: short.append([1]))
        self._add(
            "sha256_cbor", 16, 152_000,
            given="list", peer="a chain of 100 tokens", ours=ours, theirs=theirs, ratio=ours / theirs,
        )  # fmt: skip

    def floors(self) -> None:
        """Set what the project asks of itself beside what was measured."""
        print(f"\n{'asked, at block 16 and 152,000 token ids':<66}  {'asked':>8}  {'here':>7}  {'limit':>6}")
        for text, algorithm, given, peer, prompts, asked, at_most in FLOORS:
            row = next(
                (
                    row
                    for row in self.rows
                    if (row.algorithm, row.block, row.vocabulary, row.given, row.peer, row.prompts)
                    == (algorithm, 16, 152_000, given, peer, prompts)
                ),
                None,
            )
            if row is None:
                print(f"{text:<66}  not measured")
                continue
            met = row.ratio <= asked if at_most else row.ratio >= asked
            sign = "<=" if at_most else ">="
            limit = "" if row.limit is None else f"{row.limit:.2f}x"
            verdict = "met" if met else "MISSED"
            if not met and row.limit is not None and row.limit < asked:
                verdict = "not to be told here: SHA-256 alone does not reach it"
            print(f"{text:<66}  {sign} {asked:>4}x  {row.ratio:>6.2f}x  {limit:>6}  {verdict}")


#: What is asked: text, the row that answers, the ratio, and whether it is the most or the least.
FLOORS: tuple[tuple[str, str, str, str, int, float, bool], ...] = (
    ("sha256_cbor from a uint32 buffer, to the bare chain", "sha256_cbor", "buffer", "bare chain", 1, 1.4, True),
    ("sha256 from a uint32 buffer, to the bare chain", "sha256", "buffer", "bare chain", 1, 1.6, True),
    ("sha256 from a list, to vLLM's hasher", "sha256", "list", "vLLM hasher", 1, 10, False),
    ("sha256_cbor from a list, to vLLM's hasher", "sha256_cbor", "list", "vLLM hasher", 1, 20, False),
    ("sha256 from a list, to vLLM's hash call alone", "sha256", "list", "vLLM hash call", 1, 10, False),
    ("sha256_cbor from a list, to vLLM's hash call alone", "sha256_cbor", "list", "vLLM hash call", 1, 20, False),
    ("sha256_cbor from a list, to Dynamo", "sha256_cbor", "list", "Dynamo", 1, 1, False),
    ("sha256 from a list, to Dynamo", "sha256", "list", "Dynamo", 1, 1, False),
    ("64 lists of 4,096, two threads to one", "sha256_cbor", "lists", "kvhash on one thread", 64, 1.7, False),
    ("64 buffers of 4,096, two threads to one", "sha256_cbor", "buffers", "kvhash on one thread", 64, 1.7, False),
    ("one token to 100,000 tokens, to one to 100", "sha256_cbor", "list", "a chain of 100 tokens", 1, 1.1, True),
)  # fmt: skip


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
        wide = "with AVX-512 VBMI2" if " avx512_vbmi2" in text else "without AVX-512 VBMI2"
    except (OSError, StopIteration):
        processor, sha, wide = (
            platform.processor() or platform.machine(),
            "SHA extensions unknown",
            "vectors unknown",
        )
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    libraries = [f"{name} {_version(name)}" for name in ("cbor2", "xxhash", "ai-dynamo-runtime")]
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    return (
        f"{processor}, {os.cpu_count()} processors, {sha}, {wide}; load before the run {load}\n"
        f"kvhash {kvhash.__version__} at commit {commit or 'unknown'}; python {platform.python_version()}; "
        f"{', '.join(libraries)}"
    )


def main() -> None:
    """Print the tables."""
    tables = ("bare", "vllm", "dynamo", "batches", "appends")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=41, help="rounds of a row; medians are compared")
    parser.add_argument("--only", action="append", choices=tables, help="only this table; may be repeated")
    parser.add_argument("--json", type=Path, help="write the rows here too; benchmarks/plot.py reads them")
    arguments = parser.parse_args()
    about = _describe()
    print(about)
    print(f"{NUM_TOKENS} tokens where not said otherwise\n")
    print(
        _aligned(
            "algorithm",
            "block",
            "vocabulary",
            "prompts",
            "from",
            "compared with",
            "kvhash",
            "peer",
            "ratio",
            "limit",
        )
    )
    bench = Bench(max(3, arguments.rounds))
    for table in arguments.only or tables:
        getattr(bench, table)()
    bench.floors()
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({"about": about, "rows": [asdict(row) for row in bench.rows]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
