"""Makes the event vectors: batches that each release's own structs wrote, other engines' shapes, hostile frames."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvhash import KvHashError
from kvhash.contract import CHANGES, Contract, Release
from kvhash.events import decode_batch, encode_batch
from kvhash.events.lines import decode_answer

from .record import vector
from .releases import NEWEST_TEXT

__all__ = ["event_answer", "event_shape", "make_events"]

_PER_RELEASE = 30
_pack = msgspec.msgpack.Encoder().encode


def event_answer(payload: bytes) -> dict[str, Any]:
    """Return what a decoder is to answer; ``{"error": {"codes": [...]}}`` where the payload is no batch."""
    try:
        return decode_answer({"decode": payload.hex()})
    except KvHashError as error:
        # Which of these a decoder says depends on how far it reads before it notices.
        general = {"invalid-batch", "invalid-msgpack", "nested-too-deeply"}
        return {"error": {"codes": sorted({error.code, *general})}}


def _shape(batch: dict[str, Any]) -> frozenset[Any]:
    """Return what kinds of events a recorded batch holds: the fields that are set and the kinds of its hashes."""
    found: set[Any] = {("rank", batch["data_parallel_rank"] is None), ("count", min(2, len(batch["events"])))}
    for event in batch["events"]:
        for name, value in event.items():
            kind = sorted(value) if isinstance(value, dict) else type(value).__name__
            first = value[0] if isinstance(value, list) and value else None
            inner = sorted(first) if isinstance(first, dict) else type(first).__name__
            found.add((event["type"], name, str(kind), str(inner)))
        found.add(event_shape(event))
    return frozenset(found)


def event_shape(event: Mapping[str, Any]) -> tuple[str, frozenset[str], str]:
    """Return the type of a recorded event, which of its fields are set, and in which form its hashes are."""
    hashes = event.get("block_hashes") or [None]
    form = "bytes" if isinstance(hashes[0], dict) and "bytes" in hashes[0] else "integer"
    return str(event["type"]), frozenset(name for name, value in event.items() if value is not None), form


def _recorded(data: Path) -> Iterator[dict[str, Any]]:
    event_rows = [c.since for c in CHANGES if c.events or c.stored or c.removed]
    for path in sorted((data / "wire").glob("*.jsonl"), key=lambda p: [int(n) for n in p.stem.split(".")]):
        name = path.stem
        release = Release.parse(name)
        until = next((str(row) for row in event_rows if row > release), None)
        layout = Contract.events_for_vllm(release).layout
        seen: set[Any] = set()
        taken = 0
        for number, line in enumerate(path.read_text().splitlines()):
            record = json.loads(line)
            new = _shape(record) - seen
            if taken >= _PER_RELEASE or (not new and taken >= 6):
                continue
            seen |= new
            taken += 1
            payload = bytes.fromhex(record["payload"])
            written = encode_batch(decode_batch(payload), release) == payload
            flags = [f"event-{layout}", "event-fields", "boundary", *(["event-encode"] if written else [])]
            if record["data_parallel_rank"] is None:
                flags.append("event-rank")
            if any("bytes" in str(e.get("block_hashes")) for e in record["events"]):
                flags.append("event-hash-forms")
            yield vector(
                f"events/recorded-{name}-{number}/{release}",
                f"a batch written by vLLM {name}",
                flags=flags,
                since=str(release),
                until=until,
                input={"payload": payload.hex()},
                expected=event_answer(payload),
                encodes_at=[str(release)] if written else None,
                provenance=f"written by the event structs of vLLM {name}",
            )


def _batch(*events: Any, rank: Any = None, ts: Any = 1.5) -> bytes:
    return _pack([ts, list(events), rank])


_H = [2**63 + 5, 7]
_STORED: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": _H,
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
}
_REMOVED = {"type": "BlockRemoved", "block_hashes": _H, "medium": "GPU"}
_CLEARED = {"type": "AllBlocksCleared"}


def _stored(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**_STORED, **changes}.items() if value is not ...}


def _array(*values: Any) -> list[Any]:
    return ["BlockStored", _H, None, [1, 2, 3, 4], 2, *values]


def _shapes() -> Iterator[tuple[str, list[str], bytes]]:
    """Yield shapes that readers must read, whoever wrote them."""
    for count in range(12):
        rest = [None, "GPU", "sql", [None, None], 0, "full_attention", None, "local", None, None, None, None][
            :count
        ]
        yield f"array-{count + 5}-fields", ["event-array"], _batch(_array(*rest))
    yield "array-more-fields", ["event-array", "event-unknown"], _batch(_array(*[None] * 11, "new", 5, [1]))
    yield "array-removed-1", ["event-array"], _batch(["BlockRemoved", _H])
    yield "array-removed-2", ["event-array"], _batch(["BlockRemoved", _H, "CPU"])
    yield "array-cleared", ["event-array"], _batch(["AllBlocksCleared"])
    yield "array-cleared-more", ["event-array", "event-unknown"], _batch(["AllBlocksCleared", "GPU"])
    yield "map-stored", ["event-map"], _batch(_STORED)
    yield "map-three", ["event-map"], _batch(_STORED, _REMOVED, _CLEARED)
    yield (
        "map-type-last",
        ["event-map"],
        _batch({**{k: v for k, v in _STORED.items() if k != "type"}, "type": "BlockStored"}),
    )
    yield "map-unknown-field", ["event-map", "event-unknown"], _batch(_stored(new_field={"a": [1]}))
    extensions = [msgspec.msgpack.Ext(5, b"abc"), msgspec.msgpack.Ext(-1, bytes.fromhex("65920080"))]
    yield "extension-values", ["event-map", "event-unknown"], _batch(_stored(new_field=extensions))
    yield "map-least-fields", ["event-map"], _batch(_stored(lora_id=..., medium=...))
    yield "mixed-layouts", ["event-map", "event-array"], _batch(_STORED, ["BlockRemoved", _H, "GPU"])
    yield "unknown-tag-map", ["event-unknown"], _batch(_STORED, {"type": "BlockMoved", "to": "CPU"}, _REMOVED)
    yield "unknown-tag-array", ["event-unknown"], _batch(_array(), ["BlockMoved", 1], ["BlockRemoved", _H])
    for slug, tail in (("none", ()), ("nil", (None,)), ("three", (3,)), ("more", (3, "extra"))):
        yield f"rank-{slug}", ["event-rank"], _pack([1.5, [_STORED], *tail])
    yield "empty-batch", ["event-rank"], _pack([1.5, []])
    yield "integer-time", ["event-fields"], _batch(_STORED, ts=3)
    yield "map-batch", ["event-sglang"], _pack({"ts": 1.5, "events": [_STORED], "data_parallel_rank": 1})
    yield "map-batch-attn-rank", ["event-sglang"], _pack({"ts": 1.5, "events": [_STORED], "attn_dp_rank": 1})
    forms: dict[str, list[Any]] = {
        "signed": [-5, 7],
        "unsigned": [2**64 - 1, 0],
        "bytes-32": [bytes(range(32))],
        "bytes-16": [bytes(range(16))],
        "bytes-8": [bytes(range(8))],
        "smallest": [-(2**63)],
    }
    for slug, hashes in forms.items():
        yield (
            f"hash-{slug}",
            ["event-hash-forms"],
            _batch(_stored(block_hashes=hashes, parent_block_hash=hashes[0])),
        )
        yield (
            f"hash-array-{slug}",
            ["event-hash-forms", "event-array"],
            _batch(["BlockRemoved", hashes, "GPU"]),
        )
    for medium in ("gpu", "cpu_pinned", "FOO", "", None):
        yield (
            f"medium-{medium or ('nil' if medium is None else 'empty')}",
            ["event-fields"],
            _batch(_stored(medium=medium)),
        )
    yield "cpu-no-tokens", ["event-fields"], _batch(_stored(token_ids=[], block_size=0, medium="CPU"))
    yield (
        "extra-keys",
        ["event-fields"],
        _batch(_stored(extra_keys=[["sql", ["img-a", -3], "salt", b"\x01" * 32], None])),
    )
    yield "extra-keys-short", ["event-fields"], _batch(_stored(extra_keys=[None]))
    yield "lookahead", ["event-fields"], _batch(_stored(lookahead_token_ids=[[5], [6]]))
    yield "sglang-salt", ["event-sglang"], _batch(_stored(cache_salt="t", extra_keys=...))
    yield "sglang-bigram", ["event-sglang"], _batch(_stored(token_ids=[[1, 2], [2, 3], [3, 4], [4, 5]]))
    yield "sglang-array-7", ["event-sglang"], _batch(_array(None, "GPU", {"group_idx": 1, "session_id": "s"}))
    yield "sglang-array-8", ["event-sglang"], _batch(_array(None, "GPU", None, [None, None]))
    yield "many-events", ["event-map"], _batch(*[_REMOVED] * 20)
    yield (
        "session",
        ["event-fields"],
        _batch(_stored(session_id="s-1", ownership="owner", locality="local", group_idx=2)),
    )


def _bad_events() -> Iterator[tuple[str, bytes]]:
    """Yield batches with an event that cannot be read between two that can."""
    bad: dict[str, Any] = {
        "hashes-mixed": _stored(block_hashes=[5, b"\x01" * 32]),
        "hash-short": _stored(block_hashes=[b"\x01" * 7]),
        "hash-parent-mixed": _stored(parent_block_hash=b"\x02" * 32),
        "hash-text": _stored(block_hashes=["5"]),
        "hash-float": _stored(block_hashes=[5.0]),
        "hash-bool": _stored(block_hashes=[True]),
        "hash-nil": _stored(block_hashes=[None]),
        "hashes-not-list": _stored(block_hashes=5),
        "no-hashes": _stored(block_hashes=...),
        "no-tokens": _stored(token_ids=...),
        "token-text": _stored(token_ids=["a"]),
        "token-float": _stored(token_ids=[1.0]),
        "token-bool": _stored(token_ids=[True]),
        "tokens-some-pairs": _stored(token_ids=[1, [2, 3]]),
        "token-triple": _stored(token_ids=[[1, 2, 3]]),
        "block-size-text": _stored(block_size="2"),
        "block-size-negative": _stored(block_size=-2),
        "block-size-bool": _stored(block_size=True),
        "medium-number": _stored(medium=5),
        "lora-id-text": _stored(lora_id="3"),
        "group-text": _stored(group_idx="0"),
        "extra-keys-text": _stored(extra_keys="x"),
        "extra-keys-item": _stored(extra_keys=["x"]),
        "lookahead-item": _stored(lookahead_token_ids=[5]),
        "type-number": {"type": 5},
        "type-missing": {"block_hashes": [1]},
        "empty-array": [],
        "array-tag-number": [5, _H],
        "number": 5,
        "text": "BlockStored",
        "nil": None,
        "bool": True,
        "array-short": ["BlockStored", _H],
        "array-wrong-place": ["BlockStored", [1, 2, 3, 4], None, _H, "GPU", 2],
        "deep": _deep(60),
    }
    for slug, event in bad.items():
        yield slug, _batch(_STORED, event, _REMOVED)


def _deep(depth: int) -> Any:
    value: Any = {"type": "BlockStored", "block_hashes": []}
    for _ in range(depth):
        value = {"type": "BlockStored", "block_hashes": [value]}
    return value


def _malformed() -> Iterator[tuple[str, bytes]]:
    """Yield payloads that are no batch at all."""
    good = _batch(_STORED, _REMOVED)
    yield "empty", b""
    for cut in (1, 2, 9, 10, 11, 20, len(good) - 1):
        yield f"cut-at-{cut}", good[:cut]
    yield "trailing", good + b"\x00"
    yield "never-used-byte", b"\xc1"
    others: dict[str, Any] = {
        "nil": None,
        "number": 5,
        "text": "batch",
        "one-element": [1.5],
        "events-nil": [1.5, None],
        "events-map": [1.5, {}],
        "events-number": [1.5, 3],
        "time-text": ["now", []],
        "time-nil": [None, []],
        "time-bool": [True, []],
        "rank-text": [1.5, [], "0"],
        "rank-float": [1.5, [], 0.5],
        "map-no-events": {"ts": 1.5},
        "empty-array": [],
        "empty-map": {},
    }
    for slug, value in others.items():
        yield slug, _pack(value)
    yield "array32-huge", b"\x92\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff"
    yield "map32-huge", b"\x92\xcb" + bytes(8) + b"\x91\xdf\xff\xff\xff\xff"
    yield "str32-huge", b"\x92\xcb" + bytes(8) + b"\x91\xdb\xff\xff\xff\xff"
    yield "bin32-huge", b"\x92\xcb" + bytes(8) + b"\x91\xc6\xff\xff\xff\xff"
    yield "nested-batch", b"\x91" * 100000
    yield "rubbish", bytes(range(256))
    yield "json", b'{"ts":1.5,"events":[]}'


def _kind(slug: str, name: str, flags: list[str], payload: bytes) -> dict[str, Any]:
    expected = event_answer(payload)
    return vector(
        f"events/{slug}/{NEWEST_TEXT}",
        name,
        flags=flags,
        since=NEWEST_TEXT,
        result="invalid" if "error" in expected else "valid",
        input={"payload": payload.hex()},
        expected=expected,
    )


def make_events(data: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the event vectors. `data`: the recorded outputs, ``tests/data``."""
    made = list(_recorded(data))
    made += [_kind(f"shape-{slug}", f"shape: {slug}", flags, payload) for slug, flags, payload in _shapes()]
    made += [
        _kind(f"bad-{slug}", f"one bad event: {slug}", ["event-hostile"], payload)
        for slug, payload in _bad_events()
    ]
    made += [
        _kind(f"malformed-{slug}", f"no batch: {slug}", ["event-malformed"], payload)
        for slug, payload in _malformed()
    ]
    return {"events": made}
