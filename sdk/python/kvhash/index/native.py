"""A rank's blocks in the native core: the same answers as `RankMap`, for many blocks and many engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvhash._backend import native_module
from kvhash._errors import KvHashError
from kvhash.contract import Contract
from kvhash.events.encode import encode_batch
from kvhash.events.schema import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    HashValue,
    UndecodableEvent,
    UnknownEvent,
    hash_key,
)

from .layer import Block
from .ledger import Ledger
from .rank import Place, RankMap, by_number, check_block
from .types import EngineSettings, PrefixMatch

if TYPE_CHECKING:
    from kvhash import _native

_NEWEST = Contract.events_for_vllm("latest")
_UNDECODABLE = msgspec.msgpack.encode({"type": "BlockStored"})
_UNKNOWN = msgspec.msgpack.encode({"type": "?"})

__all__ = [
    "NativeLayer",
    "NativeRankMap",
    "Told",
    "apply_payloads",
    "make_fleet",
    "make_rank_map",
]


class Told(NamedTuple):
    """What became of payloads: how many were applied, by how many blocks the maps grew, and what they said.

    ``signals``: of each rank its number, the time of its last batch, and what bears on the trust in it.
    """

    done: int
    grown: int
    signals: list[tuple[int | None, float, list[str]]]


def make_rank_map(tiers: Mapping[str, str], settings: EngineSettings) -> RankMap:
    """Return a rank of which nothing was heard: native where that is built, else pure Python."""
    module = native_module()
    return RankMap(tiers, settings) if module is None else NativeRankMap(module, tiers, settings)


class NativeLayer:
    """One place of a native rank, as a `Layer` shows itself."""

    def __init__(self, native: _native.RankMap, tier: int, place: Place, counts: Sequence[int]) -> None:
        self._native = native
        self._at = tier, place.remote, place.group
        self._length, self.reachable, self.conflicts, self.collisions = counts

    def __len__(self) -> int:
        return self._length

    def items(self) -> Iterator[tuple[int, Block]]:
        """Yield key and block, the one held longest first; the blocks' children are left out."""
        for (key, copies, parent, digest, ends_chunk), depth in self._native.dump(*self._at):
            block = Block(parent, digest, ends_chunk)
            block.copies, block.depth = copies, depth
            yield key, block

    @property
    def blocks(self) -> dict[int, Block]:
        """The blocks by key, as they are now."""
        return dict(self.items())

    def beginnings(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield for each first block what `Layer.beginnings` says."""
        return iter(self._native.beginnings(*self._at))


class NativeRankMap(RankMap):
    """What one rank holds. Its blocks, groups and most counts are native; the stream's ledger is Python's."""

    def __init__(self, module: Any, tiers: Mapping[str, str], settings: EngineSettings) -> None:
        order = list(dict.fromkeys(tiers.values()))
        self.native: _native.RankMap = module.RankMap(
            [(medium, order.index(tier)) for medium, tier in tiers.items()]
        )
        super().__init__(tiers, settings)

    def configure(self, settings: EngineSettings) -> None:
        """Take settings for what comes from now on."""
        super().configure(settings)
        hasher = None if self._verifier is None else self._verifier.hasher
        self.native.configure(
            tokens_per_hash=settings.tokens_per_hash or 0,
            groups=[
                (
                    number,
                    [group.block_size],
                    group.block_size,
                    group.kind,
                    group.sliding_window or 0,
                    group.attention_chunk_size or 0,
                )
                for number, group in settings.groups.items()
            ],
            use_eagle=settings.use_eagle,
            offload_chunk_blocks=settings.offload_chunk_blocks or 0,
            reports_reuse=settings.reports_reuse,
            hashing=None if hasher is None else hasher._engine,
        )

    @property
    def size(self) -> int:
        """How many blocks are held, over all places."""
        return self.native.size

    @property
    def fullest(self) -> int:
        """How many blocks the fullest place holds."""
        return self.native.fullest

    @property
    def unit(self) -> int:
        """Tokens per hash; 0 where nothing says it."""
        return self.native.unit

    def all_counts(self) -> Counter[str]:
        """Return the counts, those of the places included."""
        counts = Counter(self.counts)
        counts.update(dict(self.native.counts()))
        for place in self.native.places():
            counts["conflicts"] += place[5]
            counts["collisions"] += place[6]
        return counts

    # --- events -----------------------------------------------------------------------------------------------

    def apply(self, batch: EventBatch, now: float, payload: bytes | None = None) -> None:
        """Apply a batch's events in order, from its payload where that is at hand."""
        try:
            signals = self.native.apply(payload or _payload(batch))
        except ValueError:  # the payload is not the batch's
            signals = self.native.apply(_payload(batch))
        self.told(signals, now)
        self._verify(batch, now)

    def told(self, signals: Iterable[str], now: float) -> None:
        """Take in what batches said that bears on the trust in the rank, in order."""
        for signal in signals:
            if signal == "cleared":
                self.ledger.cleared()
            else:
                self.ledger.fault(signal, now)
        self._take_media()

    def _take_media(self) -> None:
        self.unknown_media = Counter(dict(self.native.unknown_media()))

    def clear(self) -> None:
        """Forget all blocks, of every tier and group."""
        self.native.clear()

    def restart(self) -> None:
        """Begin a new life: no blocks, no geometry but that of the settings, nothing wrong."""
        self.counts["restarts"] += 1
        self.native.restart()
        self.ledger.restarted()
        self.configure(self.settings)

    def evict(self, count: int, now: float) -> int:
        """Drop up to `count` blocks of the fullest place, see `Layer.evict`. Returns how many."""
        self.ledger.fault("evicted", now)
        return self.native.evict(count)

    # --- lookups ----------------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[HashValue], num_tokens: int | None, rank: int | None) -> PrefixMatch:
        """Return how far this rank's blocks carry a request with these hashes."""
        fleet = native_module().Fleet([("", [(rank, self.native)])], self._order, PrefixMatch)
        found: PrefixMatch = fleet.longest_prefix(hashes, num_tokens, None)[""]
        return msgspec.structs.replace(found, rank=rank)

    # --- keeping ----------------------------------------------------------------------------------------------

    def places(self) -> Iterator[tuple[Place, Any]]:
        """Yield every place with its blocks."""
        for tier, remote, group, *counts in self.native.places():
            place = Place(self._order[tier], remote, group)
            yield place, NativeLayer(self.native, tier, place, counts)

    def dump(self) -> dict[str, Any]:
        """Return all that is known, as plain values: the same as the pure form's."""
        dumped = super().dump()
        # After the places: a group that is heard of meanwhile, by another thread, comes with its geometry.
        groups = [
            (
                number,
                {self._order[tier]: size for tier, size in enumerate(sizes) if size},
                smallest,
                kind,
                window or None,
                chunk or None,
            )
            for number, sizes, smallest, kind, window, chunk in self.native.groups()
        ]
        return {**dumped, "groups": groups}

    def restore(self, value: Mapping[str, Any]) -> None:
        """Take what `dump` gave, on a rank of which nothing is known yet."""
        self.ledger = Ledger.restore(value["ledger"])
        self.counts.update(value["counts"])
        for name, count in value["media"].items():
            self.native.count_medium(name, count)
        self._take_media()
        for number, sizes, smallest, kind, window, chunk in value["groups"]:
            by_tier = [sizes.get(tier, 0) for tier in self._order]
            self.native.set_group((number, by_tier, smallest, kind, window or 0, chunk or 0))
        for (tier, remote, group), blocks in value["places"]:
            for key, copies, parent, *_ in blocks:
                check_block(key, copies, parent)
            self.native.restore(self._order.index(tier), remote, group, [tuple(block) for block in blocks])


def apply_payloads(ranks: Mapping[int | None, RankMap], payloads: Sequence[bytes]) -> Told:
    """Apply batches to an engine's ranks, up to one that cannot be read or is of another; other threads run on."""
    return Told(*native_module().apply_payloads(_natives(ranks), payloads))


def make_fleet(engines: Mapping[str, Mapping[int | None, RankMap]], order: Sequence[str]) -> _native.Fleet:
    """Return the native maps of all engines' ranks, for lookups; `order`: the tiers."""
    # Of equal ranks the first one answers.
    members = [
        (name, _natives(dict(sorted(ranks.items(), key=by_number)))) for name, ranks in engines.items()
    ]
    fleet: _native.Fleet = native_module().Fleet(members, order, PrefixMatch)
    return fleet


def _natives(ranks: Mapping[int | None, RankMap]) -> list[tuple[int | None, _native.RankMap]]:
    return [(number, rank.native) for number, rank in ranks.items() if isinstance(rank, NativeRankMap)]


def _payload(batch: EventBatch) -> bytes:
    """Return a batch as some engine could have published it."""
    if any(isinstance(event, (UndecodableEvent, UnknownEvent)) for event in batch.events):
        batch = msgspec.structs.replace(batch, events=tuple(map(_stand_in, batch.events)))
    try:
        return encode_batch(batch, _NEWEST, drop_fields=True)
    except (KvHashError, OverflowError):
        # Integers of the chain before 0.10.2 are wider than a message can carry; the low 64 bits are the key. And
        # fields that the index does not read may hold what no message can carry.
        events = tuple(_narrow(event) for event in batch.events)
        return encode_batch(msgspec.structs.replace(batch, events=events), _NEWEST, drop_fields=True)


def _stand_in(event: Any) -> Any:
    """Return an event that is read as its kind is, whatever bytes it was made with."""
    if isinstance(event, UndecodableEvent):
        return msgspec.structs.replace(event, raw=_UNDECODABLE)
    return msgspec.structs.replace(event, raw=_UNKNOWN) if isinstance(event, UnknownEvent) else event


def _narrow(event: Any) -> Any:
    """Return an event of which a message can carry all that the index reads; nothing else is in it."""
    if isinstance(event, AllBlocksCleared):
        return AllBlocksCleared()
    if not isinstance(event, (BlockStored, BlockRemoved)):
        return event
    hashes = tuple(value if isinstance(value, bytes) else hash_key(value) for value in event.block_hashes)
    read: dict[str, Any] = {name: getattr(event, name) for name in ("medium", "group_idx", "locality")}
    if isinstance(event, BlockRemoved):
        return BlockRemoved(hashes, **read)
    names = ("lora_id", "lora_name", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
    read |= {name: getattr(event, name) for name in names}
    parent = event.parent_block_hash
    if event.extra_keys is not None:
        read["extra_keys"] = tuple((True,) if keys else None for keys in event.extra_keys)
    if event.lookahead_token_ids is not None:
        read["lookahead_token_ids"] = ((),) * len(event.lookahead_token_ids)
    return BlockStored(
        hashes,
        parent if parent is None or isinstance(parent, bytes) else hash_key(parent),
        tuple(map(_narrow_token, event.token_ids)),
        event.block_size,
        **read,
    )


def _narrow_token(token: Any) -> Any:
    """Return -1 for an impossible token: its event cannot be hashed, as one with any other impossible one cannot."""
    if isinstance(token, tuple):
        return tuple(map(_narrow_token, token))
    return token if 0 <= token < 1 << 64 else -1
