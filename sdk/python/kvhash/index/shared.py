"""The index in a Valkey or Redis server, for several router replicas: same rules, same answers, one state.

Keys of one engine share a hash tag, so that each script and each read stays in one slot of a cluster::

    kvhash:engines                            set of the engines' names (a slot of its own)
    kvhash:{engine}:meta                      rank -> its ledger, groups and places
    kvhash:{engine}:b:<rank>:<place>          key (8 bytes) -> copies
    kvhash:{engine}:e:<rank>:<place>          keys at which a chunk ends (tiers below the device)

A write is one script: it takes place only if the rank's state is the one that the writer started from, and is worked
out anew if not. So any number of replicas may follow the same engines: a batch is applied once.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from kvhash._errors import MissingDependencyError, UsageError
from kvhash.events.records import BadMessage, Batch, Gap, Lost, Record, Recovered, Restart
from kvhash.events.schema import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, HashValue, hash_key

from .layer import UNPLACED, Block, Keys, Layer
from .ledger import Ledger
from .rank import Group, Place, RankMap
from .residency import better_match, worst_knowledge
from .types import DEFAULT_TIERS, EngineSettings, Knowledge, PrefixMatch, State

try:
    import redis
except ImportError:  # an extra
    redis = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from redis import Redis

__all__ = ["SharedResidencyIndex"]

_PREFIX = "kvhash"
_AWAY = Knowledge(State.UNKNOWN, None, ("store-unreachable",))
_STORE_END, _STORE, _REMOVE, _DROP, _STORE_ONCE = range(1, 6)
_OP_BYTES = 10
#: Hashes that the first read of a lookup asks for; each further one asks for twice as many.
_WINDOW = 64

# KEYS: meta, then blocks and ends of each place. ARGV: rank, its former state, its new state, ms to live, operations
# of 10 bytes: what, which place, key.
_SCRIPT = """
local meta, rank = KEYS[1], ARGV[1]
if (redis.call('HGET', meta, rank) or '') ~= ARGV[2] then return -1 end
local ops, unknown = ARGV[5], 0
for at = 1, #ops, 10 do
  local op, place, key = ops:byte(at), ops:byte(at + 1), ops:sub(at + 2, at + 9)
  local blocks, ends = KEYS[2 * place], KEYS[2 * place + 1]
  if op == 1 then
    redis.call('HINCRBY', blocks, key, 1)
    redis.call('SADD', ends, key)
  elseif op == 2 then
    redis.call('HINCRBY', blocks, key, 1)
  elseif op == 3 then
    local left = tonumber(redis.call('HGET', blocks, key) or '0') - 1
    if left > 0 then
      redis.call('HSET', blocks, key, left)
    elseif left == 0 then
      redis.call('HDEL', blocks, key)
      redis.call('SREM', ends, key)
    else
      unknown = unknown + 1
    end
  elseif op == 4 then
    redis.call('DEL', blocks, ends)
  else
    redis.call('HSET', blocks, key, 1)
  end
end
redis.call('HSET', meta, rank, ARGV[3])
for i = 1, #KEYS do redis.call('PEXPIRE', KEYS[i], ARGV[4]) end
return unknown
"""

# KEYS: blocks and ends of a place. ARGV: keys of 8 bytes; whether chunks matter there. Answers a digit for each: 0 not
# held, 1 held, 2 and a chunk ends there. (A reply of one text costs the reader far less than one of as many values.)
_READ = """
local answer, keys, chunks = {}, ARGV[1], ARGV[2] == '1'
for from = 1, #keys, 8000 do
  local names = {}
  for at = from, math.min(from + 7992, #keys - 7), 8 do names[#names + 1] = keys:sub(at, at + 7) end
  local copies = redis.call('HMGET', KEYS[1], unpack(names))
  for i = 1, #names do
    if not copies[i] then answer[#answer + 1] = '0'
    elseif chunks and redis.call('SISMEMBER', KEYS[2], names[i]) == 1 then answer[#answer + 1] = '2'
    else answer[#answer + 1] = '1' end
  end
end
return table.concat(answer)
"""


class _FetchedLayer(Layer):
    """What a place holds of one lookup's hashes, as far as they were read; of other blocks it knows nothing."""

    __slots__ = ("_digits", "_total")

    def __init__(self, total: int) -> None:
        super().__init__()
        self._total = total
        self._digits = b""

    def take(self, keys: Sequence[int], digits: bytes) -> None:
        """Take in the digits of the next keys."""
        self._digits += digits
        for key, digit in zip(keys, digits, strict=True):
            if digit != _NOT_HELD:
                self.blocks[key] = _CHUNK_END if digit == _ENDS else _HELD

    def run(self, keys: Keys, start: int = 0) -> int:
        """Return the place after the last of the held blocks that follow each other from `start`."""
        if keys.count != self._total:
            return super().run(keys, start)  # coarser blocks than hashes
        end = self._digits.find(b"0", start)
        return max(start, len(self._digits)) if end < 0 else end


_NOT_HELD, _ENDS = b"0"[0], b"2"[0]
_HELD, _CHUNK_END = Block(UNPLACED, None, False), Block(UNPLACED, None, True)


class _Rank:
    """A rank's state as it is in the store, without its blocks.

    ``raw``: how it is written there. ``places``: those that have keys, numbered from 1; ``heard``: those that this
    life has stored to, which its groups are judged by. ``life``: how many lives came before; ``floor``: the engine's
    time of the last batch of the life before, where there was one.
    """

    def __init__(self, tiers: Mapping[str, str], settings: EngineSettings, raw: bytes = b"") -> None:
        self.raw = raw
        self.map = RankMap(tiers, settings)
        self.places: list[Place] = []
        self.heard: set[Place] = set()
        self.life = 0
        self.floor: float | None = None
        if raw:
            value = msgspec.msgpack.decode(raw)
            self.map.ledger = Ledger.restore(value["ledger"])
            for number, *fields in value["groups"]:
                self.map.groups[number] = Group(*fields)
            self.places = [Place(*place) for *place, _ in value["places"]]
            self.heard = {Place(*place) for *place, heard in value["places"] if heard}
            self.life, self.floor = value["life"], value["floor"]

    def dump(self) -> bytes:
        """Return the state as it is written."""
        groups = [(n, g.sizes, g.smallest, g.kind, g.window, g.chunk) for n, g in self.map.groups.items()]
        places = [(place.tier, place.remote, place.group, place in self.heard) for place in self.places]
        ledger = self.map.ledger.dump()
        return msgspec.msgpack.encode(
            {"ledger": ledger, "groups": groups, "places": places, "life": self.life, "floor": self.floor}
        )

    def place(self, place: Place) -> int:
        """Return the number of a place, from 1."""
        if place not in self.places:
            self.places.append(place)
        return self.places.index(place) + 1


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
        if client.get_encoder().decode_responses:
            raise UsageError("expected a client with decode_responses=False", at="$.client")
        if ttl_s <= 0:
            raise UsageError(f"a time to live is above 0 seconds, got {ttl_s:g}", at="$.ttl_s")
        self.tiers = {medium.upper(): tier for medium, tier in tiers.items()}
        self._order = list(dict.fromkeys(self.tiers.values()))
        self._client = client
        self._script = client.register_script(_SCRIPT)
        self._ttl_ms = int(ttl_s * 1000)
        self._settings = dict(settings or {})
        self._clock = clock
        self._retry_s = retry_s
        self._retry_at: float | None = None
        self._pending: deque[tuple[str, Record]] = deque()
        self._max_pending = max_pending
        self._ranks: dict[tuple[str, int | None], _Rank] = {}
        # The life of each rank that this replica's own stream is in, as the store counts lives.
        self._lives: dict[tuple[str, int | None], int] = {}
        self._counts: Counter[str] = Counter()

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
        self._settings[engine] = settings
        for known in [known for known in self._ranks if known[0] == engine]:
            del self._ranks[known]

    def apply(self, engine: str, batch: EventBatch) -> None:
        """Apply a batch after the last one applied: for a single writer. `apply_record` is for all others."""
        seq = self.position(engine, batch.data_parallel_rank)
        number = 0 if seq is None else seq + 1
        self.apply_record(engine, Batch(engine, batch.data_parallel_rank, number, b"", 0, batch, b""))

    def apply_record(self, engine: str, record: Record) -> None:
        """Apply one record of a subscriber that follows this engine."""
        self.apply_records(engine, (record,))

    def apply_records(self, engine: str, records: Iterable[Record]) -> None:
        """Apply records in order; those of one rank that follow each other go in one round trip."""
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
        while self._pending:
            engine, rank = self._pending[0][0], self._pending[0][1].rank
            group: list[Record] = []
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

    def _write(self, engine: str, number: int | None, records: Sequence[Record]) -> bool:
        known, now = (engine, number), self._clock()
        while True:
            rank = self._ranks.get(known)
            if rank is None:
                raw = self._client.hget(self._meta(engine), _rank_name(number)) or b""
                rank = _Rank(self.tiers, self._settings.get(engine, EngineSettings()), raw)  # type: ignore[arg-type]
            former = rank.raw
            life = self._lives.get(known, rank.life)
            operations = bytearray()
            for record in records:
                life = self._take(rank, record, life, operations, now)
            raw = rank.dump()
            if raw == former and not operations:
                written = 0
            else:
                keys = [self._meta(engine)]
                for place in rank.places:
                    keys += [self._key(engine, "b", number, place), self._key(engine, "e", number, place)]
                args = (_rank_name(number), former, raw, self._ttl_ms, bytes(operations))
                written = self._script(keys=keys, args=args)
                if written >= 0 and not former:
                    self._client.sadd(f"{_PREFIX}:engines", engine)
            if written >= 0:
                rank.raw = raw
                self._ranks[known] = rank
                self._lives[known] = life
                self._counts.update(rank.map.counts)
                self._counts["removed"] -= written
                self._counts["removed_unknown"] += written
                rank.map.counts.clear()
                return True
            self._ranks.pop(known, None)  # another replica was first

    def _take(self, rank: _Rank, record: Record, life: int, operations: bytearray, now: float) -> int:
        """Work one record into a rank's state; returns the life that this replica's stream is in."""
        ledger = rank.map.ledger
        if isinstance(record, Restart):
            if rank.life > life:
                return life + 1  # another replica said so already
            self._new_life(rank, operations)
            return rank.life
        if life < rank.life:
            # The other replicas are in a later life. A batch that is newer than all that they brought is of it too,
            # whether or not this replica's subscriber noticed where it began.
            latest = rank.floor if ledger.last_ts is None else ledger.last_ts
            if not isinstance(record, Batch) or (latest is not None and record.batch.ts <= latest):
                return life
        if isinstance(record, Batch):
            place = ledger.accept(record.seq, record.batch.ts, now)
            if place == "again":
                self._counts["repeated"] += 1
                return life
            if place == "new-life":
                self._new_life(rank, operations)
                ledger = rank.map.ledger
                ledger.accept(record.seq, record.batch.ts, now)
            self._operate(rank, record.batch, operations, now)
            return rank.life
        last = -1 if ledger.last_seq is None else ledger.last_seq
        if isinstance(record, (Gap, Lost)) and record.last > last:
            note = ledger.gap if isinstance(record, Gap) else ledger.lost
            note(max(record.first, last + 1), record.last, now)
        elif isinstance(record, Recovered):
            ledger.recovered(record.first, record.last)
        elif isinstance(record, BadMessage) and record.seq is not None and record.seq > last:
            ledger.unreadable(record.seq, now)
        return life

    def _new_life(self, rank: _Rank, operations: bytearray) -> None:
        self._drop_all(rank, operations)
        rank.floor = rank.map.ledger.last_ts or rank.floor
        rank.map.restart()
        rank.heard.clear()
        rank.life += 1

    def _drop_all(self, rank: _Rank, operations: bytearray) -> None:
        for number in range(1, len(rank.places) + 1):
            operations += bytes((_DROP, number)) + bytes(8)

    def _operate(self, rank: _Rank, batch: EventBatch, operations: bytearray, now: float) -> None:
        """Turn a batch into operations; all but the blocks is the embedded index's own doing."""
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._drop_all(rank, operations)
            elif isinstance(event, (BlockStored, BlockRemoved)):
                place = rank.map.place_of(event, count=False)
                if place is None:  # counted when the rest of the batch is applied
                    continue
                number = rank.place(place)
                if isinstance(event, BlockStored):
                    rank.heard.add(place)
                last = len(event.block_hashes) - 1
                for index, value in enumerate(event.block_hashes):
                    what = _REMOVE
                    if isinstance(event, BlockStored):
                        ends = place.tier != self._order[0] and (not event.token_ids or index == last)
                        what = _STORE_END if ends else _STORE
                        if rank.map.settings.reports_reuse:
                            what = _STORE_ONCE
                            rank.map.ledger.fault("reuse-reported", now)
                    operations += bytes((what, number)) + hash_key(value).to_bytes(8, "big")
        rank.map.apply_without_blocks(batch, now)

    def remove(self, engine: str) -> bool:
        """Forget an engine; returns whether it was known. False, too, while the server is away."""

        def work() -> bool:
            keys = [self._meta(engine)]
            for number, rank in self._read(engine).items():
                for place in rank.places:
                    keys += [self._key(engine, "b", number, place), self._key(engine, "e", number, place)]
            self._client.srem(f"{_PREFIX}:engines", engine)
            return bool(self._client.delete(*keys))

        for known in [known for known in self._ranks if known[0] == engine]:
            del self._ranks[known]
        return bool(self._try(work))

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
        asked = self.engines() if engines is None else list(engines)
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

    def _fetch(self, ranks: Mapping[tuple[str, int | None], _Rank], keys: Sequence[int]) -> None:
        """Read which of `keys` each rank holds into its layers, as far as any of its places holds some."""
        alive = dict(ranks)
        layers = {
            (known, place): _FetchedLayer(len(keys)) for known, rank in alive.items() for place in rank.heard
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
                names = [self._key(engine, kind, number, place) for kind in "be"]
                lower = place.tier != self._order[0] or place.remote
                # Not `eval`, which a cluster's pipelines do not have.
                chunks = "1" if lower else "0"
                pipeline.execute_command("EVAL", _READ, 2, *names, text, chunks)  # type: ignore[no-untyped-call]
            holding = set()
            for at, digits in zip(asked, pipeline.execute(), strict=True):
                layers[at].take(window, digits)
                if digits.strip(b"0"):
                    holding.add(at[0])
            alive = {known: rank for known, rank in alive.items() if known in holding}
            start, size = start + size, 2 * size

    def engines(self) -> list[str]:
        """Return the engines that are known, in no order; none while the server is away."""

        def work() -> list[str]:
            names = sorted(name.decode() for name in self._client.smembers(f"{_PREFIX}:engines"))  # type: ignore[union-attr]
            pipeline = self._client.pipeline(transaction=False)
            for name in names:
                pipeline.exists(self._meta(name))
            there = dict(zip(names, pipeline.execute(), strict=True))
            gone = [name for name in names if not there[name]]
            if gone:
                self._client.srem(f"{_PREFIX}:engines", *gone)
            return [name for name in names if there[name]]

        return self._try(work) or []

    def ranks(self, engine: str) -> list[int | None]:
        """Return an engine's ranks."""
        return list(self._try(lambda: self._read(engine)) or ())

    def knowledge(self, engine: str, rank: int | None | str = "all") -> Knowledge:
        """Return how far the index may be trusted about an engine, or one of its ranks."""
        ranks: dict[int | None, _Rank] | None = self._try(lambda: self._read(engine))
        if ranks is None:
            return _AWAY
        if rank != "all":
            ranks = {number: one for number, one in ranks.items() if number == rank}
        known = worst_knowledge([one.map.ledger.knowledge() for one in ranks.values()])
        waiting = any(name == engine for name, _ in self._pending)
        return replace(known, state=State.UNKNOWN, reasons=("store-unreachable",)) if waiting else known

    def position(self, engine: str, rank: int | None) -> int | None:
        """Return the number of the last batch applied; None where none was or the server is away."""
        ranks: dict[int | None, _Rank] = self._try(lambda: self._read(engine)) or {}
        return ranks[rank].map.ledger.last_seq if rank in ranks else None

    def holdings(self, engine: str) -> dict[tuple[int | None, Place], dict[int, int]]:
        """Return all that an engine holds: by rank and place, key -> copies."""

        def work() -> dict[tuple[int | None, Place], dict[int, int]]:
            held = {}
            for number, rank in self._read(engine).items():
                for place in rank.places:
                    pairs: Iterator[Any] = self._client.hscan_iter(
                        self._key(engine, "b", number, place), count=1000
                    )
                    blocks = {int.from_bytes(key, "big"): int(copies) for key, copies in pairs}
                    if blocks:
                        held[number, place] = blocks
            return held

        return self._try(work) or {}

    def blocks_by_tier(self, engine: str) -> dict[str, int]:
        """Return how many blocks an engine holds in each tier, ``TIER (remote)`` apart."""

        def work() -> dict[str, int]:
            counted: Counter[str] = Counter()
            for number, rank in self._read(engine).items():
                for place in rank.places:
                    name = place.tier + (" (remote)" if place.remote else "")
                    counted[name] += self._client.hlen(self._key(engine, "b", number, place))
            return dict(+counted)

        return self._try(work) or {}

    def __len__(self) -> int:
        """How many blocks are held, over all engines and places."""
        return sum(sum(self.blocks_by_tier(engine).values()) for engine in self.engines())

    def stats(self) -> dict[str, Any]:
        """Return what this replica did: the counts of `ResidencyIndex.stats` that need no blocks."""
        return {"pending": len(self._pending), "reachable": self.reachable, **self._counts}

    # --- reading ----------------------------------------------------------------------------------------------

    def _read(self, engine: str) -> dict[int | None, _Rank]:
        return self._read_many([engine])[0]

    def _read_many(self, engines: Sequence[str]) -> list[dict[int | None, _Rank]]:
        """Read the ranks' states, without blocks."""
        pipeline = self._client.pipeline(transaction=False)
        for engine in engines:
            pipeline.hgetall(self._meta(engine))
        states = []
        for engine, fields in zip(engines, pipeline.execute(), strict=True):
            settings = self._settings.get(engine, EngineSettings())
            if settings.hashing is not None:  # what is there was verified when it was written
                settings = replace(settings, hashing=None, tokens_per_hash=_span(settings))
            states.append(
                {_rank_number(name): _Rank(self.tiers, settings, raw) for name, raw in sorted(fields.items())}
            )
        return states

    def _meta(self, engine: str) -> str:
        return f"{_PREFIX}:{{{_tag(engine)}}}:meta"

    def _key(self, engine: str, kind: str, rank: int | None, place: Place) -> str:
        where = f"{place.tier}:{'remote' if place.remote else 'local'}:{place.group}"
        return f"{_PREFIX}:{{{_tag(engine)}}}:{kind}:{'' if rank is None else rank}:{where}"


def _away() -> tuple[type[Exception], ...]:
    """Return what a client raises while its server, or the node of a cluster that is asked, is away."""
    errors = redis.exceptions
    return errors.ConnectionError, errors.TimeoutError, errors.RedisClusterException, errors.ClusterError


def _tag(engine: str) -> str:
    """Return an engine's name for a hash tag, in which a closing brace would end it."""
    return engine.replace("%", "%25").replace("}", "%7D").replace("{", "%7B") or "%"


def _span(settings: EngineSettings) -> int:
    if settings.tokens_per_hash is not None:
        return settings.tokens_per_hash
    hashing = settings.hashing or {}
    size: int = hashing.get("block_size", 16)
    return size * int(hashing.get("decode_context_parallel_size", 1))


def _rank_name(rank: int | None) -> str:
    return "" if rank is None else str(rank)


def _rank_number(name: bytes) -> int | None:
    return int(name) if name else None
