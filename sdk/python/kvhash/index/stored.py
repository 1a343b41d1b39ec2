"""A rank as the shared store keeps it: its keys, the scripts that read and write them, and its state beside its blocks.

Keys of one engine share a hash tag, so that each script and each read stays in one slot of a cluster::

    kvhash:engines                            set of the engines' names (a slot of its own)
    kvhash:{engine}:meta                      rank -> its ledger, groups and places; "refused" -> since when
    kvhash:{engine}:b:<rank>:<place>          key (8 bytes) -> copies
    kvhash:{engine}:e:<rank>:<place>          keys at which a chunk ends (tiers below the device)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kvhash._errors import DecodeError
from kvhash.events.schema import BlockRemoved, BlockStored, hash_key

from .layer import UNPLACED, Block, Keys, Layer
from .ledger import Ledger
from .rank import Group, Place, RankMap
from .snapshot import DumpedGroup, DumpedLedger
from .types import EngineSettings

__all__ = [
    "ENGINES",
    "ONE_TOO_MANY",
    "READ",
    "REFUSED",
    "WRITE",
    "FetchedLayer",
    "Operations",
    "StoredRank",
    "blocks_key",
    "meta_key",
    "rank_name",
    "rank_number",
]

_PREFIX = "kvhash"
#: The set of the engines' names.
ENGINES = f"{_PREFIX}:engines"
_STORE_END, _STORE, _REMOVE, _DROP, _STORE_ONCE, _STORE_ONCE_END = range(1, 7)
#: Writers of batches without numbers that a rank remembers: there is one, and those that it took over from.
_WRITERS = 8
#: Field of an engine's state beside its ranks: since when a rank was refused.
REFUSED = b"refused"
ONE_TOO_MANY = -2

# KEYS: meta, then blocks and ends of each place. ARGV: rank, its former state, its new state, ms to live, operations
# of 11 bytes (what, which place in 2 bytes, key), ranks at most, the time. Answers how many removals met nothing, -1
# where the state is another, -2 where the rank is one too many.
WRITE = """
local meta, rank = KEYS[1], ARGV[1]
if (redis.call('HGET', meta, rank) or '') ~= ARGV[2] then return -1 end
if ARGV[2] == '' and redis.call('HLEN', meta) - redis.call('HEXISTS', meta, 'refused') >= tonumber(ARGV[6]) then
  redis.call('HSETNX', meta, 'refused', ARGV[7])
  return -2
end
local ops, unknown = ARGV[5], 0
for at = 1, #ops, 11 do
  local op, place, key = ops:byte(at), ops:byte(at + 1) * 256 + ops:byte(at + 2), ops:sub(at + 3, at + 10)
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
    if op == 6 then redis.call('SADD', ends, key) end
  end
end
redis.call('HSET', meta, rank, ARGV[3])
for i = 1, #KEYS do redis.call('PEXPIRE', KEYS[i], ARGV[4]) end
return unknown
"""

# KEYS: blocks and ends of a place. ARGV: keys of 8 bytes; whether chunks matter there. Answers a digit for each: 0 not
# held, 1 held, 2 and a chunk ends there. (A reply of one text costs the reader far less than one of as many values.)
READ = """
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


class FetchedLayer(Layer):
    """What a place holds of one lookup's hashes, as far as they were read; of other blocks it knows nothing."""

    __slots__ = ("_digits", "_held", "_total")

    def __init__(self, total: int, *, chunked: bool) -> None:
        super().__init__()
        self._total = total
        self._digits = b""
        self._held = _HELD if chunked else _CHUNK_END

    def take(self, keys: Sequence[int], digits: bytes) -> None:
        """Take in the digits of the next keys."""
        self._digits += digits
        for key, digit in zip(keys, digits, strict=True):
            if digit != _NOT_HELD:
                self.blocks[key] = _CHUNK_END if digit == _ENDS else self._held

    def run(self, keys: Keys, start: int = 0) -> int:
        """Return the place after the last of the held blocks that follow each other from `start`."""
        if keys.count != self._total:
            return super().run(keys, start)  # coarser blocks than hashes
        end = self._digits.find(b"0", start)
        return max(start, len(self._digits)) if end < 0 else end


_NOT_HELD, _ENDS = b"0"[0], b"2"[0]
_HELD, _CHUNK_END = Block(UNPLACED, None, False), Block(UNPLACED, None, True)


class _State(msgspec.Struct):
    """How a rank's state is written."""

    ledger: DumpedLedger
    groups: list[DumpedGroup]
    places: list[tuple[str, bool, int, bool]]
    life: int
    floor: float | None
    writers: list[tuple[bytes, int]] = []
    origin: bytes = b""


class StoredRank:
    """A rank's state as it is in the store, without its blocks.

    ``raw``: how it is written there. ``places``: those that have keys, numbered from 1; ``heard``: those that this
    life has stored to, which its groups are judged by. ``life``: how many lives came before; ``floor``: the engine's
    time of the last batch of the life before, where there was one. ``origin``: what tells this life's first batch,
    number 0, from another life's, by which replicas know the life; empty where it was not seen. ``writers``: of those
    who last wrote batches without numbers, how many each has written.
    """

    def __init__(self, tiers: Mapping[str, str], settings: EngineSettings, raw: bytes = b"") -> None:
        self.raw = raw
        self.map = RankMap(tiers, settings)
        self.places: list[Place] = []
        self.heard: set[Place] = set()
        self.life = 0
        self.floor: float | None = None
        self.origin = b""
        self.writers: dict[bytes, int] = {}
        if raw:
            try:
                value = msgspec.msgpack.decode(raw, type=_State)
            except (msgspec.MsgspecError, RecursionError) as error:
                raise DecodeError(f"the store holds what no index wrote: {error}") from None
            self.map.ledger = Ledger.restore(msgspec.to_builtins(value.ledger))
            for number, sizes, smallest, kind, window, chunk in value.groups:
                self.map.groups[number] = Group(sizes, smallest, kind, window, chunk)
            for tier, remote, group, heard in value.places:
                place = Place(tier, remote, group)
                self.places.append(place)
                if heard:
                    self.heard.add(place)
            self.life, self.floor, self.origin = value.life, value.floor, value.origin
            self.writers = dict(value.writers)

    def dump(self) -> bytes:
        """Return the state as it is written."""
        groups = [(n, g.sizes, g.smallest, g.kind, g.window, g.chunk) for n, g in self.map.groups.items()]
        places = [(place.tier, place.remote, place.group, place in self.heard) for place in self.places]
        return msgspec.msgpack.encode(
            {
                "ledger": self.map.ledger.dump(),
                "groups": groups,
                "places": places,
                "life": self.life,
                "floor": self.floor,
                "origin": self.origin,
                "writers": list(self.writers.items()),
            }
        )

    def wrote(self, writer: bytes, number: int) -> None:
        """Note the last batch without a number that a writer brought."""
        self.writers.pop(writer, None)
        self.writers[writer] = number
        if len(self.writers) > _WRITERS:
            del self.writers[next(iter(self.writers))]

    def place(self, place: Place) -> int:
        """Return the number of a place, from 1."""
        if place not in self.places:
            self.places.append(place)
        return self.places.index(place) + 1

    def forget_former_places(self) -> None:
        """Leave out the places of former lives: their keys were dropped with them."""
        self.places = [place for place in self.places if place in self.heard]


class Operations:
    """What batches do to the blocks of a rank, packed for the script. ``unknown``: removals where nothing is held."""

    def __init__(self, rank: StoredRank, device: str, now: float) -> None:
        self._rank = rank
        self._device = device
        self._now = now
        self.packed = bytearray()
        self.unknown = 0

    def store(self, place: Place, event: BlockStored) -> None:
        """Take in an event's blocks."""
        self._rank.heard.add(place)
        number, lower = self._rank.place(place), place.tier != self._device
        last = len(event.block_hashes) - 1
        reuse = self._rank.map.settings.reports_reuse
        if reuse and event.block_hashes:
            self._rank.map.ledger.fault("reuse-reported", self._now)
        for index, value in enumerate(event.block_hashes):
            ends = lower and (not event.token_ids or index == last)
            once, again = (_STORE_ONCE_END, _STORE_END) if ends else (_STORE_ONCE, _STORE)
            self._add(once if reuse else again, number, hash_key(value))

    def remove(self, place: Place, event: BlockRemoved) -> None:
        """Take an event's blocks away."""
        if place not in self._rank.heard:
            self.unknown += len(event.block_hashes)
            return
        number = self._rank.place(place)
        for value in event.block_hashes:
            self._add(_REMOVE, number, hash_key(value))

    def clear(self) -> None:
        """Forget all blocks."""
        for number in range(1, len(self._rank.places) + 1):
            self._add(_DROP, number, 0)

    def stored_to(self) -> Iterable[Place]:
        """Return the places that this life has stored to."""
        return self._rank.heard

    def _add(self, what: int, place: int, key: int) -> None:
        self.packed += bytes((what,)) + place.to_bytes(2, "big") + key.to_bytes(8, "big")


def _tag(engine: str) -> str:
    """Return an engine's name for a hash tag, in which a closing brace would end it."""
    return engine.replace("%", "%25").replace("}", "%7D").replace("{", "%7B") or "%"


def rank_name(rank: int | None) -> str:
    """Return a rank's field."""
    return "" if rank is None else str(rank)


def rank_number(name: bytes) -> int | None:
    """Return the rank of a field."""
    return int(name) if name else None


def meta_key(engine: str) -> str:
    """Return the key of an engine's ranks."""
    return f"{_PREFIX}:{{{_tag(engine)}}}:meta"


def blocks_key(engine: str, kind: str, rank: int | None, place: Place) -> str:
    """Return the key of a place's blocks (`kind` "b"), or of those at which its chunks end ("e")."""
    where = f"{place.tier}:{'remote' if place.remote else 'local'}:{place.group}"
    return f"{_PREFIX}:{{{_tag(engine)}}}:{kind}:{rank_name(rank)}:{where}"
