"""The index against recordings of vLLM: what it holds and what it says of a prompt is what vLLM's own cache said."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine_ref.trace import _Player
from kvhash import BlockHasher
from kvhash.block_hash import get_block_hash, get_group_id, low64
from kvhash.events.decode import decode_batch
from kvhash.events.records import Batch
from kvhash.events.schema import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, hash_key
from kvhash.index import EngineSettings, GroupSettings, ResidencyIndex, State

from ..data_files import CAPTURES, capture

DATA = Path(__file__).parents[1] / "data"


@cache
def traces() -> list[dict[str, Any]]:
    """Return the recorded cache traces."""
    names = ("cache_traces.json.gz", "cache_traces_special.json.gz")
    files = (json.loads(gzip.decompress((DATA / "engine" / name).read_bytes())) for name in names)
    return [trace for file in files for trace in file["traces"]]


def label(trace: dict[str, Any]) -> str:
    """Name a trace in the test's id."""
    return f"{trace['seed']}-{trace.get('name', '-'.join(group['kind'] for group in trace['groups']))}"


def settings_of(trace: dict[str, Any]) -> EngineSettings:
    """Return what a router knows of the traced engine."""
    dcp = trace.get("dcp_world_size", 1)
    groups = {
        number: GroupSettings(
            block_size=group["block_size"] * (1 if group["kind"] == "mamba" else dcp),
            kind=group["kind"],
            sliding_window=group.get("sliding_window"),
            attention_chunk_size=group.get("attention_chunk_size"),
        )
        for number, group in enumerate(trace["groups"])
    }
    return EngineSettings(
        tokens_per_hash=trace["hash_block_size"], groups=groups, use_eagle=trace.get("use_eagle", False)
    )


def tap(player: _Player) -> list[Any]:
    """Return a list that gets every event which the player's cache gives out."""
    seen: list[Any] = []
    take = player.cache.take_events

    def taken() -> Any:
        events = take()
        seen.extend(events)
        return events

    player.cache.take_events = taken  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("trace", traces(), ids=label)
def test_a_recorded_cache_is_held_and_hit_as_vllm_did(trace: dict[str, Any]) -> None:
    """After every operation the index holds the cache's hash map, and every admission hits what vLLM's did."""
    player = _Player(trace, at="$")
    index = ResidencyIndex(settings={"engine": settings_of(trace)})
    published = tap(player)
    for number, op in enumerate(trace["ops"]):
        if op["op"] == "admit":
            chain = player.hasher.chain(op["tokens"], cache_salt=op.get("salt"))
            found = index.longest_prefix(chain.block_hashes, ["engine"], num_tokens=len(op["tokens"]))
            assert found["engine"].usable_tokens == op["hit_tokens"], f"operation {number}"
        published.clear()
        player.play(op, at="$")
        index.apply("engine", EventBatch(float(number), tuple(published), 0))
        truth = {
            (get_group_id(key), low64(get_block_hash(key))): len(blocks)
            for key, blocks in player.cache.pool.cached_keys.items()
        }
        held = {
            (place.group, key): copies
            for (_, place), blocks in index.holdings("engine").items()
            for key, copies in blocks.items()
        }
        assert held == truth, f"operation {number}"
    assert index.knowledge("engine").exact


@pytest.mark.parametrize("name", CAPTURES)
def test_a_recorded_server_leaves_its_exact_final_set(name: str) -> None:
    """What the index holds at the end is what the published stores and removals leave, and its state is EXACT."""
    recorded = capture(name)
    index = ResidencyIndex()
    left: Counter[int] = Counter()
    for topic, seq, payload in ([bytes.fromhex(part) for part in frame] for frame in recorded["frames"]):
        batch = decode_batch(payload)
        number = int.from_bytes(seq, "big")
        index.apply_record("vllm", Batch("e", batch.data_parallel_rank, number, topic, 0, batch, payload))
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                left.clear()
            elif isinstance(event, BlockStored):
                left.update(map(hash_key, event.block_hashes))
            elif isinstance(event, BlockRemoved):
                left.subtract(map(hash_key, event.block_hashes))
    held = list(index.holdings("vllm").values())
    assert held == [{key: copies for key, copies in left.items() if copies}]
    assert index.knowledge("vllm").state is State.EXACT
    stats = index.stats()
    assert (stats["removed_unknown"], stats["conflicts"], stats["collisions"]) == (0, 0, 0)


@pytest.mark.parametrize("name", CAPTURES)
def test_a_recorded_servers_last_prompts_are_matched(name: str) -> None:
    """For each recorded prompt the match is the walk over its hashes among those left, block by block."""
    recorded = capture(name)
    hasher = BlockHasher(
        vllm="0.32.0", algorithm=recorded["algo"], hash_seed=recorded["hash_seed"], block_size=32
    )
    index = ResidencyIndex()
    for frame in recorded["frames"]:
        index.apply("vllm", decode_batch(bytes.fromhex(frame[2])))
    held = {key for blocks in index.holdings("vllm").values() for key in blocks}
    matched = 0
    for request in recorded["requests"]:
        if "prompt" not in request:
            continue
        lora = {"name": "sql", "path": "adapters/sql", "id": 1} if request.get("model") == "sql" else None
        hashes = hasher.chain(
            request["prompt"] + request["out"], lora=lora, cache_salt=request.get("cache_salt")
        ).block_hashes
        walk = next((i for i, value in enumerate(hashes) if low64(value) not in held), len(hashes))
        assert index.longest_prefix(hashes)["vllm"].blocks == walk
        matched += walk
    assert matched > 0
