"""Random stories of hostile events, told to several indexes side by side: whoever answers differently is wrong."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from kvhash import BlockHasher, KvHashError
from kvhash.events import encode_batch
from kvhash.events.records import BadMessage, Batch, Confirmed, Gap, Lost, Recovered, Restart, Stale
from kvhash.events.schema import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    UndecodableEvent,
    UnknownEvent,
)
from kvhash.index import EngineSettings, GroupSettings, PrefixMatch, ResidencyIndex, SnapshotError
from kvhash.index.snapshot import seal

SIZE = 4
HASHER = BlockHasher(vllm="0.33.0", algorithm="sha256_cbor", block_size=SIZE, hash_seed="0")
HASHING = {"vllm": "0.33.0", "algorithm": "sha256_cbor", "block_size": SIZE, "hash_seed": "0"}
#: Prompts that share beginnings: of one trunk, with branches at several depths.
PROMPTS = [
    [*range(at * SIZE), *range(1000 * i, 1000 * i + 40)][:64] for i, at in enumerate((16, 3, 3, 8, 0, 12))
]
CHAINS = [HASHER.hash_tokens(prompt) for prompt in PROMPTS]
ENGINES = ("a", "b", "c}{%", "")
RANKS = (0, 0, 0, 1, None, -1)
MEDIA = (None, "GPU", "GPU", "gpu", "CPU", "cpu_pinned", "DISK", "FOO", "ß", "")
KINDS = (
    None,
    None,
    "full_attention",
    "sliding_window",
    "sliding_window",
    "mamba",
    "chunked_local_attention",
    "who knows",
    "",
)
SIZES = (SIZE, SIZE, SIZE, 2 * SIZE, 0, 1, 3, 12, (1 << 31) - 1, 1 << 31, 1 << 62, (1 << 64) - 1)
INTEGERS = (None, None, 0, 1, 6, 8, 9, 12, 12, 64, -1, -(1 << 63), (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


def form(value: Any, number: int) -> Any:
    """Return a hash unsigned, signed, whole, wide, as 8 bytes, or another digest with its low 64 bits."""
    low = int.from_bytes(bytes(value)[-8:], "big")
    signed, short = low - (1 << 64) if low >> 63 else low, low.to_bytes(8, "big")
    return (low, signed, bytes(value), low | 5 << 70, short, b"other" + bytes(19) + short)[number]


class Teller:
    """Makes up what engines publish and what is asked, from one seed."""

    def __init__(self, seed: int, *, digests: bool = True, orderly: bool = False) -> None:
        self.rng = random.Random(seed)
        #: Whether numbers and times are what a subscriber can say.
        self.orderly = orderly
        self.forms = (0, 0, 0, 1, 2, 2, 3, 4, 5) if digests else (0, 0, 1, 3)
        #: Each group's kind and window, which most of its events name.
        self.kinds = {group: (self.rng.choice(KINDS), self.rng.choice(INTEGERS)) for group in range(4)}
        #: Whether stores name parents that are held and not theirs, of which docs/index.md promises nothing.
        self.lies = seed % 4 == 3
        self.clock = 0.0
        self.seqs: dict[tuple[str, int | None], int] = {}

    def settings(self) -> EngineSettings:
        """Return settings of an engine."""
        rng = self.rng
        groups = rng.choice(
            [
                {},
                {},
                {0: GroupSettings(block_size=SIZE)},
                {1: GroupSettings(block_size=2 * SIZE, kind="chunked_local_attention", attention_chunk_size=16)},
                {2: GroupSettings(block_size=(1 << 31) - 1, kind="mamba")},
                {
                    0: GroupSettings(block_size=SIZE),
                    1: GroupSettings(block_size=3, kind="sliding_window", sliding_window=7),
                },
            ]
        )  # fmt: skip
        return EngineSettings(
            tokens_per_hash=rng.choice([None, None, SIZE, 1, (1 << 31) - 1]),
            groups=groups,
            use_eagle=rng.random() < 0.3,
            offload_chunk_blocks=rng.choice([None, None, 1, 2, (1 << 31) - 1]),
            reports_reuse=False,
            hashing=rng.choice([None, None, HASHING, {**HASHING, "hash_seed": "1"}]),
            verify_blocks=rng.choice([0, 10, 4096]),
        )

    def events(self) -> tuple[Any, ...]:
        """Return a batch's events."""
        return tuple(self._event() for _ in range(self.rng.choice([0, 1, 1, 2, 3])))

    def _event(self) -> Any:
        rng = self.rng
        roll = rng.random()
        if roll < 0.02:
            return AllBlocksCleared()
        if roll < 0.03:
            return UnknownEvent("New", b"\x81\xa4type\xa3New")
        if roll < 0.04:
            return UndecodableEvent("$", "bad", b"\x81\xa4type\xabBlockStored")
        chain, number = rng.choice(CHAINS), rng.choice(self.forms)
        group = rng.choice([None, None, 0, 0, 1, 1, 1, 2, 3, -1, (1 << 64) - 1, rng.randrange(200)])
        medium, locality = rng.choice(MEDIA), rng.choice([None, None, None, "LOCAL", "remote", "REMOTE"])
        if roll < 0.35:
            hashes = [form(value, number) for value in rng.sample(chain, rng.randrange(4))]
            return BlockRemoved(tuple(hashes), medium=medium, group_idx=group, locality=locality)
        return self._stored(chain, number, group, medium, locality)

    def _stored(self, chain: Any, number: int, group: Any, medium: Any, locality: Any) -> BlockStored:
        rng = self.rng
        which = CHAINS.index(chain)
        factor = rng.choice([1, 1, 1, 1, 2, 3])
        coarse = chain[factor - 1 :: factor]
        first = rng.choice([0, rng.randrange(len(coarse))])
        end = first + rng.randrange(len(coarse) - first + 1)
        hashes = [form(value, number) for value in coarse[first:end]]
        parent = form(coarse[first - 1], number) if first else None
        tokens: tuple[Any, ...] = tuple(PROMPTS[which][first * SIZE * factor : end * SIZE * factor])
        size = SIZE * factor
        how = rng.choice(
            ["true"] * 6 + ["orphan", "self", "circle", "other", "tokenless", "sparse", "size", "twice"]
        )
        if how == "orphan":
            parent = form(rng.randbytes(32), number)
        elif how == "self" and hashes:
            parent = hashes[rng.randrange(len(hashes))]
        elif how == "circle" and hashes:
            parent, tokens = form(chain[-1], number), (0,) * (size * len(hashes))
            if rng.random() < 0.5:
                hashes = hashes[::-1]
        elif how == "other" and self.lies:
            parent = form(rng.choice(rng.choice(CHAINS)), number)
        elif how == "tokenless":
            tokens, size = (), rng.choice([0, size])
        elif how == "sparse" and len(hashes) > 1:
            hashes = sorted(rng.sample(hashes, len(hashes) - 1), key=hashes.index)
        elif how == "size":
            size = rng.choice(SIZES)
        elif how == "twice" and hashes:
            hashes = [*hashes, hashes[0]]
        kind, window = rng.choice(KINDS), rng.choice(INTEGERS)
        if rng.random() < 0.9:
            kind, window = self.kinds.get(group or 0, (None, None))
        if rng.random() < 0.03:
            tokens = tuple(rng.choice([token, -1, 1 << 64, (1 << 64) - 1]) for token in tokens)
        if rng.random() < 0.02:
            tokens = tuple((token, token) for token in tokens if token >= 0)
        return BlockStored(
            tuple(hashes), parent, tokens, size, medium=medium, group_idx=group, locality=locality,
            lora_id=rng.choice([None] * 6 + [0, 1]), lora_name=rng.choice([None] * 6 + ["", "sql"]),
            extra_keys=rng.choice([None, None, (None,) * len(hashes), (("k",),) * len(hashes), ((),)]),
            kv_cache_spec_kind=kind, kv_cache_spec_sliding_window=window,
            lookahead_token_ids=rng.choice([None] * 8 + [(), ((1,),)]),
        )  # fmt: skip

    def records(self, engine: str) -> list[Any]:
        """Return the next records of one of an engine's ranks: batches mostly, and what a subscriber says beside."""
        rng, rank = self.rng, self.rng.choice(RANKS)
        seq = self.seqs.get((engine, rank), 0)
        roll = rng.random()
        self.clock += 1.0
        if roll < 0.7:
            self.seqs[engine, rank] = seq + 1
            return [self._batch(rank, seq)]
        if roll < 0.76:
            odd = rng.choice(
                [0, max(0, seq - 1), seq + 2, *([] if self.orderly else [(1 << 64) - 2, (1 << 64) - 1])]
            )
            if self.orderly:
                self.seqs[engine, rank] = odd + 1
            return [self._batch(rank, odd)]
        if roll < 0.8:
            self.seqs[engine, rank] = 0
            return [Restart("sim", rank, seq - 1 if seq else None)]
        last = seq + rng.randrange(3)
        if roll < 0.92:
            self.seqs[engine, rank] = last + 1
            end = rng.choice([Lost("sim", rank, seq, last, "no-replay"), Recovered("sim", rank, seq, last)])
            return [Gap("sim", rank, seq, last), end]
        if roll < 0.95:
            return [BadMessage("sim", rank, rng.choice([None, seq, 0]), 0, "?", ())]
        more = rng.choice([Gap("sim", rank, last, seq), Confirmed("sim", rank, seq)])
        return [Stale("sim", rank, 0), more]

    def _batch(self, rank: int | None, seq: int) -> Batch:
        ts = (
            self.clock
            if self.orderly or self.rng.random() < 0.97
            else self.rng.choice([math.nan, math.inf, -1.0, 0.0])
        )
        batch = EventBatch(ts, self.events(), rank)
        try:
            payload = encode_batch(batch, drop_fields=True) if self.rng.random() < 0.5 else b""
        except KvHashError:
            payload = b""
        return Batch("sim", rank, seq, b"", 0, batch, payload)

    def question(self) -> tuple[list[Any], list[str] | None, int | None]:
        """Return hashes, engines and a number of tokens to look up."""
        rng = self.rng
        chain = rng.choice(CHAINS)
        number = rng.choice(self.forms)
        hashes = [form(value, number) for value in chain[: rng.choice([0, 1, 2, len(chain), len(chain)])]]
        if rng.random() < 0.2:
            hashes.append(form(rng.randbytes(32), number))
        engines = rng.choice([None, None, [], ["a"], ["zz", "b", "a", "b"], list(ENGINES)])
        return hashes, engines, rng.choice([None, None, 0, 1, 5, len(chain) * SIZE, 1 << 64, 1 << 90])


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Use one form of the index."""
    before = os.environ.get("KVHASH_BACKEND")
    os.environ["KVHASH_BACKEND"] = name
    try:
        yield
    finally:
        os.environ.pop("KVHASH_BACKEND")
        if before is not None:
            os.environ["KVHASH_BACKEND"] = before


class Both:
    """The pure and the native index; each call goes to both, and both must answer, or fail, alike."""

    FORMS = ("python", "native")

    def __init__(self, **options: Any) -> None:
        self.indexes: dict[str, ResidencyIndex] = {}
        for name in self.FORMS:
            with backend(name):
                self.indexes[name] = ResidencyIndex(clock=lambda: 5.0, **options)

    def call(self, do: Callable[[ResidencyIndex], Any]) -> Any:
        """Return what both answer."""
        answers = {}
        for name, index in self.indexes.items():
            with backend(name):
                try:
                    answers[name] = do(index)
                except KvHashError as error:
                    answers[name] = type(error), error.code, error.at, error.message
        one, other = answers.values()
        assert one == other
        return one


def shown(index: Any) -> Any:
    """Return all that an embedded index says."""
    engines = index.engines()
    return (
        engines,
        [(index.ranks(name), index.holdings(name), index.blocks_by_tier(name)) for name in engines],
        [[_known(index.knowledge(name, rank)) for rank in ("all", *index.ranks(name))] for name in engines],
        [[index.position(name, rank) for rank in index.ranks(name)] for name in engines],
        index.stats(),
        len(index),
        index.hottest_prefixes(20),
    )


def _known(known: Any) -> Any:
    """Return what is known with a time that can be compared."""
    return known.state, known.since, known.reasons, repr(known.as_of)


def dumped(index: ResidencyIndex) -> Any:
    """Return a snapshot's contents: places and groups in any order, empty counts left out."""
    body = msgspec.msgpack.decode(msgspec.msgpack.decode(index.snapshot())["body"])
    body["counts"] = {name: count for name, count in body["counts"].items() if count}
    for ranks in body["engines"].values():
        for _, rank in ranks:
            rank["groups"].sort(key=lambda group: group[0])
            rank["counts"] = {name: count for name, count in rank["counts"].items() if count}
            rank["ledger"] = repr(rank["ledger"])
    return body


def tell_both(seed: int, steps: int) -> None:
    """Tell a story to the pure and the native index and hold them against each other after every step."""
    teller = Teller(seed)
    rng = teller.rng
    settings = {name: teller.settings() for name in ENGINES if rng.random() < 0.7}
    bound = rng.choice([None, None, 5, 30, 100])
    both = Both(settings=settings, max_blocks=bound)
    for _ in range(steps):
        engine = rng.choice(ENGINES)
        roll = rng.random()
        if roll < 0.55:
            for record in teller.records(engine):
                both.call(lambda index, engine=engine, record=record: index.apply_record(engine, record))
        elif roll < 0.63:
            batch = EventBatch(teller.clock, teller.events(), rng.choice(RANKS))
            both.call(lambda index, engine=engine, batch=batch: index.apply(engine, batch))
        elif roll < 0.75:
            records = [record for _ in range(4) for record in teller.records(engine)]
            payloads = [record.payload for record in records if isinstance(record, Batch) and record.payload]
            if rng.random() < 0.1:
                payloads.insert(rng.randrange(len(payloads) + 1), rng.choice([b"", b"\xc1", b"\x93\x01\x90"]))
            both.call(lambda index, engine=engine, payloads=payloads: index.apply_payloads(engine, payloads))
        elif roll < 0.8:
            told = teller.settings()
            both.call(lambda index, engine=engine, told=told: index.configure(engine, told))
        elif roll < 0.82:
            both.call(lambda index, engine=engine: index.remove(engine))
        elif roll < 0.85:
            swap(both)
        both.call(shown)
        for _ in range(0 if teller.lies else 3):
            hashes, engines, tokens = teller.question()
            both.call(
                lambda index, hashes=hashes, engines=engines, tokens=tokens: list(
                    index.longest_prefix(hashes, engines, num_tokens=tokens).items()
                )
            )
        if rng.random() < 0.1:
            both.call(dumped)
    for chain in CHAINS if not teller.lies else ():
        both.call(lambda index, chain=chain: list(index.longest_prefix(chain).items()))
    swap(both)
    both.call(shown)
    both.call(dumped)


def swap(both: Both) -> None:
    """Let each form go on from the other's snapshot."""
    snapshots = {}
    for name, index in both.indexes.items():
        with backend(name):
            snapshots[name] = index.snapshot()
    for name, index in both.indexes.items():
        with backend(name):
            index.load(snapshots["native" if name == "python" else "python"])


ODD = (
    *(
        None,
        True,
        False,
        0,
        1,
        2,
        -1,
        -2,
        -3,
        5,
        (1 << 31) - 1,
        1 << 31,
        1 << 32,
        1 << 63,
        (1 << 64) - 1,
        -(1 << 63),
    ),
    *(1.5, "", "GPU", "CPU", "TAPE", b"", b"x" * 32, [], {}, "full_attention", "mamba"),
)


def tell_snapshots(seed: int, changes: int) -> None:
    """Change a snapshot's values at random: both forms refuse the same ones, and go on alike from the others."""
    teller = Teller(4 * seed)
    rng, both = teller.rng, Both()
    for engine in (*ENGINES[:2], *ENGINES[:2], ENGINES[0]):
        for record in teller.records(engine):
            both.call(lambda index, engine=engine, record=record: index.apply_record(engine, record))
    body = msgspec.msgpack.decode(both.indexes["python"].snapshot())["body"]
    for _ in range(changes):
        value = msgspec.msgpack.decode(body)
        parent, name = rng.choice([*_inside(value)])
        parent[name] = rng.choice(ODD)
        changed = seal(value)
        both = Both()
        refused = both.call(lambda index, changed=changed: index.load(changed))
        assert refused is None or refused[0] is SnapshotError
        both.call(shown)
        both.call(dumped)
        for chain in CHAINS[:3]:
            both.call(lambda index, chain=chain: list(index.longest_prefix(chain).items()))
        for record in teller.records("a"):
            both.call(lambda index, record=record: index.apply_record("a", record))
        both.call(shown)


def _inside(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place of a value: what it is in, and its name or number there."""
    if isinstance(value, (dict, list)):
        for name in value if isinstance(value, dict) else range(len(value)):
            yield value, name
            yield from _inside(value[name])


# --- the shared form ----------------------------------------------------------------------------------------


def tell_shared(seed: int, steps: int, shared: Any, settings: dict[str, EngineSettings]) -> None:
    """Tell a story to the embedded and the shared index: all that the shared one keeps is the same.

    It keeps no whole digests (so none collide) and no parents: of a circle, or of what is evicted, it knows nothing.
    """
    teller = Teller(seed, digests=False, orderly=True)
    rng = teller.rng
    embedded = ResidencyIndex(clock=lambda: 5.0, settings=settings)
    for _ in range(steps):
        engine = rng.choice(ENGINES)
        roll = rng.random()
        if roll < 0.75:
            records = [record for _ in range(rng.choice([1, 1, 5])) for record in teller.records(engine)]
            records = [
                record for record in records if not isinstance(record, BadMessage) or record.seq is None
            ]
            records = [
                record for record in records if not isinstance(record, Gap) or record.first <= record.last
            ]
            for record in records:
                embedded.apply_record(engine, record)
            shared.apply_records(engine, records)
        elif roll < 0.78:
            assert embedded.remove(engine) == shared.remove(engine)
        else:
            hashes, engines, tokens = teller.question()
            asked = embedded.engines() if engines is None else engines
            one = embedded.longest_prefix(hashes, asked, num_tokens=tokens)
            other = shared.longest_prefix(hashes, asked, num_tokens=tokens)
            assert {name: _worth(match) for name, match in one.items()} == {
                name: _worth(match) for name, match in other.items()
            }
        assert sorted(embedded.engines()) == shared.engines()
        for name in embedded.engines():
            assert set(embedded.ranks(name)) == set(shared.ranks(name))
            assert embedded.holdings(name) == shared.holdings(name)
            assert embedded.blocks_by_tier(name) == shared.blocks_by_tier(name)
            for rank in ("all", *embedded.ranks(name)):
                assert _known(embedded.knowledge(name, rank)) == _known(shared.knowledge(name, rank)), (
                    name,
                    rank,
                )
            for rank in embedded.ranks(name):
                assert embedded.position(name, rank) == shared.position(name, rank)
        one, other = embedded.stats(), shared.stats()
        for count in set(one) & set(other) - {"reachable"}:
            assert one[count] == other[count], count


def _worth(match: PrefixMatch) -> Any:
    """Return what two matches have in common whose ranks are equally good."""
    return match.usable_tokens, match.blocks, sum(match.remote.values())
