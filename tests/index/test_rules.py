"""Each rule of the index, one by one: what went wrong for others is right here."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvhash import BlockHasher, Contract
from kvhash._backend import native_module
from kvhash._errors import UsageError
from kvhash.events._errors import EventDecodeError
from kvhash.events.decode import decode_batch
from kvhash.events.encode import encode_batch
from kvhash.events.records import BadMessage, Confirmed, Gap, Lost, Recovered, Restart, Stale, Unconfirmed
from kvhash.events.schema import BlockStored, EventBatch, UndecodableEvent, UnknownEvent
from kvhash.index import (
    EngineSettings,
    GroupSettings,
    Place,
    PrefixMatch,
    ResidencyIndex,
    SnapshotError,
    State,
)

from ..interop.toolchain import need
from .build import CLEARED, HASHER, SIZE, batch, record, removed, stored

ROOT = Path(__file__).parents[2]
H = list(range(101, 161))
TOKENS = list(range(60))


def one(index: ResidencyIndex, hashes: Any = H, **options: Any) -> PrefixMatch:
    """Return the match of the engine that most tests use."""
    return index.longest_prefix(hashes, ["a"], **options)["a"]


def fed(*events: Any, **options: Any) -> ResidencyIndex:
    """Return an index whose engine `a` published these events."""
    index = ResidencyIndex(**options)
    index.apply("a", batch(*events))
    return index


# --- duplicates and removals --------------------------------------------------------------------------------


def test_a_block_stored_twice_and_removed_once_is_still_there() -> None:
    """Two physical copies, one of them gone: the block still hits; after the second removal it does not."""
    index = fed(stored(H[:1]), stored(H[:1]), removed(H[:1]))
    assert one(index).blocks == 1
    index.apply("a", batch(removed(H[:1])))
    assert one(index).blocks == 0
    assert index.stats()["removed"] == 2


def test_a_hash_twice_in_one_event_is_two_copies_and_nothing_else() -> None:
    """A repeated hash is no clear and no parent of itself: other blocks stay, one removal leaves one copy."""
    index = fed(stored(H[:3]), stored([H[0], H[0]]), removed([H[0], H[0]]))
    assert one(index).blocks == 3


def test_a_removal_of_what_is_not_held_is_counted_and_harmless() -> None:
    """It never makes a count negative: a store after it is one copy."""
    index = fed(removed(H[:1]), stored(H[:1]))
    assert one(index).blocks == 1
    assert index.stats()["removed_unknown"] == 1


def test_a_removal_counts_for_its_engine_alone() -> None:
    """Engines a and b store a block, a removes it: b still holds it."""
    index = fed(stored(H[:2]))
    index.apply("b", batch(stored(H[:2])))
    index.apply("a", batch(removed(H[:2])))
    found = index.longest_prefix(H)
    assert (found["a"].blocks, found["b"].blocks) == (0, 2)


def test_an_inner_block_that_left_cuts_the_run_until_it_is_back() -> None:
    """What hangs on it waits as an orphan and is joined again without being stored anew."""
    index = fed(stored(H[:10]), removed(H[4:5]))
    assert (one(index).blocks, index.stats()["reachable"]) == (4, 4)
    index.apply("a", batch(stored(H[4:5], H[3])))
    assert (one(index).blocks, index.stats()["reachable"]) == (10, 10)


# --- parents ------------------------------------------------------------------------------------------------


def test_a_child_before_its_parent_is_no_root_and_is_joined_later() -> None:
    """A block whose parent is not known never matches by itself."""
    index = fed(stored(H[1:3], H[0]))
    assert (one(index).blocks, one(index, H[1:3]).blocks) == (0, 2)
    assert index.stats()["reachable"] == 0
    index.apply("a", batch(stored(H[:1])))
    assert (one(index).blocks, index.stats()["reachable"]) == (3, 3)


def test_a_block_that_says_it_is_its_own_parent() -> None:
    """The parent is passed over and counted; the block is found by its hash after its real prefix."""
    index = fed(stored(H[1:2], H[1]), stored(H[:1]))
    assert one(index).blocks == 2
    assert index.stats()["conflicts"] == 1


@pytest.mark.parametrize("parent", [H[1], H[0]], ids=["own-first-hash", "grandparent"])
def test_a_wrong_parent_never_makes_a_false_hit(parent: int) -> None:
    """Whatever an event says of parents, the match is the walk over the prompt's own hashes."""
    index = fed(stored(H[:1]), stored(H[2:4], parent))
    assert one(index, H[:4]).blocks == 1
    index.apply("a", batch(stored(H[1:2], H[0])))
    assert one(index, H[:4]).blocks == 4


def test_two_parents_of_one_block_are_a_conflict() -> None:
    """Neither is believed; the block is found by hash alone."""
    index = fed(stored(H[:3]), stored(H[2:3], H[0]))
    assert one(index, H[:3]).blocks == 3
    assert (index.stats()["conflicts"], index.stats()["reachable"]) == (1, 2)


def test_a_circle_of_parents_is_nobodys_prefix() -> None:
    """Blocks that are each other's parents are unreachable, and dropping them ends."""
    index = fed(stored(H[:1], H[1]), stored(H[1:2], H[0]), max_blocks=2)
    assert index.stats()["reachable"] == 0
    index.apply("a", batch(stored(H[2:4])))
    assert len(index) <= 2


# --- sparse and token-less stores ---------------------------------------------------------------------------


def test_a_sparse_store_is_placed_by_hashing_its_tokens() -> None:
    """Fewer hashes than blocks of tokens: with the hash settings the block's place is found, and no other."""
    hashes = HASHER.chain(TOKENS[:12]).external()
    event = BlockStored((hashes[2],), None, tuple(TOKENS[:12]), SIZE)
    settings = EngineSettings(hashing={"algorithm": "sha256_cbor", "block_size": SIZE, "vllm": "0.33.0"})
    index = fed(event, stored(hashes[:2], token_ids=tuple(TOKENS[:8])), settings={"a": settings})
    assert (index.stats()["sparse_placed"], index.stats()["reachable"]) == (1, 3)
    assert one(index, hashes).blocks == 3


@pytest.mark.parametrize("token", [-1, 1 << 64])
def test_a_sparse_store_of_impossible_tokens_is_not_placed(token: int) -> None:
    """Token ids that nothing can hash leave the block unplaced; they raise nothing."""
    settings = EngineSettings(hashing={"algorithm": "sha256_cbor", "block_size": SIZE, "vllm": "0.33.0"})
    index = fed(BlockStored((5,), None, (*TOKENS[:11], token), SIZE), settings={"a": settings})
    assert index.stats()["sparse_unplaced"] == 1


def test_a_sparse_store_is_not_guessed_at() -> None:
    """Without the settings it is the child of nothing; it is found by its hash where the prompt has it."""
    hashes = HASHER.chain(TOKENS[:12]).external()
    index = fed(BlockStored((hashes[2],), None, tuple(TOKENS[:12]), SIZE))
    assert (index.stats()["sparse_unplaced"], index.stats()["reachable"]) == (1, 0)
    assert one(index, hashes).blocks == 0
    assert one(index, [hashes[2]]).blocks == 1  # a prompt that begins with it would be another hash
    index.apply("a", batch(stored(hashes[:2])))
    assert one(index, hashes).blocks == 3


def test_an_offload_without_tokens_joins_by_hash() -> None:
    """No tokens, block size 0, no parent: not a root; it is the CPU's copy of blocks that the GPU told of."""
    cpu = BlockStored((H[0], H[1]), None, (), 0, medium="CPU")
    index = fed(stored(H[:2]), cpu, removed(H[:2]))
    assert one(index).by_tier == {"CPU": 2}
    assert index.stats()["reachable"] == 2


def test_an_offload_without_tokens_that_comes_first() -> None:
    """CPU first, GPU later, GPU removed: still in the CPU tier, and linked by what the GPU's store said."""
    index = fed(BlockStored((H[0], H[1]), None, (), 0, medium="CPU"))
    assert index.stats()["reachable"] == 0
    index.apply("a", batch(stored(H[:2])))
    assert one(index).by_tier == {"GPU": 2}
    index.apply("a", batch(removed(H[:2])))
    assert one(index).by_tier == {"CPU": 2}
    assert index.stats()["reachable"] == 2


def test_context_parallel_blocks_are_told_from_sparse_ones_by_the_settings() -> None:
    """64 tokens and two hashes at block size 16: blocks of 32 where the settings say so, else nothing is assumed."""
    event = BlockStored(tuple(H[:2]), None, tuple(range(64)), 16)
    told = fed(event, settings={"a": EngineSettings(tokens_per_hash=32)})
    assert (one(told).tokens, told.stats()["reachable"]) == (64, 2)
    assert fed(event).stats()["sparse_unplaced"] == 2


# --- groups -------------------------------------------------------------------------------------------------


def test_a_removal_in_group_1_leaves_group_0() -> None:
    """The same hash in two groups is two blocks."""
    index = fed(stored(H[:3], group_idx=0), stored(H[:3], group_idx=1), removed(H[:1], group_idx=1))
    assert index.holdings("a")[0, Place("GPU", False, 0)] == dict.fromkeys(H[:3], 1)
    assert one(index).blocks == 0
    index.apply("a", batch(stored(H[:1], group_idx=1)))
    assert one(index).blocks == 3


def test_a_window_group_must_hold_its_window_at_the_end_of_the_hit() -> None:
    """Blocks that slid out of the window are not needed; those in it are."""
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 9, "group_idx": 1}
    full = {"kv_cache_spec_kind": "full_attention", "group_idx": 0}
    index = fed(stored(H[:8], **full), stored(H[:8], **window), removed(H[:5], group_idx=1))
    assert one(index).blocks == 8
    index.apply("a", batch(removed(H[7:8], group_idx=1)))
    assert one(index).blocks == 7
    index.apply("a", batch(removed(H[6:7], group_idx=1)))
    assert one(index).blocks == 0


def test_a_state_group_must_hold_its_boundary() -> None:
    """A state of four blocks at block 8 of 10: the hit ends there."""
    state = {"kv_cache_spec_kind": "mamba", "group_idx": 1, "size": 4 * SIZE}
    full = {"kv_cache_spec_kind": "full_attention", "group_idx": 0}
    index = fed(
        stored(H[:10], **full),
        stored(H[7:8], H[3], token_ids=tuple(range(8 * SIZE)), **state),
        settings={
            "a": EngineSettings(
                tokens_per_hash=SIZE,
                groups={
                    0: GroupSettings(block_size=SIZE),
                    1: GroupSettings(block_size=4 * SIZE, kind="mamba"),
                },
            )
        },
    )
    assert one(index).blocks == 8


def test_one_state_hash_over_many_blocks_of_tokens() -> None:
    """3,840 tokens: five attention blocks of 768 and a single state, that of the last; it carries the whole prompt."""
    full = {"kv_cache_spec_kind": "mla_attention", "group_idx": 0, "size": 768}
    state = {"kv_cache_spec_kind": "mamba", "group_idx": 1, "size": 768, "token_ids": tuple(range(3840))}
    index = fed(stored(H[:5], **full), stored(H[4:5], **state))
    assert (one(index, H[:5]).blocks, one(index, H[:5]).tokens) == (5, 3840)
    assert one(index, H[:4]).blocks == 0


def test_a_coarse_group_is_found_at_the_last_fine_hash_of_its_blocks() -> None:
    """Hashes of 4 tokens, a group of 16: its block is there under the fourth hash."""
    index = fed(
        stored(H[:8], group_idx=0),
        stored([H[3], H[7]], group_idx=1, size=16),
    )
    assert one(index).blocks == 8
    assert one(index, H[:7]).blocks == 4


def test_a_drafter_recomputes_the_last_unit() -> None:
    """With Eagle the usable hit is a block shorter than what is held."""
    index = fed(stored(H[:5]), settings={"a": EngineSettings(use_eagle=True)})
    assert (one(index).blocks, one(index).usable_tokens) == (5, 4 * SIZE)


def test_a_whole_prompt_in_cache_leaves_a_token_to_compute() -> None:
    """With the prompt's length given, a hit never covers its last token."""
    index = fed(stored(H[:5]))
    assert one(index, H[:5], num_tokens=5 * SIZE).usable_tokens == 4 * SIZE
    assert one(index, H[:5], num_tokens=5 * SIZE + 1).usable_tokens == 5 * SIZE


# --- tiers --------------------------------------------------------------------------------------------------


def test_gpu_in_small_and_capital_letters_is_one_tier() -> None:
    """Stored as "gpu", removed as "GPU"; a release without a medium means the GPU too."""
    index = fed(stored(H[:2], medium="gpu"), stored(H[2:3], H[1]), removed(H[:1], medium="GPU"))
    assert index.blocks_by_tier("a") == {"GPU": 2}
    assert fed(stored(H[:1], medium="cpu_pinned")).blocks_by_tier("a") == {"CPU": 1}


def test_an_unknown_medium_scores_nothing_and_is_counted() -> None:
    """Its blocks are not held; their events are listed by name, in bounded number."""
    index = fed(stored(H[:3], medium="FOO"))
    assert (one(index).blocks, len(index)) == (0, 0)
    assert index.stats()["unknown_media"] == {"FOO": 1}
    index.apply("a", batch(*(stored(H[:1], medium=f"M{i}") for i in range(1000))))
    assert len(index.stats()["unknown_media"]) <= 65


def test_a_lower_tier_goes_on_where_the_device_ends() -> None:
    """The device's run, then the CPU's, then storage's; what the CPU holds besides counts once."""
    index = fed(
        stored(H[:3]),
        stored(H[:5], medium="CPU"),
        stored(H[5:6], H[4], medium="STORAGE"),
        stored(H[7:8], H[6]),
    )
    match = one(index)
    assert (match.blocks, match.tokens) == (6, 6 * SIZE)
    assert match.by_tier == {"GPU": 3, "CPU": 2, "STORAGE": 1}


def test_an_adapters_offloaded_blocks_never_serve_the_base_model() -> None:
    """In every tier a block is its hash, and the hash covers adapter and salt."""
    base = HASHER.chain(TOKENS).block_hashes
    sql = HASHER.chain(TOKENS, lora={"name": "sql", "path": "adapters/sql", "id": 1}).block_hashes
    salted = HASHER.chain(TOKENS, cache_salt="t").block_hashes
    for medium in ("GPU", "CPU"):
        index = fed(stored([h[-8:] for h in sql], medium=medium, lora_name="sql"))
        assert one(index, sql).blocks == 15
        assert (one(index, base).blocks, one(index, salted).blocks) == (0, 0)
    index = fed(stored([h[-8:] for h in salted]))
    assert (one(index, salted).blocks, one(index, base).blocks) == (15, 0)


def test_a_chunk_is_retrievable_only_whole() -> None:
    """Of a chunk of four offloaded blocks three are worth nothing; a chunk that shares two blocks does not help."""
    index = fed(
        stored(H[:4], medium="CPU"),
        stored([H[0], H[1], 7, 8], medium="CPU"),
        stored(H[4:8], H[3], medium="CPU"),
        stored(H[:1]),
        removed(H[:1]),
    )
    assert [one(index, H[:n]).blocks for n in (2, 3, 4, 5, 8, 9)] == [0, 0, 4, 4, 8, 8]
    index.apply("a", batch(removed(H[:4], medium="CPU")))
    assert one(index, H[:8]).blocks == 0
    assert one(index, [H[0], H[1], 7, 8]).blocks == 4


def test_chunks_announced_by_their_last_hash() -> None:
    """Token-less stores name a chunk by its last block; the settings say how many blocks it has."""
    events = [BlockStored((H[i],), None, (), 0, medium="CPU") for i in (3, 7)]
    settings = {"a": EngineSettings(offload_chunk_blocks=4, tokens_per_hash=SIZE)}
    assert one(fed(*events, settings=settings)).by_tier == {"CPU": 8}
    assert one(fed(stored(H[:5]), *events, settings=settings)).by_tier == {"GPU": 5, "CPU": 3}


def test_coarse_offloaded_blocks_do_not_coarsen_the_device() -> None:
    """One tail hash for 64 tokens in storage, blocks of 4 on the GPU: each tier has its own block size."""
    index = fed(stored(H[:3]), stored([H[15]], size=16 * SIZE, medium="STORAGE"))
    assert one(index).by_tier == {"GPU": 3, "STORAGE": 13}
    assert one(index, H[:15]).by_tier == {"GPU": 3}


def test_remote_places_are_told_apart() -> None:
    """What only a REMOTE place holds is no hit of this engine; it is said beside it."""
    index = fed(
        stored(H[:2], locality="LOCAL"),
        stored(H[:6], medium="STORAGE", locality="REMOTE"),
        removed(H[1:2], locality=None),
    )
    match = one(index)
    assert (match.blocks, match.by_tier, dict(match.remote)) == (1, {"GPU": 1}, {"STORAGE": 5})


# --- hashes of two forms ------------------------------------------------------------------------------------


def test_engines_with_integers_and_with_bytes_side_by_side() -> None:
    """A lookup with digests or with their low 64 bits, signed or not, finds both kinds of engine."""
    digests = HASHER.chain(TOKENS[:12]).block_hashes
    numbers = HASHER.chain(TOKENS[:12]).external()
    signed = HASHER.chain(TOKENS[:12]).external("int64")
    index = ResidencyIndex()
    index.apply("int", batch(stored(numbers)))
    index.apply("signed", batch(stored(signed)))
    index.apply("bytes", batch(stored(digests)))
    for hashes in (digests, numbers, signed):
        assert {engine: match.blocks for engine, match in index.longest_prefix(hashes).items()} == {
            "int": 3,
            "signed": 3,
            "bytes": 3,
        }


def test_a_collision_is_counted_and_matches_only_its_own_digest() -> None:
    """Two digests with the same low 64 bits: the second is not taken for the first, and the engine is DEGRADED."""
    first, second = b"\1" * 24 + b"\0" * 7 + b"\5", b"\2" * 24 + b"\0" * 7 + b"\5"
    index = fed(stored([first]), stored([second]))
    assert (one(index, [first]).blocks, one(index, [second]).blocks, one(index, [5]).blocks) == (1, 0, 1)
    assert index.stats()["collisions"] == 1
    assert index.knowledge("a").reasons == ("collision",)
    index.apply("a", batch(removed([second])))
    assert one(index, [first]).blocks == 1


# --- clears, restarts, removal ------------------------------------------------------------------------------


def test_a_clear_empties_its_rank_and_no_other() -> None:
    """Every tier and group of the rank; stores after it count again. One rank's blocks never join another's."""
    index = ResidencyIndex()
    index.apply("a", batch(stored(H[:3]), stored(H[:5], medium="CPU"), rank=0))
    index.apply("a", batch(stored(H[:2]), rank=1))
    assert (one(index).blocks, one(index).rank) == (5, 0)
    index.apply("a", batch(CLEARED, rank=0))
    assert (one(index).blocks, one(index).rank) == (2, 1)
    index.apply("a", batch(stored(H[:1]), rank=0))
    assert index.blocks_by_tier("a") == {"GPU": 3}


@pytest.mark.parametrize("below", [{"medium": "CPU"}, {"medium": "DISK"}, {"locality": "REMOTE"}])
@pytest.mark.parametrize("payloads", [False, True])
def test_a_clear_does_not_say_what_lower_tiers_hold(below: dict[str, str], payloads: bool) -> None:
    """Once a life stored below the device a clear leaves nothing claimed and nothing EXACT, until a restart.

    Of the device alone it says all; what a life stored after its clear does not count against that clear.
    """
    index = ResidencyIndex(clock=lambda: 50.0)

    def apply(*events: Any) -> None:
        if payloads:
            index.apply_payloads("a", [encode_batch(batch(*events), Contract.events_for_vllm("latest"))])
        else:
            index.apply("a", batch(*events))

    apply(stored(H[:3]))
    apply(CLEARED, stored(H[:2], **below))
    assert index.knowledge("a").exact
    apply(removed(H[:2], **below), CLEARED, stored(H[:1]))
    known = index.knowledge("a")
    assert (known.state, known.reasons, known.since) == (State.DEGRADED, ("cleared-below",), 50.0)
    assert index.holdings("a") == {(0, Place("GPU", False, 0)): {H[0]: 1}}
    apply(CLEARED)
    assert index.knowledge("a").reasons == ("cleared-below",)
    again = ResidencyIndex()
    again.load(index.snapshot())
    again.apply("a", batch(CLEARED))
    assert again.knowledge("a").reasons == ("cleared-below",)
    index.apply_record("a", Restart("e", 0, 0))
    assert index.knowledge("a").exact
    apply(stored(H[:2]), CLEARED)
    assert index.knowledge("a").exact


def test_of_equal_ranks_the_lowest_number_answers() -> None:
    """Whichever was heard of first, so that every form answers alike; more usable tokens go before that."""
    index = ResidencyIndex()
    for rank in (3, 1, None, 2):
        index.apply("a", batch(stored(H[:2]), rank=rank))
    assert (index.ranks("a"), one(index).rank) == ([3, 1, None, 2], None)
    for rank in (3, 1, 2):
        index.apply("a", batch(stored(H[2:3], H[1], medium="CPU"), rank=rank))
    assert (one(index).rank, one(index).by_tier) == (1, {"GPU": 2, "CPU": 1})
    index.apply("a", batch(stored(H[3:4], H[2]), stored(H[2:3], H[1]), rank=3))
    assert one(index).rank == 3


def test_a_restart_empties_its_rank() -> None:
    """What the former life held is gone, and so is what was wrong with it."""
    index = ResidencyIndex(clock=lambda: 50.0)
    index.apply_record("a", record(7, stored(H[:3])))
    index.apply_record("a", record(0, stored(H[:1]), rank=1))
    assert index.knowledge("a").state is State.DEGRADED
    index.apply_record("a", Restart("e", 0, 7))
    assert one(index).blocks == 1
    assert index.knowledge("a").exact
    assert index.stats()["restarts"] == 1


def test_an_engine_removed_and_added_again_begins_empty() -> None:
    """No entry of a removed engine is ever found again."""
    index = fed(stored(H[:3]))
    assert index.remove("a")
    assert not index.remove("a")
    assert (index.engines(), one(index).blocks, len(index)) == ([], 0, 0)
    assert index.knowledge("a").reasons == ("never-heard",)
    index.apply("a", batch(stored(H[1:2], H[0])))
    assert one(index).blocks == 0
    index.apply("a", batch(stored(H[:1])))
    assert one(index).blocks == 2


# --- knowledge ----------------------------------------------------------------------------------------------


def test_a_gap_degrades_and_its_recovery_heals() -> None:
    """Since when is said; the parts of a gap that are not recovered yet keep it."""
    times = iter(range(100, 200))
    index = ResidencyIndex(clock=lambda: float(next(times)))
    index.apply_record("a", record(0, stored(H[:1])))
    assert index.knowledge("a").exact
    index.apply_record("a", Gap("e", 0, 1, 4))
    state = index.knowledge("a")
    assert (state.state, state.reasons) == (State.DEGRADED, ("gap",))
    assert state.since is not None
    for seq in (1, 2):
        index.apply_record("a", record(seq))
    index.apply_record("a", Recovered("e", 0, 1, 2))
    assert index.knowledge("a").since == state.since
    for seq in (3, 4):
        index.apply_record("a", record(seq))
    index.apply_record("a", Recovered("e", 0, 3, 4))
    assert index.knowledge("a").exact


def test_a_loss_stays_until_a_clear_or_a_restart() -> None:
    """It counts from when the gap was seen, not from when it was given up."""
    now = [10.0]
    index = ResidencyIndex(clock=lambda: now[0])
    index.apply_record("a", record(0, stored(H[:1])))
    index.apply_record("a", Gap("e", 0, 1, 1))
    now[0] = 20.0
    index.apply_record("a", Lost("e", 0, 1, 1, "no-replay"))
    index.apply_record("a", record(2, stored(H[1:2], H[0])))
    state = index.knowledge("a")
    assert (state.reasons, state.since, state.as_of) == (("lost",), 10.0, 2.0)
    index.apply_record("a", record(3, CLEARED))
    assert index.knowledge("a").exact


def test_a_batch_without_a_place_is_a_doubt_until_the_stream_goes_on() -> None:
    """It may be of a new life whose clock was set back: not EXACT until a restart, the publisher or a batch tells."""
    index = ResidencyIndex()
    index.apply_record("a", Stale("e", 0, 7))
    assert index.knowledge("a").reasons == ("never-heard",)
    index.apply_record("a", record(0, stored(H[:1])))
    index.apply_record("a", Stale("e", 0, 0))
    state = index.knowledge("a")
    assert (state.state, state.reasons) == (State.DEGRADED, ("stale",))
    index.apply_record("a", record(1))
    assert index.knowledge("a").exact
    index.apply_record("a", Stale("e", 0, 0))
    # The last one again, as another follower of the same stream brings it.
    index.apply_record("a", record(1))
    assert index.knowledge("a").exact
    index.apply_record("a", Stale("e", 0, 0))
    index.apply_record("a", Confirmed("e", 0, 1))
    assert index.knowledge("a").exact
    index.apply_record("a", Unconfirmed("e", 0))
    index.apply_record("a", record(2))
    assert index.knowledge("a").reasons == ("unconfirmed",)
    index.apply_record("a", Gap("e", 0, 3, 5))
    index.apply_record("a", Confirmed("e", 0, 2))  # what seemed to be missing was never published
    assert index.knowledge("a").exact
    index.apply_record("a", Stale("e", 0, 0))
    index.apply_record("a", Restart("e", 0, 1))
    assert index.knowledge("a").exact
    assert one(index).blocks == 0


def test_numbers_that_are_skipped_without_a_word_are_a_loss() -> None:
    """A stream that was joined late is not EXACT either."""
    index = ResidencyIndex()
    index.apply_record("a", record(0))
    index.apply_record("a", record(2))
    assert index.knowledge("a").reasons == ("lost",)
    index.apply_record("b", record(40))
    assert index.knowledge("b").reasons == ("joined-late",)
    index.apply_record("c", Lost("e", 0, 0, 39, "not-in-buffer"))
    index.apply_record("c", record(40))
    assert index.knowledge("c").reasons == ("lost",)


def test_a_lower_number_is_a_new_life_and_the_same_batch_a_repetition() -> None:
    """812, then 0 without a word: what was held is gone. 812 twice: applied once."""
    index = ResidencyIndex()
    for _ in range(2):
        index.apply_record("a", record(812, stored(H[:1])))
    assert list(index.holdings("a").values()) == [{H[0]: 1}]
    index.apply_record("a", record(0, stored(H[1:2]), ts=900.0))
    assert list(index.holdings("a").values()) == [{H[1]: 1}]
    assert index.knowledge("a").exact


def test_the_number_after_the_last_is_the_first_again() -> None:
    """2^64 - 2 is followed by 0, which is no new life."""
    index = ResidencyIndex()
    index.apply_record("a", record((1 << 64) - 2, stored(H[:1])))
    index.apply_record("a", record(0, stored(H[1:2], H[0]), ts=2e19))
    assert one(index).blocks == 2


def test_what_cannot_be_read_degrades() -> None:
    """An event or a batch that cannot be read, or whose kind is not known, may have stored or removed anything."""
    index = fed(UndecodableEvent("$.events[0]", "bad", b""), stored(H[:1]))
    assert (one(index).blocks, index.knowledge("a").reasons) == (1, ("undecodable",))
    assert fed(UnknownEvent("New", b"")).knowledge("a").reasons == ("unknown-event",)
    index = ResidencyIndex()
    index.apply_record("a", record(0))
    index.apply_record("a", BadMessage("e", None, None, 0, "two frames", ()))
    assert index.knowledge("a").exact
    index.apply_record("a", BadMessage("e", 0, 1, 0, "not msgpack", ()))
    index.apply_record("a", record(2))
    assert index.knowledge("a").reasons == ("undecodable",)


def test_a_bad_message_of_nobody_degrades_every_rank() -> None:
    """A batch without a readable rank may be any rank's of that engine."""
    index = ResidencyIndex()
    index.apply_record("a", record(0, rank=0))
    index.apply_record("a", record(0, rank=1))
    index.apply_record("a", BadMessage("e", None, 1, 0, "not msgpack", ()))
    assert [index.knowledge("a", rank).state for rank in (0, 1)] == [State.DEGRADED, State.DEGRADED]


def test_hash_settings_that_do_not_verify_make_an_engine_unknown() -> None:
    """Hashes of sha256 under settings for sha256_cbor: UNKNOWN, until the settings are right."""
    other = BlockHasher(vllm="0.33.0", algorithm="sha256", block_size=SIZE)
    right: dict[str, Any] = {"vllm": "0.33.0", "block_size": SIZE}
    event = stored(other.chain(TOKENS[:8]).external(), token_ids=tuple(TOKENS[:8]), extra_keys=(None, None))
    index = fed(event, settings={"a": EngineSettings(hashing={**right, "algorithm": "sha256_cbor"})})
    assert (index.knowledge("a").state, index.knowledge("a").reasons) == (State.UNKNOWN, ("hash-mismatch",))
    index.apply("a", batch(CLEARED))
    assert index.knowledge("a").state is State.UNKNOWN
    index.configure("a", EngineSettings(hashing={**right, "algorithm": "sha256"}))
    index.apply("a", batch(event))
    assert index.knowledge("a").exact


def test_sparse_stores_under_wrong_settings_make_an_engine_unknown() -> None:
    """Of 40 blocks every second one is published, hashed with another seed: none fits anywhere, which is no trust."""
    settings: dict[str, Any] = {
        "vllm": "0.33.0",
        "algorithm": "sha256_cbor",
        "block_size": SIZE,
        "hash_seed": "0",
    }
    tokens = tuple(range(SIZE * 40))
    for seed, exact in (("0", True), ("1", False)):
        hashes = BlockHasher(**{**settings, "hash_seed": seed}).chain(tokens).external()
        event = stored(hashes[1::2], token_ids=tokens, extra_keys=(None,) * 20)
        index = fed(event, settings={"a": EngineSettings(hashing=settings)})
        assert index.knowledge("a").exact == exact
        assert exact or index.knowledge("a").reasons == ("hash-unverified",)


def test_reports_of_reuse_are_no_copies() -> None:
    """Where requests ask for full reports, a second store is none; copies cannot be known, so it is not EXACT."""
    settings = {"a": EngineSettings(reports_reuse=True)}
    index = fed(stored(H[:3]), stored(H[:2]), removed(H[1:2]), settings=settings)
    assert one(index).blocks == 1
    assert index.knowledge("a").reasons == ("reuse-reported",)


# --- bounds and keeping -------------------------------------------------------------------------------------


def test_the_index_is_bounded_and_says_what_it_dropped() -> None:
    """Chains are cut at their ends, so what stays is still found; the rank is DEGRADED and the drops are counted."""
    index = ResidencyIndex(max_blocks=50)
    for chain in range(10):
        first = 1000 * (chain + 1)
        index.apply("a", batch(stored(range(first, first + 10))))
    stats = index.stats()
    assert len(index) <= 50
    assert (stats["evicted"], stats["reachable"]) == (100 - len(index), len(index))
    assert index.knowledge("a").reasons == ("evicted",)
    assert one(index, list(range(10_000, 10_010))).blocks == 10


def test_a_hundred_thousand_tokens_are_matched_to_the_last_block() -> None:
    """6,250 blocks of 16, stored in many events, are one run."""
    hashes = list(range(1, 6251))
    index = ResidencyIndex()
    for first in range(0, 6250, 500):
        parent = hashes[first - 1] if first else None
        index.apply("a", batch(stored(hashes[first : first + 500], parent, size=16)))
    match = one(index, hashes)
    assert (match.blocks, match.tokens) == (6250, 100_000)
    index.apply("a", batch(removed(hashes[-1:])))
    assert one(index, hashes).blocks == 6249


_CHURN = """
import gc, os, sys
from kvhash.index import ResidencyIndex
from tests.index.build import batch, removed, stored

index = ResidencyIndex()
tokens = tuple(range(1000))

def churn(first, count):
    for start in range(first, first + count, 1000):
        keys = range(start, start + 1000)
        index.apply("a", batch(stored(keys, start + (1 << 40), size=1, token_ids=tokens)))
        index.apply("a", batch(removed(keys)))
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    native = sum(rank.native.memory for ranks in index._engines.values() for rank in ranks.values()
                 if hasattr(rank, "native"))
    return resident, native, sys.getallocatedblocks()

before = churn(1, 50_000)
after = churn(100_001, 950_000)
print(len(index), index.stats()["stored"], *(late - early for early, late in zip(before, after)), sep=",")
"""


@pytest.mark.parametrize("backend", ["python", "native"])
def test_a_million_stores_and_removals_leave_memory_flat(backend: str) -> None:
    """Every block that was removed is forgotten, orphans and their parents too: by what the process has, in both forms.

    A block that stayed would cost at least 50 bytes, 47 MB in all; a parent that children wait for, 12 MB.
    """
    if backend == "native" and native_module() is None:
        need("a build of kvhash._native")
    environment = {**os.environ, "KVHASH_BACKEND": backend, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", _CHURN], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    held, count, resident, native, objects = map(int, done.stdout.split(","))
    assert (held, count) == (0, 1_000_000)
    assert resident < 4 << 20, "memory that stayed"
    assert native <= 1 << 16, "blocks that stayed in the native index"
    assert objects < 1000, "objects that stayed"


def test_a_snapshot_restores_everything_but_is_not_believed_blindly() -> None:
    """The match is the same; EXACT comes back when the last batch is seen again, or with another life it is dropped."""
    index = ResidencyIndex()
    index.apply_record("a", record(0, stored(H[:4]), stored(H[:6], medium="CPU")))
    index.apply_record("a", record(1, stored(H[:1])))
    same, other = ResidencyIndex(), ResidencyIndex()
    for restored in (same, other):
        restored.load(index.snapshot())
        assert restored.longest_prefix(H) == index.longest_prefix(H)
        assert restored.holdings("a") == index.holdings("a")
        assert restored.knowledge("a").reasons == ("restored",)
        assert restored.position("a", 0) == 1
    same.apply_record("a", record(1, stored(H[:1])))
    assert same.knowledge("a").exact
    same.apply_record("a", record(2, removed(H[:1])))
    assert one(same).by_tier["GPU"] == 4
    other.apply_record("a", record(1, stored(H[5:6]), ts=77.0))
    assert (one(other).blocks, len(other)) == (0, 1)
    assert other.knowledge("a").reasons == ("lost",)


@pytest.mark.parametrize("data", [b"", b"x", b"\x80", b"\x81\xa6format\xa1x"])
def test_what_is_no_snapshot_is_refused_and_changes_nothing(data: bytes) -> None:
    """A typed error, and what was known is still known."""
    index = fed(stored(H[:2]))
    with pytest.raises(SnapshotError):
        index.load(data)
    assert one(index).blocks == 2


def test_every_cut_of_a_snapshot_is_refused() -> None:
    """No prefix of a snapshot is taken for one."""
    data = fed(stored(H[:2]), stored(H[:1], medium="CPU")).snapshot()
    index = ResidencyIndex()
    for length in range(len(data)):
        with pytest.raises(SnapshotError):
            index.load(data[:length])
    index.load(data)
    assert one(index).blocks == 2


def test_hottest_prefixes_are_the_beginnings_that_prompts_share() -> None:
    """A prefix of three blocks with two branches, on two engines, comes before a lone prompt."""
    events = [stored(H[:3]), stored([1, 2], H[2]), stored([3], H[2]), stored([50, 51])]
    index = fed(*events)
    index.apply("b", batch(*events[:2]))
    hot = [(found.key, found.blocks, found.below, found.engines) for found in index.hottest_prefixes()]
    assert hot == [(H[2], 3, 11, ("a", "b")), (51, 2, 2, ("a",))]


def test_hottest_prefixes_are_as_many_as_asked_for() -> None:
    """0 is none, a number is that many at most, and what is no number of prefixes is refused, not sliced by."""
    index = fed(stored(H[:3]), stored([50, 51]))
    assert [len(index.hottest_prefixes(limit)) for limit in (0, 1, 2, 1000)] == [0, 1, 2, 2]
    wrong: Any
    for wrong in (-1, None, 1.5, "2", True):
        with pytest.raises(UsageError, match="a number of prefixes"):
            index.hottest_prefixes(wrong)


@pytest.mark.parametrize("release", ["0.9.2", "0.10.2", "0.14.0", "0.17.0", "0.22.0", "0.24.0", "0.33.0"])
def test_every_releases_events_are_indexed(release: str) -> None:
    """What a release's own encoding carries is enough: no medium, no group, arrays or maps."""
    events = (BlockStored(tuple(H[:3]), None, tuple(range(12)), SIZE), removed(H[2:3]))
    index = ResidencyIndex()
    index.apply("a", decode_batch(encode_batch(EventBatch(1.0, events), release)))
    assert one(index).blocks == 2


def test_a_gap_of_which_a_part_is_lost_is_over_when_later_batches_come() -> None:
    """14 is lost and 15 delivered, without a word on 15: nothing is missing any more, and 14 stays lost."""
    index = ResidencyIndex()
    for seq in range(14):
        index.apply_record("a", record(seq))
    index.apply_record("a", Gap("e", 0, 14, 15))
    index.apply_record("a", Lost("e", 0, 14, 14, "not-in-buffer"))
    index.apply_record("a", record(15))
    assert index.knowledge("a").reasons == ("lost",)
    index.apply_record("a", record(16, CLEARED))
    assert index.knowledge("a").exact


def test_hashes_of_which_none_can_be_confirmed_make_an_engine_unknown() -> None:
    """A release that publishes no extra keys, under another seed: 16 blocks without one match are no trust; one is."""
    settings: dict[str, Any] = {
        "vllm": "0.11.0",
        "algorithm": "sha256_cbor",
        "block_size": SIZE,
        "hash_seed": "0",
    }
    tokens = list(range(SIZE * 20))
    other = BlockHasher(**{**settings, "hash_seed": "1"}).chain(tokens).external()
    index = ResidencyIndex(settings={"a": EngineSettings(hashing=settings)})
    index.apply("a", batch(stored(other[:8], token_ids=tuple(tokens[: 8 * SIZE]))))
    assert index.knowledge("a").exact
    index.apply("a", batch(stored(other[8:], other[7], token_ids=tuple(tokens[8 * SIZE :]))))
    assert (index.knowledge("a").state, index.knowledge("a").reasons) == (State.UNKNOWN, ("hash-unverified",))
    right = BlockHasher(**settings).chain(tokens).external()
    index.apply("a", batch(stored(right[:2], token_ids=tuple(tokens[: 2 * SIZE]))))
    assert index.knowledge("a").exact


def test_a_block_size_that_is_a_multiple_of_the_engines_is_found_out() -> None:
    """Lookups over 8 tokens a hash of an engine that hashes 4 never hit, and the index says that it does not know."""
    settings: dict[str, Any] = {"vllm": "0.33.0", "block_size": 2 * SIZE}
    tokens = list(range(SIZE * 20))
    hashes = BlockHasher(vllm="0.33.0", block_size=SIZE).chain(tokens).external()
    index = ResidencyIndex(settings={"a": EngineSettings(hashing=settings)})
    index.apply("a", batch(stored(hashes, token_ids=tuple(tokens), extra_keys=(None,) * 20)))
    assert index.knowledge("a").state is State.UNKNOWN


def test_a_rank_has_no_more_groups_than_an_engine_can_have() -> None:
    """A publisher that names ever new groups gets 64 of them; the rest scores nothing, is counted, and is no trust."""
    index = ResidencyIndex()
    for number in range(70):
        assert index.knowledge("a").exact == (0 < number <= 64)
        index.apply("a", batch(stored(H[:1], group_idx=number)))
    assert index.stats()["refused"] == 6
    assert len(index) == 64
    assert index.knowledge("a").reasons == ("refused",)
    index.apply("a", batch(CLEARED))
    assert index.knowledge("a").exact


@pytest.mark.parametrize("num_tokens", [0, 1, 1 << 70])
def test_any_number_of_tokens_is_answered(num_tokens: int) -> None:
    """A prompt without tokens hits nothing that is usable, and a huge number is no error; a negative one is refused."""
    index = fed(stored(H[:2]))
    match = one(index, H[:2], num_tokens=num_tokens)
    assert (match.blocks, match.usable_tokens) == (2, 2 * SIZE if num_tokens > 1 else 0) or not match.blocks
    with pytest.raises(UsageError):
        index.longest_prefix(H[:2], num_tokens=-1)


def sealed(body: bytes) -> bytes:
    """Return a snapshot with this body, as whoever writes one may."""
    digest = hashlib.blake2b(body, digest_size=16).digest()
    return msgspec.msgpack.encode({"format": "kvhash-index-2", "digest": digest, "body": body})


def test_a_damaged_snapshot_is_refused() -> None:
    """Each byte changed, and each cut: SnapshotError, and nothing changes."""
    index = fed(stored(H[:3]))
    data = index.snapshot()
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1
        for bad in (bytes(damaged), data[:place]):
            with pytest.raises(SnapshotError):
                index.load(bad)
    index.load(data)
    assert len(index) == 3


def test_a_snapshot_can_be_loaded_whatever_was_published() -> None:
    """A window below 0 is kept as it came: it stops no later snapshot."""
    index = fed(stored(H[:2], kv_cache_spec_sliding_window=-1))
    other = ResidencyIndex()
    other.load(index.snapshot())
    assert len(other) == 2


@pytest.mark.parametrize("name", [None, 5, b"a", "\ud800"])
def test_an_engine_has_a_name(name: Any) -> None:
    """What is no text is refused before anything is kept under it."""
    index = fed(stored(H[:2]))
    payload = encode_batch(EventBatch(1.0, (stored(H[:1]),)), drop_fields=True)
    for call in (
        lambda: index.apply_payloads(name, [payload]),
        lambda: index.configure(name, EngineSettings()),
        lambda: index.apply(name, EventBatch(1.0, ())),
    ):
        with pytest.raises(UsageError):
            call()
    assert list(index.longest_prefix(H[:2])) == ["a"]
    index.snapshot()


def test_a_payload_that_cannot_be_read_is_named_and_costs_exactness() -> None:
    """The first bad one's place is said, those before it are applied, and the engine is DEGRADED."""
    index = fed(stored(H[:1]))
    good = encode_batch(batch(stored(H[1:2], parent=H[0])), drop_fields=True)
    with pytest.raises(EventDecodeError) as caught:
        index.apply_payloads("a", [good, b"\xff", good])
    assert caught.value.at == "$[1]"
    assert one(index, H[:2]).blocks == 2
    assert "undecodable" in index.knowledge("a").reasons
    assert index.stats()["bad_messages"] == 1
    for wrong in (5, b"", [5], ["x"]):
        with pytest.raises(UsageError):
            index.apply_payloads("a", wrong)  # type: ignore[arg-type]


def test_engines_are_answered_in_the_order_in_which_they_were_asked() -> None:
    """Known and unknown ones alike: who takes the first of equals gets the same in both forms."""
    index = fed(stored(H[:2]))
    index.apply("b", batch(stored(H[:2])))
    assert list(index.longest_prefix(H[:2], ["z", "b", "y", "a"])) == ["z", "b", "y", "a"]


def test_hashes_come_as_any_sequence() -> None:
    """Lists, tuples, iterators, NumPy arrays, signed ones too: one answer."""
    index = fed(stored(H[:3]))
    for given in (tuple(H[:3]), iter(H[:3]), np.array(H[:3], dtype=np.uint64)):
        assert one(index, given).blocks == 3
    high = [(1 << 64) - 1, (1 << 64) - 2]
    index = fed(stored(high))
    assert one(index, np.array([-1, -2], dtype=np.int64)).blocks == 2


def test_a_snapshot_of_wrong_types_is_refused_whole() -> None:
    """Wrong types anywhere, an unknown tier, depth without end: SnapshotError, and nothing changes."""
    index = fed(stored(H[:3]))
    good = msgspec.msgpack.decode(msgspec.msgpack.decode(index.snapshot())["body"])

    def changed(path: tuple[Any, ...], value: Any) -> bytes:
        copy = msgspec.msgpack.decode(msgspec.msgpack.encode(good))
        at = copy
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value
        return sealed(msgspec.msgpack.encode(copy))

    rank = ("engines", "a", 0, 1)
    place = (*rank, "places", 0)
    for path, value in (
        (("counts",), 5),
        (("engines",), []),
        ((*rank, "ledger", "missing"), 7),
        ((*rank, "groups"), [[0, 5]]),
        ((*place, 0, 0), "TAPE"),
        ((*place, 1, 0, 1), -1),
        ((*place, 1, 0, 1), 1 << 63),
        ((*place, 1, 0, 2), "x"),
        ((*place, 1, 0, 0), None),
    ):
        with pytest.raises(SnapshotError):
            index.load(changed(path, value))
    with pytest.raises(SnapshotError):
        index.load(b"\x91" * 100_000 + b"\xc0")
    assert len(index) == 3
    small = ResidencyIndex(max_blocks=2)
    small.load(index.snapshot())
    assert len(small) <= 2
