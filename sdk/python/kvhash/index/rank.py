"""One data parallel rank of an engine: its blocks by place, its groups' geometry, and what is known of its stream."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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
from kvhash.events.verify import Verifier

from .layer import UNPLACED, Layer
from .ledger import Ledger
from .match import Combination, GroupView, Request, continue_in_tier, kind_of
from .placing import Placing
from .types import MAX_BLOCK_TOKENS, MAX_GROUPS, EngineSettings, PrefixMatch

__all__ = ["Blocks", "Group", "Place", "RankMap", "by_number", "check_block", "count_medium"]

#: Why a block may be not derivable though the settings are right, or because they are wrong: where this is so of
#: `_ENOUGH` blocks and not one was confirmed, nothing says that lookups can hit.
_TELLING = ("extra-keys-unpublished", "block-size", "parent-mismatch", "unknown-parent", "sparse-blocks")
_ENOUGH = 16
#: How many names of unknown media are counted apart.
_MAX_NAMES = 64


@dataclass(frozen=True, order=True, slots=True)
class Place:
    """Where blocks are: the tier, whether it is a REMOTE one, and the KV cache group."""

    tier: str
    remote: bool
    group: int


@dataclass(slots=True)
class Group:
    """A KV cache group as its events (or the settings) describe it.

    ``sizes``: tokens per block by tier, the largest seen: a block that is found at a hash inside it says less.
    ``smallest``: the greatest common divisor of all sizes seen.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    smallest: int = 0
    kind: str | None = None
    window: int | None = None
    chunk: int | None = None

    def learn(self, tier: str, size: int, kind: str | None, window: int | None) -> None:
        """Take in what one event says."""
        if size > 0:
            self.sizes[tier] = max(self.sizes.get(tier, 0), size)
            self.smallest = math.gcd(self.smallest, size)
        self.kind = kind or self.kind
        if window is not None and window > 0:
            self.window = window


class Blocks(Protocol):
    """Who keeps a rank's blocks where the rank itself does not."""

    def store(self, place: Place, event: BlockStored) -> None:
        """Take in an event's blocks."""

    def remove(self, place: Place, event: BlockRemoved) -> None:
        """Take an event's blocks away."""

    def clear(self) -> None:
        """Forget all blocks."""

    def stored_to(self) -> Iterable[Place]:
        """Return the places that this life has stored to."""


class RankMap:
    """What one rank holds."""

    def __init__(self, tiers: Mapping[str, str], settings: EngineSettings) -> None:
        self.ledger = Ledger()
        self.counts: Counter[str] = Counter()
        self.unknown_media: Counter[str] = Counter()
        self.layers: dict[Place, Layer] = {}
        self.groups: dict[int, Group] = {}
        self._tiers = tiers
        self._order = list(dict.fromkeys(tiers.values()))
        self.configure(settings)

    def configure(self, settings: EngineSettings) -> None:
        """Take settings for what comes from now on."""
        self.settings = settings
        self._verifier = None if settings.hashing is None else Verifier(**settings.hashing)
        self._placing = Placing(settings, None if self._verifier is None else self._verifier.hasher)
        self._verified = 0
        self._confirmed = self._unconfirmed = 0
        self.ledger.faults.pop("hash-mismatch", None)
        self.ledger.faults.pop("hash-unverified", None)
        for number, given in settings.groups.items():
            self.groups[number] = Group(
                {self._order[0]: given.block_size},
                given.block_size,
                given.kind,
                given.sliding_window,
                given.attention_chunk_size,
            )

    @property
    def size(self) -> int:
        """How many blocks are held, over all places."""
        return sum(map(len, self.layers.values()))

    def all_counts(self) -> Counter[str]:
        """Return the counts, those of the places included."""
        counts = Counter(self.counts)
        for layer in self.layers.values():
            counts["conflicts"] += layer.conflicts
            counts["collisions"] += layer.collisions
        return counts

    @property
    def unit(self) -> int:
        """Tokens per hash; 0 where nothing says it."""
        if self.settings.tokens_per_hash is not None:
            return self.settings.tokens_per_hash
        if self._verifier is not None:
            return self._verifier.hasher.span
        return math.gcd(*(group.smallest for group in self.groups.values()))

    # --- events -----------------------------------------------------------------------------------------------

    def apply(self, batch: EventBatch, now: float, payload: bytes | None = None) -> None:
        """Apply a batch's events in order. `payload`: the batch as it was published, where that is at hand."""
        del payload
        self.counts["batches"] += 1
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._store(event, now)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                self._apply_other(event, now, self.layers)
        self._verify(batch, now)

    def _apply_other(
        self,
        event: AllBlocksCleared | UnknownEvent | UndecodableEvent,
        now: float,
        places: Iterable[Place],
    ) -> None:
        """Apply an event that is about no single block; `places`: those that this life has stored to."""
        if isinstance(event, AllBlocksCleared):
            self.counts["clears"] += 1
            self.clear()
            self.ledger.cleared()
            if any(place.remote or place.tier != self._order[0] for place in places):
                self.ledger.fault("cleared-below", now)
        elif isinstance(event, UndecodableEvent):
            self.counts["undecodable"] += 1
            self.ledger.fault("undecodable", now)
        else:
            self.counts["unknown_events"] += 1
            self.ledger.fault("unknown-event", now)

    def clear(self) -> None:
        """Forget all blocks, of every tier and group."""
        self.counts = self.all_counts()
        self.layers = {place: Layer() for place in self.layers}

    def restart(self) -> None:
        """Begin a new life: no blocks, no geometry but that of the settings, nothing wrong."""
        self.counts["restarts"] += 1
        self.clear()
        self.layers.clear()
        self.groups.clear()
        self.ledger.restarted()
        self.configure(self.settings)

    def _verify(self, batch: EventBatch, now: float) -> None:
        if self._verifier is None or self._verified >= self.settings.verify_blocks:
            return
        for check in self._verifier.feed(batch):
            self._verified += 1
            if check.verdict == "mismatch":
                self.counts["mismatches"] += 1
                self.ledger.fault("hash-mismatch", now)
            elif check.verdict == "match":
                self._confirmed += 1
                self.ledger.faults.pop("hash-unverified", None)
            elif check.reason in _TELLING:
                self._unconfirmed += 1
        unknown = not self._confirmed and self._unconfirmed >= _ENOUGH
        if unknown and "hash-mismatch" not in self.ledger.faults:
            self.ledger.fault("hash-unverified", now)

    def _tier(self, medium: str | None) -> str | None:
        name = "GPU" if medium is None else medium.upper()
        tier = self._tiers.get(name)
        if tier is None:
            count_medium(self.unknown_media, name)
        return tier

    def _refuses(self, place: Place, event: BlockStored, now: float) -> bool:
        """Return whether this would be one group more than an engine has, or has blocks that none has; counted."""
        one_too_many = place.group not in self.groups and len(self.groups) >= MAX_GROUPS
        if not one_too_many and self._placing.block_tokens(event) <= MAX_BLOCK_TOKENS:
            return False
        self.counts["refused"] += 1
        self.ledger.fault("refused", now)
        return True

    def place_of(self, event: BlockStored | BlockRemoved) -> Place | None:
        """Return where an event's blocks are; None, and counted, where that scores nothing."""
        tier = self._tier(event.medium)
        return None if tier is None else Place(tier, _is_remote(event.locality), event.group_idx or 0)

    def _learn(self, place: Place, event: BlockStored) -> None:
        group = self.groups.setdefault(place.group, Group())
        size = self._placing.block_tokens(event)
        group.learn(place.tier, size, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)

    def apply_elsewhere(self, batch: EventBatch, now: float, blocks: Blocks) -> None:
        """Do for a batch all that `apply` does except hold its blocks, which `blocks` takes."""
        self.counts["batches"] += 1
        for event in batch.events:
            if isinstance(event, BlockStored):
                place = self.place_of(event)
                if place is not None and not self._refuses(place, event, now):
                    self._learn(place, event)
                    self.counts["stored"] += len(event.block_hashes)
                    blocks.store(place, event)
            elif isinstance(event, BlockRemoved):
                place = self.place_of(event)
                if place is not None:
                    self.counts["removed"] += len(event.block_hashes)
                    blocks.remove(place, event)
            else:
                if isinstance(event, AllBlocksCleared):
                    blocks.clear()
                self._apply_other(event, now, blocks.stored_to())
        self._verify(batch, now)

    @property
    def coarsest(self) -> int:
        """How many hashes the largest block or chunk spans."""
        sizes = [size for group in self.groups.values() for size in group.sizes.values()]
        blocks = max(sizes, default=0) // (self.unit or 1)
        return max(1, blocks) * (self.settings.offload_chunk_blocks or 1)

    def _store(self, event: BlockStored, now: float) -> None:
        place = self.place_of(event)
        if place is None or self._refuses(place, event, now):
            return
        tier, number = place.tier, place.group
        self._learn(place, event)
        layer = self.layers.get(place)
        if layer is None:
            layer = self.layers[place] = Layer()
        keys = [hash_key(value) for value in event.block_hashes]
        parents = self._placing.parents(event, keys, self.counts)
        device = tier == self._order[0]
        others = [other for at, other in self.layers.items() if at.group == number and other is not layer]
        last = len(keys) - 1
        for index, (key, parent) in enumerate(zip(keys, parents, strict=True)):
            if parent == UNPLACED:
                parent = _known_parent(others, key)
            ends_chunk = device or not event.token_ids or index == last
            new = layer.store(key, parent, _digest(event.block_hashes[index]), ends_chunk)
            if new is None:
                self.ledger.fault("collision", now)
                continue
            self.counts["stored"] += 1
            if not new and self.settings.reports_reuse:
                layer.blocks[key].copies = 1
                self.ledger.fault("reuse-reported", now)
            if parent != UNPLACED:
                for other in others:
                    block = other.blocks.get(key)
                    if block is not None and block.parent == UNPLACED:
                        other.place(key, parent)

    def _remove(self, event: BlockRemoved) -> None:
        place = self.place_of(event)
        if place is None:
            return
        layer = self.layers.get(place)
        for value in event.block_hashes:
            if layer is None or layer.remove(hash_key(value), _digest(value)) is None:
                self.counts["removed_unknown"] += 1
            else:
                self.counts["removed"] += 1

    # --- bounds -----------------------------------------------------------------------------------------------

    def evict(self, count: int, now: float) -> int:
        """Drop up to `count` blocks of the fullest place, see `Layer.evict`. Returns how many."""
        dropped = max(self.layers.values(), key=len, default=_EMPTY).evict(count)
        self.counts["evicted"] += dropped
        self.ledger.fault("evicted", now)
        return dropped

    # --- lookups ----------------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[HashValue], num_tokens: int | None, rank: int | None) -> PrefixMatch:
        """Return how far this rank's blocks carry a request with these hashes."""
        unit = self.unit
        if not unit or not hashes:
            return PrefixMatch(rank=rank)
        request = Request(hashes, unit)
        views = {tier: self._views(request, tier, remote=False) for tier in self._order}
        device = Combination(views[self._order[0]], unit) if views[self._order[0]] else None
        by_tier: dict[str, int] = {}
        length = 0 if device is None else device.longest(request.num_tokens)
        by_tier[self._order[0]] = length // unit
        for tier in self._order[1:]:
            end = self._continue(views[tier], length, request.num_tokens)
            by_tier[tier], length = (end - length) // unit, end
        remote = {}
        for tier in self._order:
            end = self._continue(self._views(request, tier, remote=True), length, request.num_tokens)
            if end > length:
                remote[tier] = (end - length) // unit
        usable = length
        limit = request.num_tokens if num_tokens is None else min(request.num_tokens, max(0, num_tokens - 1))
        if self.settings.use_eagle or length > limit:
            usable = 0 if device is None else device.longest(limit, use_eagle=self.settings.use_eagle)
            for tier in self._order[1:]:
                usable = self._continue(views[tier], usable, limit)
        return PrefixMatch(
            length // unit,
            length,
            {tier: blocks for tier, blocks in by_tier.items() if blocks},
            usable,
            remote,
            rank,
        )

    def _continue(self, groups: Sequence[GroupView], start: int, limit: int) -> int:
        if not groups or start >= limit:
            return start
        return continue_in_tier(groups, start, limit, self.settings.offload_chunk_blocks)

    def _views(self, request: Request, tier: str, *, remote: bool) -> list[GroupView]:
        """Return the groups of a tier, those of one geometry together; none where one has no whole number of hashes."""
        views: dict[tuple[Any, ...], GroupView] = {}
        numbers = {place.group for place in self.layers if (place.tier, place.remote) == (tier, remote)}
        if tier == self._order[0] and not remote:
            numbers |= set(self.settings.groups)
        for number in sorted(numbers):
            group = self.groups[number]
            kind = kind_of(group.kind, sliding_window=group.window, chunk=group.chunk)
            size = group.sizes.get(tier) or group.sizes.get(self._order[0]) or request.unit
            if size % request.unit:
                return []
            geometry = (kind, size, group.window or 0, group.chunk or 0)
            if geometry not in views:
                views[geometry] = GroupView(*geometry, request)
            layer = self.layers.get(Place(tier, remote, number))
            views[geometry].layers.append(_EMPTY if layer is None else layer)
        return list(views.values())

    @property
    def fullest(self) -> int:
        """How many blocks the fullest place holds."""
        return max(map(len, self.layers.values()), default=0)

    # --- keeping ----------------------------------------------------------------------------------------------

    def places(self) -> Iterator[tuple[Place, Layer]]:
        """Yield every place with its blocks."""
        return iter(self.layers.items())

    def dump(self) -> dict[str, Any]:
        """Return all that is known, as plain values."""
        return {
            "ledger": self.ledger.dump(),
            "counts": self.all_counts(),
            "media": self.unknown_media,
            "groups": [
                (number, g.sizes, g.smallest, g.kind, g.window, g.chunk) for number, g in self.groups.items()
            ],
            "places": [
                (
                    (place.tier, place.remote, place.group),
                    [(k, b.copies, b.parent, b.digest, b.ends_chunk) for k, b in layer.items()],
                )
                for place, layer in self.places()
            ],
        }

    def restore(self, value: Mapping[str, Any]) -> None:
        """Take what `dump` gave, on a rank of which nothing is known yet.

        Raises ValueError, TypeError or KeyError for anything else.
        """
        self.ledger = Ledger.restore(value["ledger"])
        self.counts.update(value["counts"])
        for name, count in value["media"].items():
            count_medium(self.unknown_media, name, count)
        for number, sizes, smallest, kind, window, chunk in value["groups"]:
            known = {tier: size for tier, size in sizes.items() if size}
            self.groups[number] = Group(known, smallest, kind, window or None, chunk or None)
        for place, blocks in value["places"]:
            layer = self.layers[Place(*place)] = Layer()
            for key, copies, parent, digest, ends_chunk in blocks:
                check_block(key, copies, parent)
                layer.store(key, parent, digest, ends_chunk)
                layer.blocks[key].copies = copies


def by_number(item: tuple[int | None, Any]) -> tuple[bool, int]:
    """Return where a rank's entry comes in order: the one without a number first."""
    number = item[0]
    return number is not None, number or 0


def check_block(key: Any, copies: Any, parent: Any) -> None:
    """Raise ValueError for values that no held block has."""
    whole = isinstance(key, int) and 0 <= key < 1 << 64
    if not whole or not 1 <= copies < 1 << 32 or not UNPLACED <= parent < 1 << 64:
        raise ValueError(f"block {key!r} has no sound values")


def count_medium(counts: Counter[str], name: str, count: int = 1) -> None:
    """Count events of a medium that scores nothing: by its name, of which there are `_MAX_NAMES` and ``(other)``."""
    known = name in counts or len(counts) < _MAX_NAMES
    counts[name if known else "(other)"] += count


_EMPTY = Layer()


def _known_parent(layers: Sequence[Layer], key: int) -> int:
    """Return the parent that another tier of the group knows of a block: a hash has one parent, wherever it is."""
    for layer in layers:
        block = layer.blocks.get(key)
        if block is not None and block.parent != UNPLACED:
            return block.parent
    return UNPLACED


def _digest(value: HashValue) -> bytes | None:
    return value if isinstance(value, bytes) and len(value) > 8 else None


def _is_remote(locality: str | None) -> bool:
    return locality is not None and locality.upper() == "REMOTE"
