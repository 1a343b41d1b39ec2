"""Recomputing published hashes: matches are proofs, mismatches are sure, all else says why."""

from __future__ import annotations

from typing import Any

import pytest

from kvhash import BlockHasher
from kvhash.events import AllBlocksCleared, BlockStored, EventBatch, Verifier, decode_batch
from kvhash.events.verify import REASONS

from .wire import CAPTURES, capture, frames

TOKENS = list(range(100, 116))
IMAGE = {"identifier": "a" * 64, "offset": 3, "length": 6}
EMBEDS = {"shape": [16, 2], "dtype": "float32", "data": bytes(range(128)).hex()}


def events_of(
    release: str, algorithm: str, form: str = "uint64", lookahead: int = 0, **request: Any
) -> BlockStored:
    """Return the event that an engine publishes for `TOKENS` in blocks of 4, by the SDK's own hasher."""
    hasher = BlockHasher(vllm=release, algorithm=algorithm, block_size=4, hash_seed="0", lookahead=lookahead)
    chain = hasher.chain(TOKENS + list(range(lookahead)), **request)
    published = {field.name for field in hasher.contract.events.block_stored}
    lora = request.get("lora", {})
    following = TOKENS + list(range(lookahead))
    ahead = tuple(tuple(following[i + 4 : i + 4 + lookahead]) for i in range(0, 16, 4))
    return BlockStored(
        block_hashes=tuple(chain.external(form)),  # type: ignore[arg-type]
        parent_block_hash=None,
        token_ids=tuple(TOKENS),
        block_size=4,
        lora_id=lora.get("id"),
        lora_name=lora.get("name") if "lora_name" in published else None,
        extra_keys=tuple(chain.event_extra_keys()) if "extra_keys" in published else None,  # type: ignore[arg-type]
        lookahead_token_ids=ahead if lookahead else None,
    )


def verifier(release: str, algorithm: str, **options: Any) -> Verifier:
    """Return a verifier with the settings of `events_of`."""
    settings = {"vllm": release, "algorithm": algorithm, "block_size": 4, "hash_seed": "0"}
    return Verifier(**{**settings, **options})


def verdicts(checker: Verifier, *events: Any) -> list[str]:
    """Return verdict or reason of each block, fed event by event."""
    return [
        check.reason or check.verdict for event in events for check in checker.feed(EventBatch(1.0, (event,)))
    ]


def split(event: BlockStored, at: int) -> tuple[BlockStored, BlockStored]:
    """Return the event as two, the second hanging on the first."""

    def part(start: int, end: int, parent: Any) -> BlockStored:
        keys, ahead = event.extra_keys, event.lookahead_token_ids
        return BlockStored(
            event.block_hashes[start:end],
            parent,
            event.token_ids[start * 4 : end * 4],
            4,
            lora_id=event.lora_id,
            lora_name=event.lora_name,
            extra_keys=keys and keys[start:end],
            lookahead_token_ids=ahead and ahead[start:end],
        )

    return part(0, at, None), part(at, 4, event.block_hashes[at - 1])


@pytest.mark.parametrize("name", CAPTURES)
def test_every_captured_hash_is_recomputed(name: str) -> None:
    """All blocks of a live server match, once the adapter's path is known; until then it says so."""
    run = capture(name)
    settings = {"vllm": "0.32.0", "algorithm": run["algo"], "block_size": 32, "hash_seed": run["hash_seed"]}
    full, blind = Verifier(**settings, lora_paths={"sql": "adapters/sql"}), Verifier(**settings)
    for _, _, payload in frames(name):
        batch = decode_batch(payload)
        assert all(check.verdict == "match" for check in full.feed(batch))
        for check in blind.feed(batch):
            expected = "lora-path-unknown" if check.lora_name else None
            assert (check.reason, check.verdict == "match") == (expected, expected is None)
    assert full.verdicts.total() > 10
    assert bool(blind.reasons) == ("lora" in run)


@pytest.mark.parametrize("form", ["uint64", "int64", "bytes"])
@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"cache_salt": "t"},
        {"lora": {"name": "sql", "path": "p/sql"}},
        {"multimodal": [IMAGE]},
        {"multimodal": [IMAGE, {"identifier": "b" * 64, "offset": 9, "length": 1}], "cache_salt": "t"},
        {"prompt_embeds": EMBEDS},
        {"lora": {"name": "sql", "path": "p/sql"}, "cache_salt": "t", "multimodal": [IMAGE]},
    ],
)
@pytest.mark.parametrize("release", ["0.17.0", "0.19.0", "0.30.0", "0.33.0"])
def test_all_that_enters_a_hash(release: str, request_: Any, algorithm: str, form: str) -> None:
    """Salts, adapters, images and embeddings as published give back every hash, in one event and in two."""
    event = events_of(release, algorithm, form, **request_)
    paths = {"sql": "p/sql"}
    assert verdicts(verifier(release, algorithm, lora_paths=paths), event) == ["match"] * 4
    assert verdicts(verifier(release, algorithm, lora_paths=paths), *split(event, 3)) == ["match"] * 4


@pytest.mark.parametrize("request_", [{}, {"cache_salt": "t"}, {"multimodal": [IMAGE]}])
@pytest.mark.parametrize("lookahead", [1, 3])
def test_lookahead_tokens(lookahead: int, request_: Any) -> None:
    """Published look-ahead tokens enter the hash; where they are not published the reason says so."""
    event = events_of("0.33.0", "sha256", lookahead=lookahead, **request_)
    assert verdicts(verifier("0.33.0", "sha256", lookahead=lookahead), event) == ["match"] * 4
    plain = BlockStored(event.block_hashes, None, event.token_ids, 4, extra_keys=event.extra_keys)
    found = verdicts(verifier("0.33.0", "sha256", lookahead=lookahead), plain)
    assert found == ["lookahead-unpublished"] * 4


def test_integer_chains_of_old_releases() -> None:
    """Before the chain held bytes its 64-bit integers are the parents themselves."""
    first, second = split(events_of("0.10.1", "sha256_cbor_64bit"), 2)
    assert verdicts(verifier("0.10.1", "sha256_cbor_64bit"), first, second) == ["match"] * 4
    assert verdicts(verifier("0.10.1", "sha256_cbor_64bit"), second) == ["match"] * 2


def test_old_adapter_keys() -> None:
    """An adapter's id is hashed and published; its name is hashed from 0.11.1 and published from 0.14."""
    lora = {"name": "sql", "id": 3}
    assert verdicts(verifier("0.11.0", "sha256"), events_of("0.11.0", "sha256", lora=lora)) == ["match"] * 4
    found = verdicts(verifier("0.12.0", "sha256"), events_of("0.12.0", "sha256", lora=lora))
    assert found == ["lora-name-unpublished"] * 4
    assert verdicts(verifier("0.16.0", "sha256"), events_of("0.16.0", "sha256", lora=lora)) == ["match"] * 4


def test_unpublished_keys_are_not_called_a_mismatch() -> None:
    """Before extra keys were published a salted block is not derivable, an unsalted one matches."""
    salted = events_of("0.16.0", "sha256", cache_salt="t")
    assert verdicts(verifier("0.16.0", "sha256"), salted) == ["extra-keys-unpublished"] * 4
    assert verdicts(verifier("0.16.0", "sha256"), events_of("0.16.0", "sha256")) == ["match"] * 4


@pytest.mark.parametrize(
    "wrong", [{"hash_seed": "1"}, {"algorithm": "sha256_cbor"}, {"vllm": "0.16.0", "hash_seed": ""}]
)
def test_wrong_settings_are_a_mismatch(wrong: dict[str, Any]) -> None:
    """Under other settings a prompt's first block is a mismatch that shows both hashes."""
    settings = {"vllm": "0.33.0", "algorithm": "sha256", "block_size": 4, "hash_seed": "0", **wrong}
    checker = Verifier(**settings)
    checks = checker.feed(EventBatch(1.0, (events_of("0.33.0", "sha256"),)))
    assert [check.reason or check.verdict for check in checks] == ["mismatch", *["parent-mismatch"] * 3]
    assert checks[0].expected not in (None, checks[0].published)


def test_a_wrong_hash_in_the_middle_with_whole_digests() -> None:
    """With whole digests published, only the wrong block and the one that hangs on it mismatch."""
    event = events_of("0.33.0", "sha256", "bytes")
    hashes = list(event.block_hashes)
    hashes[1] = b"x" * 32
    bad = BlockStored(tuple(hashes), None, event.token_ids, 4, extra_keys=event.extra_keys)
    assert verdicts(verifier("0.33.0", "sha256"), bad) == ["match", "mismatch", "mismatch", "match"]


def test_unknown_parent_and_random_root() -> None:
    """A parent that was never seen, and a root that nobody can know, are said as such."""
    first, second = split(events_of("0.33.0", "sha256"), 2)
    assert verdicts(verifier("0.33.0", "sha256"), second) == ["unknown-parent"] * 2
    assert verdicts(verifier("0.28.0", "sha256", hash_seed=None), first) == ["random-root"] * 2
    digests = split(events_of("0.28.0", "sha256", "bytes"), 2)
    found = verdicts(verifier("0.28.0", "sha256", hash_seed=None), *digests)
    assert found == ["random-root"] * 2 + ["match"] * 2


def test_what_no_hash_can_be_made_from() -> None:
    """Events without tokens, with pairs, with tokens out of range or lists that do not fit say so."""
    one = (1,)
    cases = {
        "no-tokens": BlockStored(one, None, (), 0, medium="CPU"),
        "bigram-tokens": BlockStored(one, None, ((1, 2),), 4),
        "invalid-tokens": BlockStored(one, None, (1, 2, 3, -4), 4),
        "malformed-event": BlockStored(one, None, (1, 2, 3), 4),
        "block-size": BlockStored(one, None, (1, 2, 3, 4, 5), 5),
    }
    for reason, event in cases.items():
        assert verdicts(verifier("0.33.0", "sha256"), event) == [reason]
        assert reason in REASONS
    event = BlockStored(one, None, (1, 2, 3, 4), 4, extra_keys=(None, None))
    assert verdicts(verifier("0.33.0", "sha256"), event) == ["malformed-event"]


@pytest.mark.parametrize("request_", [{}, {"cache_salt": "t"}, {"lora": {"name": "sql", "path": "p"}}])
def test_a_coarser_groups_blocks(request_: Any) -> None:
    """A group of blocks of 8 over hashes of 4 publishes every second hash; salt and adapter still derive."""
    fine = events_of("0.33.0", "sha256", **request_)
    assert fine.extra_keys is not None
    keys = (fine.extra_keys[0], fine.extra_keys[2])
    name = request_.get("lora", {}).get("name")
    event = BlockStored(fine.block_hashes[1::2], None, fine.token_ids, 8, lora_name=name, extra_keys=keys)
    assert verdicts(verifier("0.33.0", "sha256", lora_paths={"sql": "p"}), event) == ["match"] * 2


def test_a_coarser_groups_image_is_not_derivable() -> None:
    """Which of the hashes inside a coarse block an image belongs to is not published."""
    fine = events_of("0.33.0", "sha256", multimodal=[IMAGE])
    keys = (((IMAGE["identifier"], 3),), None)
    event = BlockStored(fine.block_hashes[1::2], None, fine.token_ids, 8, extra_keys=keys)
    assert verdicts(verifier("0.33.0", "sha256"), event) == ["coarse-extra-keys"] * 2


def test_sparse_blocks_are_found_by_recomputation_only() -> None:
    """One hash for 16 tokens in blocks of 4 matches the block whose hash it is, and is never guessed."""
    fine = events_of("0.33.0", "sha256")
    for published in fine.block_hashes:
        event = BlockStored((published,), None, fine.token_ids, 4, extra_keys=(None,))
        assert verdicts(verifier("0.33.0", "sha256"), event) == ["match"]
    event = BlockStored((12345,), None, fine.token_ids, 4, extra_keys=(None,))
    assert verdicts(verifier("0.33.0", "sha256"), event) == ["sparse-blocks"]


def test_context_parallel_events() -> None:
    """With context parallelism 2 a hash covers 8 tokens, whether the event says 4 or 8."""
    hasher = BlockHasher(block_size=4, hash_seed="0", decode_context_parallel_size=2)
    hashes = tuple(hasher.chain(TOKENS).external())
    for size in (4, 8):
        event = BlockStored(hashes, None, tuple(TOKENS), size, extra_keys=(None, None))
        checker = verifier("latest", "sha256", decode_context_parallel_size=2)
        assert verdicts(checker, event) == ["match"] * 2


def test_memory_is_bounded() -> None:
    """At most `max_blocks` digests are kept; the oldest parents become unknown, nothing else changes."""
    checker = verifier("0.33.0", "sha256", max_blocks=10)
    first, second = split(events_of("0.33.0", "sha256"), 2)
    verdicts(checker, first)
    for i in range(50):
        event = BlockStored((i,), None, (i, 2, 3, 4), 4, extra_keys=(None,))
        assert verdicts(checker, event) == ["mismatch"]
    assert len(checker._known) == 10
    assert verdicts(checker, second) == ["unknown-parent"] * 2


def test_a_clear_does_not_forget_digests() -> None:
    """A digest says what was hashed, whether or not the block is still held."""
    checker = verifier("0.33.0", "sha256")
    first, second = split(events_of("0.33.0", "sha256"), 2)
    assert verdicts(checker, first, AllBlocksCleared(), second) == ["match"] * 4
