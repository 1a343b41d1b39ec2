"""Event lines as Python answers them, and payloads to try decoders on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec

from kvhash import KvHashError
from kvhash.events import decode_batch
from kvhash.events.lines import batch_object

__all__ = ["damaged_payloads", "python_answer", "recorded_payloads", "sglang_payloads"]

_DATA = Path(__file__).parents[1] / "data"


def python_answer(payload: bytes) -> dict[str, Any]:
    """Return what an event line with this payload is answered, without ``id``; an error by its code alone."""
    try:
        batch = decode_batch(payload)
    except KvHashError as error:
        return {"error": error.code}
    line = batch_object(batch)
    for event in line["events"]:
        if "undecodable" in event:
            del event["message"]  # it is for people; the place is what is promised
    return {"batch": line}


def recorded_payloads() -> list[bytes]:
    """Return every batch that vLLM's own structs wrote, of each release, and those a real server published."""
    payloads = [
        bytes.fromhex(json.loads(line)["payload"])
        for path in sorted((_DATA / "wire").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    for path in sorted((_DATA / "captures").glob("*.json")):
        payloads += [bytes.fromhex(frame[2]) for frame in json.loads(path.read_bytes())["frames"]]
    return payloads


def sglang_payloads() -> list[bytes]:
    """Return batches in SGLang's shapes, and mixed or odd ones that are still readable."""
    stored = ["BlockStored", [-5, 2**63], None, [1, 2], 2, None]
    named = {"block_hashes": [7], "parent_block_hash": 9, "token_ids": [[1, 2], [2, 3]], "block_size": 2}
    batches: list[Any] = [
        [1.5, [stored, ["BlockRemoved", [-5]], ["AllBlocksCleared"]], 0],
        [1.5, [[*stored, "GPU", {"cache_salt": "s", "group_idx": 1}]]],
        {"ts": 1.0, "events": [{"type": "BlockStored", **named}], "attn_dp_rank": 3},
        {"ts": 1, "events": [], "data_parallel_rank": None, "attn_dp_rank": 3, "more": {"a": 1.5}},
        [
            2,
            [{"type": "BlockStored", **named, "cache_salt": "x", "future": [b"\x01", 2.5, None]}, stored],
            None,
            "more",
        ],
        [1.0, [["Compressed", 1, 2], {"type": "Other", "x": 1}, {"type": "AllBlocksCleared", "y": 2}], 1],
        [
            1.0,
            [
                {"type": "BlockStored", **named, "token_ids": [1.0, 2]},
                ["BlockRemoved", [True]],
                5,
                [],
                {},
                [3],
            ],
        ],
        [
            1.0,
            [
                {"type": "BlockStored", **named, "block_hashes": [1, b"12345678"]},
                ["BlockRemoved", [b"1234567"]],
            ],
        ],
        [1.0, [{"type": "BlockStored", **named, "block_size": -1}, ["BlockStored", [1], None]]],
        [True, []],
        [1.0],
        [1.0, {}],
        [1.0, [], 1.5],
        "text",
        {"events": []},
        None,
    ]
    return [b"", *map(msgspec.msgpack.encode, batches)]


def damaged_payloads(payloads: list[bytes], count: int, seed: int) -> list[bytes]:
    """Return payloads with a byte changed, cut off, put in or taken out."""
    rng = random.Random(seed)
    damaged = []
    for _ in range(count):
        data = bytearray(rng.choice(payloads))
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            place = rng.randrange(len(data))
            match rng.randrange(4):
                case 0 | 1:
                    data[place] = rng.choice(
                        (rng.randrange(256), 0xC0, 0xC1, 0xCB, 0x90, 0x80, 0xD9, 0xC4, 0xFF)
                    )
                case 2:
                    del data[place : place + rng.randrange(1, 4)]
                case _:
                    data[place:place] = rng.randbytes(1)
            if not data:
                data = bytearray(b"\x00")
        damaged.append(bytes(data))
    return damaged
