"""Ratios of the native event decoder to msgspec and the Python around it, side by side in one run.

The batch is an engine step's: one `BlockStored` of 2 blocks of 16 tokens, as a map (vLLM 0.24 and newer). Peers:

* **msgspec**: a typed decode into structs with vLLM's fields, then per block the Python work to
  ``(hash, parent, tokens)``, which an index or a checker starts from;
* **msgspec decode**: the typed decode alone;
* **decode_batch**: this package's own values, on either backend.

Ours: `raw_decoder`, whose batch is the payload, checked as a whole, with each field decoded when it is looked
at; then with the event objects made, with the keys of the hashes, and with a triple per block, the tokens as
views. Rounds alternate between all of them and medians are compared.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

import kvhash
from kvhash.events import BlockStored, EventBatch, decode_batch, encode_batch, raw_decoder

BLOCKS, BLOCK_SIZE, VOCABULARY = 2, 16, 151_936
CALLS = 400


class _Event(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """As an engine's consumers declare the events."""


class _Stored(_Event, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class _Removed(_Event, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class _Cleared(_Event, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[_Stored | _Removed | _Cleared]
    data_parallel_rank: int | None = None


_decode = msgspec.msgpack.Decoder(_Batch).decode


def as_consumers_do(payload: bytes) -> list[Any]:
    """Decode with msgspec, and make ``(hash, parent, tokens)`` of each block."""
    blocks = []
    for event in _decode(payload).events:
        if type(event) is _Stored:
            parent, size, tokens = event.parent_block_hash, event.block_size, event.token_ids
            for i, value in enumerate(event.block_hashes):
                blocks.append((value, parent, tuple(tokens[i * size : (i + 1) * size])))
                parent = value
    return blocks


def make_payload(rng: random.Random, *, fields: bool = True) -> bytes:
    """Return the message of one step; `fields`: with the fields that engines with one group set."""
    event = BlockStored(
        tuple(rng.getrandbits(64) for _ in range(BLOCKS)),
        rng.getrandbits(64),
        tuple(rng.randrange(VOCABULARY) for _ in range(BLOCKS * BLOCK_SIZE)),
        BLOCK_SIZE,
        medium="GPU",
        extra_keys=(None,) * BLOCKS if fields else None,
        group_idx=0 if fields else None,
        kv_cache_spec_kind="full_attention" if fields else None,
    )
    return encode_batch(EventBatch(1.7e9 + rng.random(), (event,), 0), "0.33.0")


def _medians(rounds: int, payloads: list[bytes], works: list[Callable[[bytes], Any]]) -> list[float]:
    """Return the median seconds per payload of each work, run in turn."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for work, seen in zip(works, times, strict=True):
            started = time.perf_counter()
            for payload in payloads:
                work(payload)
            seen.append((time.perf_counter() - started) / len(payloads))
    return [statistics.median(seen) for seen in times]


def _commit() -> str:
    ran = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=os.path.dirname(__file__),
    )
    return ran.stdout.strip() or "unknown"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit 1 where decoding into event objects is less than 5 times faster",
    )
    options = parser.parse_args()
    decode = raw_decoder()
    rng = random.Random(1)
    print(
        f"# {platform.processor() or platform.machine()}, Python {platform.python_version()}, "
        f"msgspec {msgspec.__version__}, kvhash {kvhash.__version__} ({kvhash.backend()}), commit {_commit()}"
    )
    print(f"# load before this run: {' '.join(f'{load:.1f}' for load in os.getloadavg())}")
    print(
        f"# batches of one event: {BLOCKS} blocks of {BLOCK_SIZE} tokens, map form; medians of {options.rounds} rounds"
    )
    works: dict[str, Callable[[bytes], Any]] = {
        "msgspec decode, then (hash, parent, tokens) per block": as_consumers_do,
        "msgspec decode alone": _decode,
        "decode_batch": decode_batch,
        "raw decode": decode,
        "raw decode, the event objects": lambda payload: decode(payload).events,
        "raw decode, the keys of its hashes": lambda payload: [
            event.keys() for event in decode(payload).events
        ],
        "raw decode, (hash, parent, token view) per block": lambda payload: decode(payload).blocks(),
    }
    slow = False
    for fields in (True, False):
        payloads = [make_payload(rng, fields=fields) for _ in range(CALLS)]
        for payload in payloads[:20]:
            ours = [(value, parent, tuple(tokens)) for value, parent, tokens in decode(payload).blocks()]
            assert ours == as_consumers_do(payload)
        medians = _medians(options.rounds, payloads, list(works.values()))
        size = sum(map(len, payloads)) / len(payloads)
        title = f"{'all fields set' if fields else 'needed fields only'}, {size:.0f} bytes"
        print(f"\n{title:54} ns/batch   times faster")
        for name, median in zip(works, medians, strict=True):
            print(f"{name:54} {median * 1e9:8.0f}   {medians[0] / median:8.2f}")
        slow |= medians[0] < 5 * medians[list(works).index("raw decode, the event objects")]
    if options.check and slow:
        sys.exit(1)


if __name__ == "__main__":
    main()
