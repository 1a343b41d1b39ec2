"""A residency index in Valkey or Redis, for router replicas that share one and for an index that outlives them.

Every replica follows every engine and sends what it reads; the store takes each batch once, by its sequence number and
the engine's own time, in one script. So replicas need no leader, a replica that comes later changes nothing, and a
store that comes back empty, or as it was a while ago, is brought up to date by the replay of any replica.

It holds device blocks of full attention groups. An engine with groups of another kind is UNKNOWN here (load alone
decides); other tiers score nothing. All keys of an engine carry its name as their hash tag, so that a cluster keeps
them together, and expire when no replica follows the engine any more.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

import redis

from kvhash.block_hash import ChainValue, low64
from kvhash.events.records import BadMessage, Batch, Gap, Lost, Record, Recovered, Restart
from kvhash.events.schema import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    UndecodableEvent,
    hash_key,
)
from kvhash.index import EngineSettings, Knowledge, PrefixMatch, State

from .residency import OutOfStepError

__all__ = ["SharedIndex"]

_PREFIX = "kvhash"
_FULL = ("full_attention", "mla_attention", "sink_full_attention")
#: Fields asked for at once; a prompt's run usually ends before the last.
_CHUNK = 512

# KEYS: the engine's meta hash. ARGV: what, rank, ttl in s, then by kind. In meta, by rank: seq, ts, fault, since.
# "batch": seq, ts, now, whether a restart was seen, then operations: "+" or "-", key of a place, hash; "clear";
#   "fault", reason. Answers "applied", "known" (taken already, or of a former life) or "gap".
# "lost": first, last, now.  "fault": reason, now.
_SCRIPT = """
local meta, what, rank, ttl = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local function get(name) return redis.call('HGET', meta, rank .. ':' .. name) end
local function set(name, value) redis.call('HSET', meta, rank .. ':' .. name, value) end
local function forget(name) redis.call('HDEL', meta, rank .. ':' .. name) end
local function fault(reason, now)
  if not get('fault') then set('fault', reason); set('since', now) end
end
local places = meta .. ':places'
local function clear()
  for _, place in ipairs(redis.call('SMEMBERS', places)) do
    if string.sub(place, 1, #rank + 1) == rank .. ':' then
      redis.call('DEL', meta .. ':' .. place); redis.call('SREM', places, place)
    end
  end
end
local last, last_ts = tonumber(get('seq') or '-1'), tonumber(get('ts') or '-1')
redis.call('SADD', meta .. ':ranks', rank)
local answer = 'applied'
if what == 'lost' then
  local first, to = tonumber(ARGV[4]), tonumber(ARGV[5])
  if last + 1 >= first and last < to then set('seq', to); fault('lost', ARGV[6]) else answer = 'known' end
elseif what == 'fault' then
  fault(ARGV[4], ARGV[5])
else
  local seq, ts, now, restarted = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6], ARGV[7] == '1'
  if (seq <= last or (restarted and seq == last + 1)) and ts > last_ts then
    clear(); forget('seq'); forget('ts'); forget('fault'); forget('since'); last = -1
  elseif seq <= last or ts < last_ts then
    return 'known'
  end
  if seq > last + 1 then return 'gap' end
  local i = 8
  while i <= #ARGV do
    local op = ARGV[i]
    if op == 'clear' then
      clear(); forget('fault'); forget('since'); i = i + 1
    elseif op == 'fault' then
      fault(ARGV[i + 1], now); i = i + 2
    else
      local place, key = ARGV[i + 1], ARGV[i + 2]
      local blocks = meta .. ':' .. place
      if op == '+' then
        redis.call('HINCRBY', blocks, key, 1); redis.call('SADD', places, place)
      elseif redis.call('HEXISTS', blocks, key) == 1 and redis.call('HINCRBY', blocks, key, -1) <= 0 then
        redis.call('HDEL', blocks, key)
      end
      i = i + 3
    end
  end
  set('seq', ARGV[4]); set('ts', ARGV[5])
end
redis.call('EXPIRE', meta, ttl); redis.call('EXPIRE', places, ttl); redis.call('EXPIRE', meta .. ':ranks', ttl)
for _, place in ipairs(redis.call('SMEMBERS', places)) do redis.call('EXPIRE', meta .. ':' .. place, ttl) end
return answer
"""


class SharedIndex:
    """The index of one store; may be used from several threads.

    ``url``: ``redis://...``. ``ttl_s``: seconds after which an engine that nobody follows is gone. Raises
    redis.RedisError where the store does not answer.
    """

    def __init__(self, url: str, *, ttl_s: int = 300, timeout_s: float = 1.0) -> None:
        self._redis: Any = redis.Redis.from_url(
            url, socket_connect_timeout=timeout_s, socket_timeout=timeout_s, decode_responses=True
        )
        self._ttl_s = ttl_s
        self._script = self._redis.register_script(_SCRIPT)
        self._spans: dict[str, int] = {}
        self._restarted: set[tuple[str, int | None]] = set()
        self._gaps: set[tuple[str, int | None]] = set()

    @staticmethod
    def _meta(engine: str) -> str:
        return f"{_PREFIX}:{{{engine}}}"

    def configure(self, engine: str, settings: EngineSettings) -> None:
        """Take the tokens that one hash covers."""
        self._spans[engine] = settings.tokens_per_hash or 16

    def _run(self, engine: str, what: str, rank: int | None, *arguments: Any) -> str:
        values = [what, "-" if rank is None else rank, self._ttl_s, *arguments]
        return str(self._script(keys=[self._meta(engine)], args=values))

    def apply_record(self, engine: str, record: Record) -> None:
        """Take in a subscriber's record, unless a replica has before. Raises OutOfStepError where some are missing."""
        publisher = (engine, record.rank)
        if isinstance(record, Batch):
            restarted = publisher in self._restarted
            head = (record.seq, repr(record.batch.ts), time.time(), int(restarted))
            answer = self._run(engine, "batch", record.rank, *head, *_operations(record.rank, record.batch))
            if answer == "gap":
                raise OutOfStepError(f"the shared index lacks batches of {engine} before {record.seq}")
            self._restarted.discard(publisher)
        elif isinstance(record, Restart):
            self._restarted.add(publisher)
            self._gaps.discard(publisher)
        elif isinstance(record, Gap):
            self._gaps.add(publisher)
        elif isinstance(record, (Recovered, Lost)):
            if isinstance(record, Lost):
                self._run(engine, "lost", record.rank, record.first, record.last, time.time())
            self._gaps.discard(publisher)
        elif isinstance(record, BadMessage) and record.seq is not None:
            self._run(engine, "lost", record.rank, record.seq, record.seq, time.time())

    def touch(self, engine: str) -> None:
        """Say that the engine is still followed, so that it does not expire."""
        meta = self._meta(engine)
        pipeline = self._redis.pipeline(transaction=False)
        for key in (meta, f"{meta}:places", f"{meta}:ranks", *self._places(engine)):
            pipeline.expire(key, self._ttl_s)
        pipeline.execute()

    def _places(self, engine: str) -> list[str]:
        meta = self._meta(engine)
        return [f"{meta}:{place}" for place in sorted(self._redis.smembers(f"{meta}:places"))]

    def longest_prefix(
        self,
        hashes: Sequence[ChainValue],
        engines: Collection[str] | None = None,
        *,
        num_tokens: int | None = None,
    ) -> dict[str, PrefixMatch]:
        """Return what each engine holds of a prompt; of its ranks the one with most answers."""
        names = list(engines if engines is not None else self._spans)
        keys = [str(low64(value)) for value in hashes]
        pipeline = self._redis.pipeline(transaction=False)
        for name in names:
            pipeline.smembers(f"{self._meta(name)}:places")
        found: dict[str, PrefixMatch] = {}
        for name, places in zip(names, pipeline.execute(), strict=True):
            ranks: dict[str, list[str]] = {}
            for place in places:
                ranks.setdefault(place.partition(":")[0], []).append(f"{self._meta(name)}:{place}")
            runs = ((self._run_of(groups, keys), rank) for rank, groups in sorted(ranks.items()))
            blocks, rank = max(runs, key=lambda one: one[0], default=(0, "-"))
            span = self._spans.get(name, 16)
            usable = blocks * span
            if num_tokens is not None:
                usable = min(usable, max(0, num_tokens - 1) // span * span)
            found[name] = PrefixMatch(
                blocks=blocks,
                tokens=blocks * span,
                by_tier={"GPU": blocks},
                usable_tokens=usable,
                rank=None if rank == "-" else int(rank),
            )
        return found

    def _run_of(self, groups: Sequence[str], keys: Sequence[str]) -> int:
        for start in range(0, len(keys), _CHUNK):
            asked = keys[start : start + _CHUNK]
            pipeline = self._redis.pipeline(transaction=False)
            for group in groups:
                pipeline.hmget(group, asked)
            answers = pipeline.execute()
            for i in range(len(asked)):
                if any(answer[i] is None for answer in answers):
                    return start + i
        return len(keys)

    def knowledge(self, engine: str) -> Knowledge:
        """Return how far the store may be trusted about an engine: the worst of its ranks."""
        meta: dict[str, str] = self._redis.hgetall(self._meta(engine))
        if not any(name.endswith(":seq") for name in meta):
            return Knowledge(State.UNKNOWN, None, ("never-heard",))
        reasons = {value for name, value in meta.items() if name.endswith(":fault")}
        if any(name == engine for name, _ in self._gaps):
            reasons.add("gap")
        times = [float(value) for name, value in meta.items() if name.endswith(":since")]
        state = State.DEGRADED if reasons else State.EXACT
        if "group-kind" in reasons:
            state = State.UNKNOWN
        return Knowledge(state, min(times, default=None), tuple(sorted(reasons)))

    def remove(self, engine: str) -> None:
        """Forget an engine, for every replica."""
        meta = self._meta(engine)
        self._redis.delete(*self._places(engine), meta, f"{meta}:places", f"{meta}:ranks")

    def stats(self) -> dict[str, Any]:
        """Return the blocks of the engines that this replica knows."""
        blocks = {name: sum(self._redis.hlen(place) for place in self._places(name)) for name in self._spans}
        return {"engines": len(blocks), "blocks": sum(blocks.values()), "blocks_by_engine": blocks}


def _operations(rank: int | None, batch: EventBatch) -> list[Any]:
    """Return a batch as the script's operations."""
    operations: list[Any] = []
    for event in batch.events:
        if isinstance(event, AllBlocksCleared):
            operations.append("clear")
        elif isinstance(event, UndecodableEvent):
            operations += ("fault", "undecodable")
        elif isinstance(event, (BlockStored, BlockRemoved)) and (event.medium or "GPU").upper() == "GPU":
            if (event.locality or "").upper() == "REMOTE":
                continue
            if isinstance(event, BlockStored) and (event.kv_cache_spec_kind or _FULL[0]) not in _FULL:
                operations += ("fault", "group-kind")
                continue
            sign = "+" if isinstance(event, BlockStored) else "-"
            place = f"{'-' if rank is None else rank}:{event.group_idx or 0}"
            for value in event.block_hashes:
                operations += (sign, place, hash_key(value))
    return operations
