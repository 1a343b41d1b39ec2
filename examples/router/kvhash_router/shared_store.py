"""The SDK's shared residency index, as routers that share it use it: one of them writes for an engine, all read.

Who writes holds a lease, which runs out when it goes; the next one then reads the engine's events from the start of its
replay buffer, of which the store takes what is new. So a store that comes back empty is filled by one writer, and no
other's newer batch gets between the old ones.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import redis
import redis.cluster
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvhash.block_hash import ChainValue
from kvhash.events.records import Batch
from kvhash.index import EngineSettings, Knowledge, PrefixMatch
from kvhash.index.shared import SharedResidencyIndex

from .residency import StoreUnavailableError

__all__ = ["SharedStore"]

_T = TypeVar("_T")
_RETRY_S = 0.1
# KEYS: the lease. ARGV: who, ms. Answers 1 where who had it and keeps it, 2 where who has it from now on, else 0.
_HOLD = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return holder and 1 or 2
"""


class SharedStore:
    """`kvhash.index.shared.SharedResidencyIndex` with leases, and errors where the store does not answer.

    ``url``: ``redis://...`` of a server, or a list of such addresses of one cluster's nodes. ``lease_s``: how long
    a writer that is gone keeps others from writing. Every method raises StoreUnavailableError while the store is
    away. For several threads, as long as one engine's records come from one.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        lease_s: float = 3.0,
        timeout_s: float = 1.0,
        ttl_s: float = 3600.0,
    ) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._lease_ms = int(lease_s * 1000)
        self._ttl_s = ttl_s
        self._me = uuid.uuid4().hex
        self._settings: dict[str, EngineSettings] = {}
        # A cluster's client cannot be made while the cluster is away, and a router starts all the same.
        self._connecting = threading.Lock()
        self._connection: Any = None
        self._reading: SharedResidencyIndex | None = None
        self._writers: dict[str, SharedResidencyIndex] = {}
        # Engines with batches in the store, and those whose lease or state was gone from it.
        self._written: set[str] = set()
        self._lost: set[str] = set()

    def _connect(self) -> Any:
        """Return a client of the server or of the cluster."""
        # A store that is away is tried again by who asks, not by each question: nobody waits for pauses between tries.
        options: dict[str, Any] = {
            "socket_connect_timeout": self._timeout_s,
            "socket_timeout": self._timeout_s,
            "retry": Retry(NoBackoff(), 1),
        }
        if isinstance(self._url, str):
            return redis.Redis.from_url(self._url, **options)
        parsed = [redis.connection.parse_url(url) for url in self._url]  # type: ignore[no-untyped-call]
        nodes = [
            redis.cluster.ClusterNode(each.get("host", "localhost"), each.get("port", 6379))  # type: ignore[no-untyped-call]
            for each in parsed
        ]
        same = {name: value for name, value in parsed[0].items() if name not in ("host", "port", "db")}
        if issubclass(same.pop("connection_class", redis.Connection), redis.SSLConnection):
            same["ssl"] = True
        return redis.cluster.RedisCluster(startup_nodes=nodes, **{**options, **same})

    @property
    def _client(self) -> Any:
        with self._connecting:
            if self._connection is None:
                self._connection = self._ask(self._connect)
            return self._connection

    @property
    def _reader(self) -> SharedResidencyIndex:
        client = self._client
        with self._connecting:
            if self._reading is None:
                self._reading = self._index_on(client)
            return self._reading

    def _index_on(self, client: Any) -> SharedResidencyIndex:
        return SharedResidencyIndex(client, ttl_s=self._ttl_s, settings=self._settings, retry_s=_RETRY_S)

    @staticmethod
    def _answered(index: SharedResidencyIndex, result: _T) -> _T:
        if not index.reachable:
            raise StoreUnavailableError("it is away")
        return result

    def _ask(self, function: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except redis.exceptions.MovedError as error:
            raise StoreUnavailableError(
                "it is a node of a cluster; a cluster is named by a list of its nodes' addresses"
            ) from error
        except (redis.RedisError, redis.exceptions.RedisClusterException) as error:
            raise StoreUnavailableError(str(error)) from error

    def _lease(self, engine: str) -> str:
        return f"kvhash-router:{{{engine}}}:writer"

    def hold(self, engine: str) -> bool:
        """Take or keep the right to write for an engine; returns whether this router has it."""
        held = int(self._ask(self._client.eval, _HOLD, 1, self._lease(engine), self._me, self._lease_ms))
        forgotten = held == 2 and engine in self._writers
        if held and engine in self._written:
            forgotten = forgotten or not self._answered(self._reader, self._ranks(engine))
        if forgotten:
            self._lost.add(engine)
        return bool(held)

    def _ranks(self, engine: str) -> list[int | None]:
        ranks: list[int | None] = self._ask(self._reader.ranks, engine)
        return ranks

    def lost(self, engine: str) -> bool:
        """Return whether the store forgot, since `begin`, that this router writes for an engine, or what it wrote.

        So it does that was emptied, or stopped for so short a time that nobody asked it meanwhile.
        """
        return engine in self._lost

    def release(self, engine: str) -> None:
        """Give up the right to write."""
        if self._ask(self._client.get, self._lease(engine)) == self._me.encode():
            self._ask(self._client.delete, self._lease(engine))

    def begin(self, engine: str, *, forget: bool) -> None:
        """Begin to write for an engine, from the start of its stream; `forget`: as if nothing were known of it.

        What the store learned from the middle of the stream is dropped, since all that can be had comes now.
        """
        self._writers[engine] = self._index_on(self._client)
        self._written.discard(engine)
        self._lost.discard(engine)
        if forget or "joined-late" in self.knowledge(engine).reasons:
            self.remove(engine)

    def configure(self, engine: str, settings: EngineSettings) -> None:
        """Tell what events do not say of an engine."""
        with self._connecting:
            self._settings[engine] = settings
            for index in filter(None, [self._reading, self._writers.get(engine)]):
                index.configure(engine, settings)

    def apply_record(self, engine: str, record: Any) -> None:
        """Take in a subscriber's record."""
        index = self._writers[engine]
        self._answered(index, self._ask(index.apply_record, engine, record))
        if isinstance(record, Batch):
            self._written.add(engine)

    def longest_prefix(
        self,
        hashes: Sequence[ChainValue],
        engines: Collection[str] | None = None,
        *,
        num_tokens: int | None = None,
    ) -> Mapping[str, PrefixMatch]:
        """Return by engine how much of the chain it holds."""
        found: Mapping[str, PrefixMatch] = self._ask(
            self._reader.longest_prefix, hashes, engines, num_tokens=num_tokens
        )
        return self._answered(self._reader, found)

    def knowledge(self, engine: str) -> Knowledge:
        """Return the state of knowledge of an engine."""
        known: Knowledge = self._ask(self._reader.knowledge, engine)
        return self._answered(self._reader, known)

    def remove(self, engine: str) -> None:
        """Forget an engine, for every router."""
        self._answered(self._reader, self._ask(self._reader.remove, engine))

    def stats(self) -> dict[str, Any]:
        """Return blocks by engine and tier."""
        names = self._ask(self._reader.engines)
        return {"blocks": {name: self._ask(self._reader.blocks_by_tier, name) for name in names}}
