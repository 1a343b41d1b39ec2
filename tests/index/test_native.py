"""The native rank is the pure one: the same blocks, counts, signals and answers after any events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhash import BlockHasher
from kvhash._backend import native_module
from kvhash.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventDecodeError,
    UnknownEvent,
    encode_batch,
)
from kvhash.index import EngineSettings, GroupSettings, ResidencyIndex
from kvhash.index.native import NativeRankMap
from kvhash.index.rank import RankMap
from kvhash.index.types import DEFAULT_TIERS

from ..interop.toolchain import need

SIZE = 4
HASHER = BlockHasher(vllm="0.33.0", algorithm="sha256_cbor", block_size=SIZE, hash_seed="0")
#: Prompts that share beginnings: 0..., then a branch.
PROMPTS = [[*range(24), *range(100 * i, 100 * i + 24)][: 24 + 8 * i] for i in range(4)]
CHAINS = [HASHER.hash_tokens(prompt) for prompt in PROMPTS]
KINDS = [None, "full_attention", "sliding_window", "mamba", "chunked_local_attention", "new_kind"]


@pytest.fixture(scope="module")
def module() -> Any:
    """Return the native module; it is required where Rust is."""
    found = native_module()
    if found is None:
        need("a build of kvhash._native")
    return found


def form(value: bytes, number: int) -> Any:
    """Return a hash as an engine may publish it: unsigned, signed or whole."""
    low = int.from_bytes(value[-8:], "big")
    return (low, low - (1 << 64) if low >> 63 else low, bytes(value))[number]


@st.composite
def stored(draw: st.DrawFn) -> BlockStored:
    """Draw a store: part of a prompt, whole blocks or coarse ones, sparse, without tokens, with wrong parents."""
    which = draw(st.integers(0, len(CHAINS) - 1))
    factor = draw(st.sampled_from([1, 1, 1, 2, 3]))
    chain = CHAINS[which][factor - 1 :: factor]
    first = draw(st.integers(0, len(chain) - 1))
    count = draw(st.integers(0, min(4, len(chain) - first)))
    hash_form = draw(st.sampled_from([0, 0, 1, 2]))
    hashes = [form(value, hash_form) for value in chain[first : first + count]]
    parent = form(chain[first - 1], hash_form) if first else None
    tokens = PROMPTS[which][first * SIZE * factor : (first + count) * SIZE * factor]
    how = draw(st.sampled_from(["whole", "whole", "whole", "no tokens", "sparse", "lost parent", "self"]))
    if how == "no tokens":
        tokens = []
    elif how == "sparse" and count > 1:
        hashes = hashes[1:]
    elif how == "lost parent":
        parent = None if draw(st.booleans()) else form(chain[-1], hash_form)
    elif how == "self" and hashes:
        parent = hashes[0]
    group = draw(st.sampled_from([None, 0, 1, 2]))
    return BlockStored(
        tuple(hashes),
        parent,
        tuple(tokens),
        0 if how == "no tokens" else SIZE * factor,
        medium=draw(st.sampled_from([None, "GPU", "gpu", "CPU", "cpu_pinned", "DISK", "TAPE"])),
        group_idx=group,
        kv_cache_spec_kind=draw(st.sampled_from(KINDS)),
        kv_cache_spec_sliding_window=draw(st.sampled_from([None, 8, 12])),
        locality=draw(st.sampled_from([None, None, "LOCAL", "REMOTE"])),
        lora_name=draw(st.sampled_from([None, None, None, "a"])),
        extra_keys=draw(st.sampled_from([None, None, (("k",),) * len(hashes)])),
    )


@st.composite
def removed(draw: st.DrawFn) -> BlockRemoved:
    """Draw a removal of some blocks of a prompt."""
    chain = draw(st.sampled_from(CHAINS))
    chosen = draw(st.lists(st.sampled_from(chain), max_size=3))
    number = draw(st.sampled_from([0, 1, 2]))
    return BlockRemoved(
        tuple(form(value, number) for value in chosen),
        medium=draw(st.sampled_from([None, "GPU", "CPU"])),
        group_idx=draw(st.sampled_from([None, 0, 1])),
    )


EVENTS = st.one_of(stored(), stored(), stored(), removed(), st.just(AllBlocksCleared()))
HASHING = {"vllm": "0.33.0", "algorithm": "sha256_cbor", "block_size": SIZE, "hash_seed": "0"}
SETTINGS = st.builds(
    EngineSettings,
    tokens_per_hash=st.sampled_from([None, SIZE]),
    groups=st.sampled_from(
        [
            {},
            {0: GroupSettings(block_size=SIZE)},
            {1: GroupSettings(block_size=8, kind="chunked_local_attention", attention_chunk_size=16)},
            {2: GroupSettings(block_size=8, kind="mamba")},
        ]
    ),
    use_eagle=st.booleans(),
    offload_chunk_blocks=st.sampled_from([None, None, 2]),
    reports_reuse=st.booleans(),
    hashing=st.sampled_from([None, HASHING]),
)


def seen(rank: RankMap) -> Any:
    """Return all that shows of a rank, blocks in any order."""
    dumped = json.loads(json.dumps(rank.dump(), default=bytes.hex))
    dumped["places"] = sorted([place, sorted(blocks, key=str)] for place, blocks in dumped["places"])
    dumped["groups"] = sorted(dumped["groups"])
    dumped["counts"] = {name: count for name, count in dumped["counts"].items() if count}
    return dumped, rank.size, rank.fullest, rank.unit, rank.ledger.knowledge()


def compare(module: Any, batches: list[list[Any]], told: EngineSettings) -> None:
    """Feed both forms and compare what they hold, say and answer after each batch."""
    pure, native = RankMap(DEFAULT_TIERS, told), NativeRankMap(module, DEFAULT_TIERS, told)
    for number, events in enumerate(batches):
        batch = EventBatch(float(number), tuple(events), 0)
        pure.apply(batch, float(number))
        native.apply(batch, float(number))
        assert seen(native) == seen(pure)
        for chain in CHAINS:
            for num_tokens in (None, 1, len(chain) * SIZE, len(chain) * SIZE - 6):
                for hashes in (chain, tuple(form(value, 1) for value in chain)):
                    assert native.match(hashes, num_tokens, 3) == pure.match(hashes, num_tokens, 3)
    again = NativeRankMap(module, DEFAULT_TIERS, told)
    again.restore(pure.dump())
    assert seen(again) == seen(pure)
    for rank in (pure, native):
        rank.restart()
    assert seen(native) == seen(pure)


@settings(max_examples=80, deadline=None)
@given(batches=st.lists(st.lists(EVENTS, max_size=5), max_size=6), told=SETTINGS)
def test_native_ranks_are_the_pure_ones(module: Any, batches: list[list[Any]], told: EngineSettings) -> None:
    """Stores of every shape, duplicates, removals, clears, groups, tiers, REMOTE, settings: no difference."""
    compare(module, batches, told)


@pytest.mark.long
@settings(max_examples=20_000, deadline=None)
@given(batches=st.lists(st.lists(EVENTS, max_size=6), max_size=10), told=SETTINGS)
def test_native_ranks_are_the_pure_ones_at_length(
    module: Any, batches: list[list[Any]], told: EngineSettings
) -> None:
    """The same, many times."""
    compare(module, batches, told)


@pytest.mark.parametrize("told", [EngineSettings(), EngineSettings(hashing=HASHING)])
def test_payloads_are_applied_as_their_batches_are(
    told: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks' batches, one of them new halfway, a clear, an unknown event: the same index by either way in."""
    hashes = [form(value, 0) for value in CHAINS[3]]
    tokens = tuple(PROMPTS[3])
    events: list[tuple[int | None, Any]] = [
        (0, BlockStored((hashes[0],), None, tokens[:4], SIZE)),
        (0, BlockStored(tuple(hashes[1:4]), hashes[0], tokens[4:16], SIZE)),
        (1, BlockStored(tuple(hashes[:6]), None, tokens[:24], SIZE)),
        (0, BlockRemoved((hashes[3],))),
        (1, BlockRemoved((hashes[5],))),
        (0, UnknownEvent("New", b"\x81\xa4type\xa3New")),
        (None, BlockStored(tuple(hashes[:2]), None, tokens[:8], SIZE)),
        (1, AllBlocksCleared()),
        (1, BlockStored(tuple(hashes[:3]), None, tokens[:12], SIZE)),
    ]
    batches = [EventBatch(float(i), (event,), rank) for i, (rank, event) in enumerate(events)]
    payloads = [encode_batch(batch) for batch in batches]
    seen_by: list[Any] = []
    for backend in ("native", "python"):
        if backend == "native" and native_module() is None:
            need("a build of kvhash._native")
        monkeypatch.setenv("KVHASH_BACKEND", backend)
        for way in ("batches", "payloads"):
            index = ResidencyIndex(settings={"a": told}, clock=lambda: 7.0)
            if way == "payloads":
                index.apply_payloads("a", payloads)
            else:
                for batch in batches:
                    index.apply("a", batch)
            ranks = [(rank, index.knowledge("a", rank)) for rank in index.ranks("a")]
            seen_by.append(
                (index.stats(), ranks, index.holdings("a"), index.longest_prefix(hashes), len(index))
            )
    for other in seen_by[1:]:
        assert other == seen_by[0]
    assert seen_by[0][4] == 3 + 3 + 2
    with pytest.raises(EventDecodeError):
        index.apply_payloads("a", [payloads[0], b"\xc1", payloads[1]])
