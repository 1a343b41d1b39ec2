"""The index in a Valkey or Redis server, for several router replicas: same rules, same answers, one state.

A write is one script: it takes place only if the rank's state is the one that the writer started from, and is worked
out anew if not. So any number of replicas may follow the same engines: a batch is applied once.
"""

from __future__ import annotations

import hashlib
import inspect
import secrets
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvhash._checks import check_int
from kvhash._errors import MissingDependencyError, UsageError
from kvhash.events._errors import EventDecodeError
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
from kvhash.events.schema import EventBatch, HashValue, hash_key

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
from .rank import Place, RankMap, by_number, count_medium
from .residency import COUNTS, better_match, decode_at, worst_knowledge
from .stored import (
    ENGINES,
    ONE_TOO_MANY,
    READ,
    REFUSED,
    WRITE,
    FetchedLayer,
    Operations,
    StoredRank,
    blocks_key,
    meta_key,
    rank_name,
    rank_number,
)
from .types import DEFAULT_TIERS, EngineSettings, Knowledge, PrefixMatch, State

try:
    import redis
except ImportError:  # an extra
    redis = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from redis import Redis

__all__ = ["SharedResidencyIndex"]

_AWAY = Knowledge(State.UNKNOWN, None, ("store-unreachable",))
#: Hashes that the first read of a lookup asks for; each further one asks for twice as many.
_WINDOW = 64
#: What the server can keep as a time to live, and more than anybody waits.
_LONGEST_S = 1e10

#: What takes knowing the blocks, and is not counted here.
_OF_BLOCKS = {"evicted", "collisions", "conflicts", "tokenless", "sparse_placed", "sparse_unplaced"}
_COUNTS = (*(name for name in COUNTS if name not in _OF_BLOCKS), "dropped")


@dataclass(frozen=True, slots=True)
class _Unnumbered:
    """A batch that follows whatever its rank's last one is; None: one that cannot be read, of this rank or another.

    ``number``: which one of this writer's it is, of its engine and rank, from 1: the store keeps the last one, so that
    a write whose answer was lost is not applied again, and one that never came is missed.
    """

    rank: int | None
    batch: EventBatch | None
    number: int


class SharedResidencyIndex:
    """`ResidencyIndex` on a Valkey or Redis server; docs/scale.md says when.

    ``client``: a ``redis.Redis`` or ``redis.cluster.RedisCluster`` that does not decode responses. ``ttl_s``: an engine
    of which nothing was applied for so long is forgotten, all its keys at once. ``max_pending``: records that are kept
    while the server is away; beyond it the oldest go, which shows as a loss. ``retry_s``: while it is away it is tried
    again at most so often. No call raises because the server is away: lookups find nothing, `knowledge` is UNKNOWN
    (``store-unreachable``), records wait.

    Not kept here: parents (lookups read block by block, in pipelined windows), whole digests, a bound (the time to live
    is it). Raises MissingDependencyError without the ``redis`` package, UsageError for a client that decodes.
    """

    def __init__(
        self,
        client: Redis,
        *,
        ttl_s: float = 3600.0,
        tiers: Mapping[str, str] = DEFAULT_TIERS,
        settings: Mapping[str, EngineSettings] | None = None,
        max_pending: int = 10_000,
        retry_s: float = 0.5,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if redis is None:
            raise MissingDependencyError("the shared index needs redis: pip install 'kvhash[redis]'")
        _check_client(client)
        self.tiers = check_tiers(tiers)
        self._order = list(dict.fromkeys(self.tiers.values()))
        self._client = client
        self._script = client.register_script(WRITE)
        self._ttl_ms = int(_seconds(ttl_s, "ttl_s", 0.001) * 1000)
        self._settings = check_settings(settings)
        self._clock = check_clock(clock)
        self._retry_s = _seconds(retry_s, "retry_s", 0.0)
        self._retry_at: float | None = None
        self._pending: deque[tuple[str, Record | _Unnumbered]] = deque()
        self._max_pending = check_int(max_pending, at="$.max_pending", what="a number of records", minimum=1)
        self._ranks: dict[tuple[str, int | None], StoredRank] = {}
        # Whose the batches without numbers are, and how many of each rank there were.
        self._writer = secrets.token_bytes(8)
        self._written: Counter[tuple[str, int | None]] = Counter()
        # The life of each rank that this replica's own stream is in, as the store counts lives.
        self._lives: dict[tuple[str, int | None], int] = {}
        self._counts: Counter[str] = Counter()
        self._media: Counter[str] = Counter()
        # For what waits and is written: one thread at a time.
        self._lock = threading.RLock()

    # --- the server may be away -------------------------------------------------------------------------------

    @property
    def reachable(self) -> bool:
        """Whether the server answered the last time."""
        return self._retry_at is None

    def _try(self, work: Callable[[], Any]) -> Any:
        """Return what `work` returns, or None while the server is away."""
        if self._retry_at is not None and time.monotonic() < self._retry_at:
            return None
        try:
            result = work()
        except _away():
            self._retry_at = time.monotonic() + self._retry_s
            self._ranks.clear()  # it may come back with another state, or none
            return None
        self._retry_at = None
        return result

    # --- feeding ----------------------------------------------------------------------------------------------

    def configure(self, engine: str, settings: EngineSettings) -> None:
        """Tell this replica what events do not say of an engine."""
        with self._lock:
            self._settings[check_engine(engine)] = check_engine_settings(settings)
            self._forget_ranks(engine)

    def _forget_ranks(self, engine: str) -> None:
        for known in [known for known in self._ranks if known[0] == engine]:
            self._ranks.pop(known, None)

    def apply(self, engine: str, batch: EventBatch) -> None:
        """Apply a batch after the last one applied: for a single writer. `apply_record` is for all others."""
        check_batch(batch)
        self._take_in_unnumbered(check_engine(engine), [(batch.data_parallel_rank, batch)])

    def apply_payloads(self, engine: str, payloads: Iterable[bytes]) -> None:
        """Apply batches as they were published, in order, for a single writer; raises as `ResidencyIndex` does."""
        check_engine(engine)
        batches: list[tuple[int | None, EventBatch | None]] = []
        try:
            for at, payload in enumerate(check_payloads(payloads)):
                batch = decode_at(payload, at)
                batches.append((batch.data_parallel_rank, batch))
        except EventDecodeError:
            ranks = dict.fromkeys([*self.ranks(engine), *(rank for rank, _ in batches)])
            batches += [(rank, None) for rank in ranks]  # whose it was cannot be told
            with self._lock:
                self._counts["bad_messages"] += 1
            raise
        finally:
            self._take_in_unnumbered(engine, batches)

    def apply_record(self, engine: str, record: Record) -> None:
        """Apply one record of a subscriber that follows this engine."""
        self.apply_records(engine, (record,))

    def apply_records(self, engine: str, records: Iterable[Record]) -> None:
        """Apply records in order; those of one rank that follow each other go in one round trip.

        Raises UsageError for what is no record, and then applies none.
        """
        if not isinstance(records, Iterable):
            raise UsageError(f"expected records, got {type(records).__name__}", at="$.records")
        self._take_in(check_engine(engine), [check_record(record) for record in records])

    def _take_in_unnumbered(
        self, engine: str, batches: Iterable[tuple[int | None, EventBatch | None]]
    ) -> None:
        with self._lock:
            numbered = []
            for rank, batch in batches:
                self._written[engine, rank] += 1
                numbered.append(_Unnumbered(rank, batch, self._written[engine, rank]))
            self._take_in(engine, numbered)

    def _take_in(self, engine: str, records: Sequence[Record | _Unnumbered]) -> None:
        with self._lock:
            for record in records:
                if isinstance(record, BadMessage) and record.seq is None:
                    self._counts["bad_messages"] += 1
                    continue
                self._pending.append((engine, record))
                if len(self._pending) > self._max_pending:
                    self._pending.popleft()
                    self._counts["dropped"] += 1
            self.flush()

    def flush(self) -> bool:
        """Write what waits; returns whether nothing is left."""
        with self._lock:
            while self._pending:
                engine, rank = self._pending[0][0], self._pending[0][1].rank
                group: list[Record | _Unnumbered] = []
                for name, record in self._pending:
                    if (name, record.rank) != (engine, rank) or len(group) == 256:
                        break
                    group.append(record)
                if self._try(lambda: self._write(engine, rank, group)) is None:  # noqa: B023 - called at once
                    return False
                for _ in group:
                    self._pending.popleft()
        return True

    @property
    def pending(self) -> int:
        """How many records wait for the server."""
        return len(self._pending)

    def _write(self, engine: str, number: int | None, records: Sequence[Record | _Unnumbered]) -> bool:
        known, now = (engine, number), self._clock()
        while True:
            rank = self._ranks.get(known)
            fetched = rank is None
            if rank is None:
                raw = self._client.hget(meta_key(engine), rank_name(number)) or b""
                rank = StoredRank(self.tiers, self._settings.get(engine, EngineSettings()), raw)  # type: ignore[arg-type]
            former = rank.raw
            life = min(self._lives.get(known, rank.life), rank.life)  # the store may have lost some
            rank.forget_former_places()
            operations = Operations(rank, self._order[0], now)
            for record in records:
                life = self._take(rank, record, life, operations, now)
            raw = rank.dump()
            if raw == former and not operations.packed:
                written = 0
            else:
                keys = [meta_key(engine)]
                for place in rank.places:
                    keys += [blocks_key(engine, "b", number, place), blocks_key(engine, "e", number, place)]
                args = (
                    rank_name(number),
                    former,
                    raw,
                    self._ttl_ms,
                    bytes(operations.packed),
                    MAX_RANKS,
                    now,
                )
                written = self._script(keys=keys, args=args)
                if written == ONE_TOO_MANY:
                    self._counts["refused"] += len(records)
                    return True
            if written >= 0:
                if fetched:  # whoever wrote it first may have lost the answer, and never named it
                    self._client.sadd(ENGINES, engine)
                rank.raw = raw
                self._ranks[known] = rank
                if any(isinstance(record, (Batch, Restart)) for record in records):
                    self._lives[known] = life
                self._count(rank.map, written + operations.unknown)
                return True
            self._ranks.pop(known, None)  # another replica was first

    def _count(self, rank: RankMap, unknown: int) -> None:
        """Count what was written of a rank; `unknown`: removals that met nothing."""
        self._counts.update(rank.counts)
        self._counts["removed"] -= unknown
        self._counts["removed_unknown"] += unknown
        rank.counts.clear()
        for medium, count in rank.unknown_media.items():
            count_medium(self._media, medium, count)
        rank.unknown_media.clear()

    def _take(
        self,
        rank: StoredRank,
        record: Record | _Unnumbered,
        life: int,
        operations: Operations,
        now: float,
    ) -> int:
        """Work one record into a rank's state; returns the life that this replica's stream is in."""
        ledger = rank.map.ledger
        if isinstance(record, _Unnumbered):
            before = rank.writers.get(self._writer)
            if before is not None and record.number <= before:
                rank.map.counts["repeated"] += 1  # it was written, and the answer was lost
                return rank.life
            if record.number != (before or 0) + 1:  # the rest was dropped here, or forgotten there
                ledger.fault("joined-late" if before is None else "lost", now)
            rank.wrote(self._writer, record.number)
            if record.batch is None:
                ledger.fault("undecodable", now)
            else:
                ledger.accept(ledger.next_seq, record.batch.ts, now)
                rank.map.apply_elsewhere(record.batch, now, operations)
            return rank.life
        if isinstance(record, Restart):
            if rank.life > life:
                return life + 1  # another replica said so already
            self._new_life(rank, operations)
            return rank.life
        if isinstance(record, Batch) and record.seq == 0 and rank.origin:
            if _origin(record) == rank.origin:
                # This replica's stream is in the life that is stored, as it has seen it begin.
                life = rank.life
                ledger.faults.pop("unconfirmed", None)
            elif life == rank.life:
                doubt = ledger.faults.get("unconfirmed")
                self._new_life(rank, operations)  # no other replica has seen this one begin
                ledger, life = rank.map.ledger, rank.life
                if doubt is not None:
                    ledger.fault(
                        "unconfirmed", doubt
                    )  # this replica may have said so, and its stream is none the surer
        if isinstance(record, Batch) and (record.seq, record.batch.ts) == (ledger.last_seq, ledger.last_ts):
            life = rank.life  # it has what is stored last
        if life < rank.life:
            # The other replicas are in a later life. A batch that is newer than all that they brought is of it too,
            # whether or not this replica's subscriber noticed where it began.
            latest = rank.floor if ledger.last_ts is None else ledger.last_ts
            if not isinstance(record, Batch) or (latest is not None and record.batch.ts <= latest):
                return life
            if record.seq not in (0, ledger.next_seq):
                ledger.fault("other-life", now)
                return life
        if isinstance(record, Batch):
            # It may be of a life that another replica has not seen.
            doubtful = life < rank.life or _is_before(record.batch.ts, ledger.last_ts)
            place = ledger.accept(record.seq, record.batch.ts, now)
            if place == "next" and doubtful:
                ledger.fault("other-life", now)
            if place == "again":
                rank.map.counts["repeated"] += 1
                return life
            if place == "new-life":
                self._new_life(rank, operations)
                ledger = rank.map.ledger
                ledger.accept(record.seq, record.batch.ts, now)
            if record.seq == 0:
                rank.origin = _origin(record)
            rank.map.apply_elsewhere(record.batch, now, operations)
            return rank.life if place == "new-life" else life
        last = -1 if ledger.last_seq is None else ledger.last_seq
        if isinstance(record, (Gap, Lost)) and record.last > last:
            note = ledger.gap if isinstance(record, Gap) else ledger.lost
            first = max(record.first, last + 1)
            note(first, record.last, now)
            if isinstance(record, Lost):
                rank.map.counts["lost"] += max(0, record.last - first + 1)
        elif isinstance(record, Recovered):
            ledger.recovered(record.first, record.last)
        elif isinstance(record, BadMessage) and record.seq is not None and record.seq > last:
            rank.map.counts["bad_messages"] += 1
            ledger.unreadable(record.seq, now)
        elif isinstance(record, Stale):
            rank.map.counts["stale"] += 1
            ledger.stale(now)
        elif isinstance(record, Confirmed):
            ledger.confirmed()
        elif isinstance(record, Unconfirmed):
            ledger.fault("unconfirmed", now)
        return life

    def _new_life(self, rank: StoredRank, operations: Operations) -> None:
        operations.clear()
        rank.floor = rank.map.ledger.last_ts or rank.floor
        rank.map.restart()
        rank.origin = b""
        rank.heard.clear()
        rank.life += 1

    def remove(self, engine: str) -> bool:
        """Forget an engine and what waits of it; returns whether it was known. False, too, while the server is away."""
        check_engine(engine)

        def work() -> bool:
            keys = [meta_key(engine)]
            for number, rank in self._read(engine).items():
                for place in rank.places:
                    keys += [blocks_key(engine, "b", number, place), blocks_key(engine, "e", number, place)]
            self._client.srem(ENGINES, engine)
            return bool(self._client.delete(*keys))

        with self._lock:
            self._forget_ranks(engine)
            removed = self._try(work)
            if removed is not None:
                self._pending = deque(item for item in self._pending if item[0] != engine)
                for of_ranks in (self._lives, self._written):
                    for known in [known for known in of_ranks if known[0] == engine]:
                        del of_ranks[known]
        return bool(removed)

    # --- asking -----------------------------------------------------------------------------------------------

    def longest_prefix(
        self,
        hashes: Sequence[HashValue],
        engines: Iterable[str] | None = None,
        *,
        num_tokens: int | None = None,
    ) -> dict[str, PrefixMatch]:
        """Return what each engine holds of a prompt, as `ResidencyIndex.longest_prefix` does.

        Reads all engines together, in windows of hashes that double, until no engine holds anything of one. While
        the server is away the engines that were asked for hold nothing.
        """
        num_tokens, given = check_num_tokens(num_tokens), check_engines(engines)
        hashes = check_hashes(hashes)
        name_bad_hash(hashes)
        asked = self.engines() if given is None else given
        found: dict[str, PrefixMatch] | None = self._try(lambda: self._match(asked, hashes, num_tokens))
        return {engine: PrefixMatch() for engine in asked} if found is None else found

    def _match(
        self, engines: Sequence[str], hashes: Sequence[HashValue], num_tokens: int | None
    ) -> dict[str, PrefixMatch]:
        ranks = {
            (engine, number): rank
            for engine, each in zip(engines, self._read_many(engines), strict=True)
            for number, rank in each.items()
        }
        self._fetch(ranks, [hash_key(value) for value in hashes])
        matches = {engine: PrefixMatch() for engine in engines}
        for (engine, number), rank in ranks.items():
            matches[engine] = better_match(matches[engine], rank.map.match(hashes, num_tokens, number))
        return matches

    def _fetch(self, ranks: Mapping[tuple[str, int | None], StoredRank], keys: Sequence[int]) -> None:
        """Read which of `keys` each rank holds into its layers, as far as any of its places holds some."""
        alive = dict(ranks)
        layers = {
            (known, place): FetchedLayer(len(keys), chunked=place.tier != self._order[0])
            for known, rank in alive.items()
            for place in rank.heard
        }
        for known, rank in alive.items():
            rank.map.layers = {place: layers[known, place] for place in rank.heard}
        start, size = 0, max([_WINDOW, *(4 * rank.map.coarsest for rank in alive.values())])
        while alive and start < len(keys):
            window = keys[start : start + size]
            text = b"".join([key.to_bytes(8, "big") for key in window])
            asked = [(known, place) for known, rank in alive.items() for place in rank.heard]
            pipeline = self._client.pipeline(transaction=False)
            for (engine, number), place in asked:
                names = [blocks_key(engine, kind, number, place) for kind in "be"]
                # Not `eval`, which a cluster's pipelines do not have.
                chunks = "0" if place.tier == self._order[0] else "1"
                pipeline.execute_command("EVAL", READ, 2, *names, text, chunks)  # type: ignore[no-untyped-call]
            holding = set()
            for at, digits in zip(asked, pipeline.execute(), strict=True):
                layers[at].take(window, digits)
                if digits.strip(b"0"):
                    holding.add(at[0])
            alive = {known: rank for known, rank in alive.items() if known in holding}
            start, size = start + size, 2 * size

    def engines(self) -> list[str]:
        """Return the engines that are known, by name; none while the server is away."""

        def work() -> list[str]:
            names = sorted(name.decode() for name in self._client.smembers(ENGINES))  # type: ignore[union-attr]
            pipeline = self._client.pipeline(transaction=False)
            for name in names:
                pipeline.exists(meta_key(name))
            there = dict(zip(names, pipeline.execute(), strict=True))
            gone = [name for name in names if not there[name]]
            if gone:
                self._client.srem(ENGINES, *gone)
            return [name for name in names if there[name]]

        return self._try(work) or []

    def ranks(self, engine: str) -> list[int | None]:
        """Return an engine's ranks, the lowest first."""
        check_engine(engine)
        return list(self._try(lambda: self._read(engine)) or ())

    def knowledge(self, engine: str, rank: int | None | str = "all") -> Knowledge:
        """Return how far the index may be trusted about an engine, or one of its ranks."""
        check_engine(engine)
        number = None if rank == "all" else check_rank(rank)

        def work() -> tuple[dict[int | None, StoredRank], bytes | None]:
            ranks = self._read(engine)
            return ranks, self._client.hget(meta_key(engine), REFUSED) if ranks else None  # type: ignore[return-value]

        found: tuple[dict[int | None, StoredRank], bytes | None] | None = self._try(work)
        if found is None:
            return _AWAY
        ranks, refused = found
        if rank != "all":
            ranks, refused = ({number: ranks[number]} if number in ranks else {}), None
        known = worst_knowledge(
            [one.map.ledger.knowledge() for one in ranks.values()],
            refused_since=None if refused is None else float(refused),
        )
        with self._lock:
            waiting = any(name == engine for name, _ in self._pending)
        return replace(known, state=State.UNKNOWN, reasons=("store-unreachable",)) if waiting else known

    def position(self, engine: str, rank: int | None) -> int | None:
        """Return the number of the last batch applied; None where none was or the server is away."""
        check_engine(engine)
        check_rank(rank)
        ranks: dict[int | None, StoredRank] = self._try(lambda: self._read(engine)) or {}
        return ranks[rank].map.ledger.last_seq if rank in ranks else None

    def holdings(self, engine: str) -> dict[tuple[int | None, Place], dict[int, int]]:
        """Return all that an engine holds: by rank and place, key -> copies."""
        check_engine(engine)

        def work() -> dict[tuple[int | None, Place], dict[int, int]]:
            held = {}
            for number, rank in self._read(engine).items():
                for place in rank.places:
                    pairs: Iterator[Any] = self._client.hscan_iter(
                        blocks_key(engine, "b", number, place), count=1000
                    )
                    blocks = {int.from_bytes(key, "big"): int(copies) for key, copies in pairs}
                    if blocks:
                        held[number, place] = blocks
            return held

        return self._try(work) or {}

    def blocks_by_tier(self, engine: str) -> dict[str, int]:
        """Return how many blocks an engine holds in each tier, ``TIER (remote)`` apart."""
        check_engine(engine)

        def work() -> dict[str, int]:
            counted: Counter[str] = Counter()
            for number, rank in self._read(engine).items():
                for place in rank.places:
                    name = place.tier + (" (remote)" if place.remote else "")
                    counted[name] += self._client.hlen(blocks_key(engine, "b", number, place))
            return dict(+counted)

        return self._try(work) or {}

    def __len__(self) -> int:
        """How many blocks are held, over all engines and places."""
        return sum(sum(self.blocks_by_tier(engine).values()) for engine in self.engines())

    def stats(self) -> dict[str, Any]:
        """Return what this replica did: the counts of `ResidencyIndex.stats` that need no blocks.

        ``pending``: records that wait; ``reachable``: whether the server answered the last time; ``dropped``: records
        that did not fit.
        """
        with self._lock:
            return {
                "pending": len(self._pending),
                "reachable": self.reachable,
                **{name: self._counts[name] for name in _COUNTS},
                "unknown_media": dict(self._media),
            }

    # --- reading ----------------------------------------------------------------------------------------------

    def _read(self, engine: str) -> dict[int | None, StoredRank]:
        return self._read_many([engine])[0]

    def _read_many(self, engines: Sequence[str]) -> list[dict[int | None, StoredRank]]:
        """Read the ranks' states, without blocks."""
        pipeline = self._client.pipeline(transaction=False)
        for engine in engines:
            pipeline.hgetall(meta_key(engine))
        states = []
        for engine, fields in zip(engines, pipeline.execute(), strict=True):
            settings = self._settings.get(engine, EngineSettings())
            if settings.hashing is not None:  # what is there was verified when it was written
                settings = replace(settings, hashing=None, tokens_per_hash=_span(settings))
            numbered = [(rank_number(name), raw) for name, raw in fields.items() if name != REFUSED]
            numbered.sort(key=by_number)
            states.append({number: StoredRank(self.tiers, settings, raw) for number, raw in numbered})
        return states


def _away() -> tuple[type[Exception], ...]:
    """Return what a client raises while its server, or the node of a cluster that is asked, is away."""
    errors = redis.exceptions
    away = (errors.ConnectionError, errors.TimeoutError, errors.RedisClusterException, errors.ClusterError)
    # It answers, and takes nothing: its memory is full, or it has become a replica.
    return *away, errors.OutOfMemoryError, errors.ReadOnlyError


def _check_client(client: Any) -> None:
    """Raise UsageError unless this is a client that the index can use."""
    methods = ("get_encoder", "register_script", "pipeline", "execute_command")
    if not all(callable(getattr(client, name, None)) for name in methods) or isinstance(client, type):
        raise UsageError(
            f"expected a client, as redis.Redis(...), got {type(client).__name__}", at="$.client"
        )
    if inspect.iscoroutinefunction(client.execute_command):
        raise UsageError("expected a client that answers at once, not one of redis.asyncio", at="$.client")
    if client.get_encoder().decode_responses:
        raise UsageError("expected a client with decode_responses=False", at="$.client")


def _seconds(value: Any, name: str, least: float) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not least <= value <= _LONGEST_S:
        raise UsageError(
            f"expected seconds, from {least:g} to {_LONGEST_S:g}, got {value!r:.40}", at=f"$.{name}"
        )
    return float(value)


def _span(settings: EngineSettings) -> int:
    if settings.tokens_per_hash is not None:
        return settings.tokens_per_hash
    hashing = settings.hashing or {}
    size: int = hashing.get("block_size", 16)
    return size * int(hashing.get("decode_context_parallel_size", 1))


def _origin(record: Batch) -> bytes:
    """Return what tells a life's batch 0 from another life's."""
    if record.payload:
        return hashlib.blake2b(record.payload, digest_size=8).digest()
    return struct.pack("<d", record.batch.ts)


def _is_before(ts: float, other: float | None) -> bool:
    return other is not None and ts < other
