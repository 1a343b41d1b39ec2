"""`ResidencyIndex`: which engine holds which prefix, in which tier, and how far that can be trusted."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from kvhash._backend import native_module
from kvhash._checks import check_int
from kvhash._errors import InvalidHashError, UsageError
from kvhash.events._errors import EventDecodeError
from kvhash.events.decode import decode_batch
from kvhash.events.records import (
    BadMessage,
    Batch,
    Confirmed,
    Gap,
    Lost,
    Record,
    Recovered,
    Restart,
    Stale,
    Unconfirmed,
)
from kvhash.events.schema import EventBatch, HashValue

from .checks import (
    MAX_RANKS,
    check_batch,
    check_clock,
    check_engine,
    check_engine_settings,
    check_engines,
    check_hashes,
    check_num_tokens,
    check_payloads,
    check_rank,
    check_record,
    check_settings,
    check_tiers,
    name_bad_hash,
)
from .native import NativeRankMap, apply_payloads, make_fleet, make_rank_map
from .rank import Place, RankMap, by_number, count_medium
from .snapshot import DumpedRank, SnapshotError, seal, unseal
from .types import DEFAULT_TIERS, EngineSettings, Knowledge, PrefixMatch, State

__all__ = ["HotPrefix", "ResidencyIndex"]

#: Payloads that are applied before the bound is looked at.
_AT_ONCE = 256
#: What `ResidencyIndex.stats` counts.
COUNTS = (
    *("batches", "stored", "removed", "removed_unknown", "clears", "restarts", "evicted", "collisions"),
    *("conflicts", "tokenless", "sparse_placed", "sparse_unplaced", "undecodable", "unknown_events"),
    *("mismatches", "lost", "stale", "repeated", "bad_messages", "refused"),
)
_NEVER_HEARD = Knowledge(State.UNKNOWN, None, ("never-heard",))
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _alone(
    method: Callable[Concatenate[ResidencyIndex, _P], _R],
) -> Callable[Concatenate[ResidencyIndex, _P], _R]:
    """Return a method that one thread at a time is in."""

    @functools.wraps(method)
    def alone(index: ResidencyIndex, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with index._lock:
            return method(index, *args, **kwargs)

    return alone


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A prompt's beginning that several prompts share.

    ``key``: of its last block. ``blocks``: its length, up to where prompts part on some engine. ``below``: blocks that
    hang on it, itself included, over all engines; ``engines``: those that hold it.
    """

    key: int
    blocks: int
    below: int
    engines: tuple[str, ...]


class ResidencyIndex:
    """Residency of many engines, fed by their events; docs/index.md holds its rules.

    ``max_blocks``: blocks held over all engines; beyond it the oldest chains of the fullest place are dropped from
    their ends, which is counted and makes their rank DEGRADED. ``tiers``: medium (upper case) -> tier, in the order in
    which an engine looks, the device's first; a medium that is not there scores nothing. ``settings``: by engine,
    what events do not say. ``clock``: seconds since the epoch, for `Knowledge.since`.

    Any thread may ask. What concerns one engine (its events, `configure`, `remove`) comes from one thread at a time;
    threads that feed different engines by `apply_payloads` run side by side where the native core is built. Raises
    UsageError for a bound below 1 or no tiers.
    """

    def __init__(
        self,
        *,
        max_blocks: int | None = None,
        tiers: Mapping[str, str] = DEFAULT_TIERS,
        settings: Mapping[str, EngineSettings] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if max_blocks is not None:
            max_blocks = check_int(
                max_blocks, at="$.max_blocks", what="a bound in blocks", minimum=1, maximum=1 << 62
            )
        self.max_blocks = max_blocks
        self.tiers = check_tiers(tiers)
        self._order = list(dict.fromkeys(self.tiers.values()))
        self._clock = check_clock(clock)
        self._settings = check_settings(settings)
        self._engines: dict[str, dict[int | None, RankMap]] = {}
        self._size = 0
        #: Since when ranks beyond the bound publish, by engine.
        self._refused: dict[str, float] = {}
        # What was counted of the index itself and of engines that are gone.
        self._counts: Counter[str] = Counter()
        self._media: Counter[str] = Counter()
        # The native maps as lookups take them; made anew after ranks came or went.
        self._fleet: Any = None
        # For all of the above, and for ledgers; the native maps have locks of their own.
        self._lock = threading.RLock()

    # --- feeding ----------------------------------------------------------------------------------------------

    @_alone
    def configure(self, engine: str, settings: EngineSettings) -> None:
        """Tell what events do not say of an engine; for what comes from now on. Best before its first event."""
        self._settings[check_engine(engine)] = check_engine_settings(settings)
        for rank in self._engines.get(engine, {}).values():
            rank.configure(settings)

    @_alone
    def apply(self, engine: str, batch: EventBatch) -> None:
        """Apply one batch of an engine, whose rank it carries.

        The caller vouches that batches come in order and from the stream's beginning; `apply_record` needs no such
        promise. Raises UsageError for a batch with values that no batch has, and then changes nothing.
        """
        self._apply_unnumbered(check_engine(engine), check_batch(batch))
        self._keep_bound()

    def _apply_unnumbered(self, engine: str, batch: EventBatch, payload: bytes | None = None) -> None:
        rank = self._rank(engine, batch.data_parallel_rank)
        if rank is not None:
            rank.ledger.unnumbered(batch.ts)
            self._apply(rank, batch, payload)

    def apply_payloads(self, engine: str, payloads: Iterable[bytes]) -> None:
        """Apply batches as they were published, in order: `decode_batch` and `apply` for each.

        Where the native core is built this is the fast way in. All are taken before the first is applied. Raises
        UsageError for what is no bytes, and EventDecodeError for the first that is no batch, with its place: those
        before it are applied, and the engine's ranks are DEGRADED (``undecodable``).
        """
        todo = check_payloads(payloads)
        check_engine(engine)
        fast = native_module() is not None and self._settings.get(engine, EngineSettings()).hashing is None
        for first in range(0, len(todo), _AT_ONCE):
            try:
                self._apply_some(engine, todo[first : first + _AT_ONCE], first, fast=fast)
            finally:
                with self._lock:
                    self._keep_bound()

    def _apply_some(self, engine: str, payloads: list[bytes], first: int, *, fast: bool) -> None:
        at, alone = 0, 1
        while at < len(payloads):
            ranks = self._engines.get(engine)
            if fast and ranks:
                done = self._apply_native(ranks, payloads[at:])
                at += done
                # Who names ever new ranks does not make each of them cost a walk over all that there are.
                alone = 1 if done else 2 * alone
            for payload in payloads[
                at : at + alone
            ]:  # of a rank not heard of, or not to be read, or to be verified
                batch = self._decoded(engine, payload, first + at)
                with self._lock:
                    self._apply_unnumbered(engine, batch, payload)
                at += 1

    def _decoded(self, engine: str, payload: bytes, at: int) -> EventBatch:
        try:
            return decode_at(payload, at)
        except EventDecodeError:
            with self._lock:
                self._counts["bad_messages"] += 1
                for rank in self._engines.get(engine, {}).values():  # who cannot be told
                    rank.ledger.fault("undecodable", self._clock())
            raise

    def _apply_native(self, ranks: dict[int | None, RankMap], payloads: list[bytes]) -> int:
        told = apply_payloads(ranks, payloads)  # without the lock
        with self._lock:
            now = self._clock()
            for number, ts, signals in told.signals:
                rank = ranks[number]
                rank.ledger.unnumbered(ts)
                if isinstance(rank, NativeRankMap):
                    rank.told(signals, now)
            self._size += told.grown
        return told.done

    @_alone
    def apply_record(self, engine: str, record: Record) -> None:
        """Apply one record of a subscriber that follows this engine (see `kvhash.events.records`).

        Raises UsageError for what is no record, and then changes nothing.
        """
        now = self._clock()
        check_engine(engine)
        check_record(record)
        if isinstance(record, BadMessage) and record.seq is None:
            # Not one of the publisher's numbers: a batch behind it shows as a gap.
            self._counts["bad_messages"] += 1
            return
        rank = self._rank(engine, record.rank)
        if rank is None:
            return
        if isinstance(record, Batch):
            place = rank.ledger.accept(record.seq, record.batch.ts, now)
            if place == "again":
                self._counts["repeated"] += 1
                return
            if place == "new-life":
                self._restart(rank)
                rank.ledger.accept(record.seq, record.batch.ts, now)
            self._apply(rank, record.batch, record.payload)
            self._keep_bound()
        elif isinstance(record, Gap):
            rank.ledger.gap(record.first, record.last, now)
        elif isinstance(record, Recovered):
            rank.ledger.recovered(record.first, record.last)
        elif isinstance(record, Lost):
            rank.ledger.lost(record.first, record.last, now)
            self._counts["lost"] += max(0, record.last - record.first + 1)
        elif isinstance(record, Restart):
            self._restart(rank)
        elif isinstance(record, BadMessage):
            self._counts["bad_messages"] += 1
            # Who cannot be told: any rank behind this endpoint may have said it.
            several = self._engines[engine] if record.rank is None else {record.rank: rank}
            for each, map_ in several.items():
                map_.ledger.unreadable(record.seq if each == record.rank else None, now)
        elif isinstance(record, Stale):
            self._counts["stale"] += 1
            rank.ledger.stale(now)
        elif isinstance(record, Confirmed):
            rank.ledger.confirmed()
        elif isinstance(record, Unconfirmed):
            rank.ledger.fault("unconfirmed", now)

    @_alone
    def remove(self, engine: str) -> bool:
        """Forget an engine, but for its settings and what was counted; returns whether it was known."""
        ranks = self._engines.pop(check_engine(engine), None)
        self._refused.pop(engine, None)
        self._fleet = None
        if ranks is None:
            return False
        for rank in ranks.values():
            self._size -= rank.size
            self._counts.update(rank.all_counts())
            for medium, count in rank.unknown_media.items():
                count_medium(self._media, medium, count)
        return True

    def _rank(self, engine: str, number: int | None) -> RankMap | None:
        """Return a rank, a new one where it was not heard of; None, and counted, where that would be one too many."""
        ranks = self._engines.setdefault(engine, {})
        rank = ranks.get(number)
        if rank is not None:
            return rank
        if len(ranks) >= MAX_RANKS:
            self._counts["refused"] += 1
            self._refused.setdefault(engine, self._clock())
            return None
        self._fleet = None
        rank = ranks[number] = make_rank_map(self.tiers, self._settings.get(engine, EngineSettings()))
        return rank

    def _apply(self, rank: RankMap, batch: EventBatch, payload: bytes | None = None) -> None:
        before = rank.size
        rank.apply(batch, self._clock(), payload)
        self._size += rank.size - before

    def _keep_bound(self) -> None:
        if self.max_blocks is not None and self._size > self.max_blocks:
            self._evict(self._clock())

    def _restart(self, rank: RankMap) -> None:
        self._size -= rank.size
        rank.restart()

    def _evict(self, now: float) -> None:
        """Come down to the bound, and a hundredth below it so that not every store evicts."""
        assert self.max_blocks is not None
        target = self.max_blocks - self.max_blocks // 100
        while self._size > target:
            ranks = (rank for ranks in self._engines.values() for rank in ranks.values())
            fullest = max(ranks, key=_fullest, default=None)
            if fullest is None or not fullest.fullest:
                return  # what another thread took away meanwhile is not reckoned yet
            self._size -= fullest.evict(self._size - target, now)

    # --- asking -----------------------------------------------------------------------------------------------

    def longest_prefix(
        self,
        hashes: Sequence[HashValue],
        engines: Iterable[str] | None = None,
        *,
        num_tokens: int | None = None,
    ) -> dict[str, PrefixMatch]:
        """Return what each engine holds of a prompt, given as its block hashes in order.

        `hashes`: digests or integers, each over the engine's tokens per hash. `engines`: those asked (default: all
        that are known); one that is not known holds nothing. `num_tokens`: of the prompt, so that a hit leaves its
        last token to compute. Of an engine's ranks the one with most usable tokens answers. Blocks are matched by
        hash alone, and a hash covers adapter, salt and images: those of another adapter never match.

        Raises UsageError, and InvalidHashError for what is no block hash; of those between the first and the last only
        where the search reads it.
        """
        num_tokens, asked = check_num_tokens(num_tokens), check_engines(engines)
        hashes = check_hashes(hashes)
        try:
            return self._longest_prefix(hashes, asked, num_tokens)
        except (TypeError, InvalidHashError):
            name_bad_hash(hashes)
            raise

    def _longest_prefix(
        self, hashes: Sequence[HashValue], asked: list[str] | None, num_tokens: int | None
    ) -> dict[str, PrefixMatch]:
        if native_module() is not None:
            found: dict[str, PrefixMatch] = self._all().longest_prefix(hashes, num_tokens, asked)
            return found if asked is None else {engine: found[engine] for engine in asked}
        with self._lock:
            asked = list(self._engines) if asked is None else asked
            return {engine: self._match(engine, hashes, num_tokens) for engine in asked}

    def _all(self) -> Any:
        """Return the native maps of all engines."""
        fleet = self._fleet
        if fleet is None:
            with self._lock:
                fleet = self._fleet = make_fleet(self._engines, self._order)
        return fleet

    def _match(self, engine: str, hashes: Sequence[HashValue], num_tokens: int | None) -> PrefixMatch:
        best = PrefixMatch()
        for number, rank in sorted(self._engines.get(engine, {}).items(), key=by_number):
            best = better_match(best, rank.match(hashes, num_tokens, number))
        return best

    @_alone
    def engines(self) -> list[str]:
        """Return the engines that were heard of, the first one first."""
        return list(self._engines)

    @_alone
    def ranks(self, engine: str) -> list[int | None]:
        """Return an engine's ranks, the first one heard of first."""
        return list(self._engines.get(check_engine(engine), ()))

    @_alone
    def knowledge(self, engine: str, rank: int | None | str = "all") -> Knowledge:
        """Return how far the index may be trusted about an engine: the worst of its ranks, or one of them."""
        ranks = self._engines.get(check_engine(engine), {})
        if rank != "all":
            number = check_rank(rank)
            return ranks[number].ledger.knowledge() if number in ranks else _NEVER_HEARD
        return worst_knowledge(
            [one.ledger.knowledge() for one in ranks.values()], refused_since=self._refused.get(engine)
        )

    @_alone
    def position(self, engine: str, rank: int | None) -> int | None:
        """Return the number of the last batch applied, to go on from after a `load`; None where none was."""
        ranks = self._engines.get(check_engine(engine), {})
        number = check_rank(rank)
        return ranks[number].ledger.last_seq if number in ranks else None

    @_alone
    def holdings(self, engine: str) -> dict[tuple[int | None, Place], dict[int, int]]:
        """Return all that an engine holds: by rank and place, key -> copies."""
        return {
            (number, place): {key: block.copies for key, block in layer.items()}
            for number, rank in self._engines.get(check_engine(engine), {}).items()
            for place, layer in rank.places()
            if len(layer)
        }

    @_alone
    def blocks_by_tier(self, engine: str) -> dict[str, int]:
        """Return how many blocks an engine holds in each tier, ``TIER (remote)`` apart."""
        counted: Counter[str] = Counter()
        for (_, place), held in self.holdings(engine).items():
            counted[place.tier + (" (remote)" if place.remote else "")] += len(held)
        return dict(counted)

    @_alone
    def hottest_prefixes(self, limit: int = 10) -> list[HotPrefix]:
        """Return the beginnings on which most blocks hang, over all engines' device tiers: `limit` (0 or more) at most.

        Raises UsageError for another `limit`.
        """
        limit = check_int(limit, at="$.limit", what="a number of prefixes", minimum=0)
        device = next(iter(self.tiers.values()))
        found: dict[int, HotPrefix] = {}
        for engine, ranks in self._engines.items():
            for rank in ranks.values():
                for place, layer in rank.places():
                    if place.tier == device and not place.remote:
                        for first, end, depth, below in layer.beginnings():
                            hot = HotPrefix(end, depth, below, (engine,))
                            found[first] = _joined(found[first], hot) if first in found else hot
        return sorted(found.values(), key=lambda hot: (-hot.below, hot.key))[:limit]

    def __len__(self) -> int:
        """How many blocks are held, over all engines and places."""
        return self._size

    @_alone
    def stats(self) -> dict[str, Any]:
        """Return what is held now, and what was counted since the index was made; docs/index.md says what each is.

        ``engines``, ``blocks``, ``reachable`` are of now. All others only grow, also when an engine is removed.
        """
        counts, media = Counter(self._counts), Counter(self._media)
        reachable = 0
        for ranks in self._engines.values():
            for rank in ranks.values():
                counts.update(rank.all_counts())
                for medium, count in rank.unknown_media.items():
                    count_medium(media, medium, count)
                reachable += sum(layer.reachable for _, layer in rank.places())
        return {
            "engines": len(self._engines),
            "blocks": self._size,
            "reachable": reachable,
            **{name: counts[name] for name in COUNTS},
            "unknown_media": dict(media),
        }

    # --- keeping ----------------------------------------------------------------------------------------------

    @_alone
    def snapshot(self) -> bytes:
        """Return all that is known, for `load`."""
        engines = {
            engine: [(number, rank.dump()) for number, rank in ranks.items()]
            for engine, ranks in self._engines.items()
        }
        return seal(
            {"counts": self._counts, "media": self._media, "refused": self._refused, "engines": engines}
        )

    @_alone
    def load(self, data: bytes) -> None:
        """Take the place of all that is known, if anything is, by a snapshot of either form. Settings are not in it.

        Every rank is DEGRADED (``restored``) until its stream shows that it is the same life: by the batch at
        `position` once more, which a subscriber gets that goes on from there. Raises SnapshotError, or UsageError
        for what is no bytes, and then changes nothing.
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise UsageError(f"expected a snapshot as bytes, got {type(data).__name__}", at="$.data")
        value = unseal(data, self._order)
        engines: dict[str, dict[int | None, RankMap]] = {}
        try:
            for engine, ranks in value.engines.items():
                settings = self._settings.get(engine, EngineSettings())
                engines[engine] = {
                    number: self._restored(make_rank_map(self.tiers, settings), dumped)
                    for number, dumped in ranks
                }
        except (ValueError, OverflowError) as error:
            raise SnapshotError(f"the snapshot holds what no index does: {error}") from None
        self._counts, self._media = Counter(value.counts), Counter(value.media)
        self._engines, self._refused, self._fleet = engines, value.refused, None
        self._size = sum(rank.size for ranks in engines.values() for rank in ranks.values())
        self._keep_bound()

    def _restored(self, rank: RankMap, dumped: DumpedRank) -> RankMap:
        rank.restore(msgspec.to_builtins(dumped, builtin_types=(bytes,)))
        rank.ledger.fault("restored", self._clock())
        return rank


def decode_at(payload: bytes, at: int) -> EventBatch:
    """Return the batch of the payload at a place among several; raises EventDecodeError with that place."""
    try:
        return decode_batch(payload)
    except EventDecodeError as error:
        place = f"$[{at}]{(error.at or '$').removeprefix('$')}"
        raise EventDecodeError(error.message, at=place, code=error.code) from None


def better_match(one: PrefixMatch, other: PrefixMatch) -> PrefixMatch:
    """Return the match of more usable tokens, then of more blocks, then of more remote ones; `one` of equals."""

    def worth(match: PrefixMatch) -> tuple[int, int, int]:
        return match.usable_tokens, match.blocks, sum(match.remote.values())

    return other if worth(other) > worth(one) else one


def worst_knowledge(each: Sequence[Knowledge], *, refused_since: float | None = None) -> Knowledge:
    """Return the knowledge of an engine from that of its ranks: the worst state, every reason, the oldest times.

    `refused_since`: when a rank was refused of which, then, nothing is known.
    """
    if not each:
        return _NEVER_HEARD
    if refused_since is not None:
        each = [*each, Knowledge(State.DEGRADED, refused_since, ("refused",))]
    order = [State.EXACT, State.DEGRADED, State.UNKNOWN]
    return Knowledge(
        max((one.state for one in each), key=order.index),
        min((one.since for one in each if one.since is not None), default=None),
        tuple(sorted({reason for one in each for reason in one.reasons})),
        min((one.as_of for one in each if one.as_of is not None), default=None),
    )


def _fullest(rank: RankMap) -> int:
    return rank.fullest


def _joined(one: HotPrefix, other: HotPrefix) -> HotPrefix:
    """Return what two places hold of the prompts with one first block; they go together as far as in both."""
    shorter = min(one, other, key=lambda hot: hot.blocks)
    engines = tuple(dict.fromkeys((*one.engines, *other.engines)))
    return HotPrefix(shorter.key, shorter.blocks, one.below + other.below, engines)
