"""A tier on Valkey (or Redis, which speaks the same): shared by all engines of one model, and allowed to be away."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvhash._errors import InvalidRequestError, MissingDependencyError

from .envelope import BadPageError, open_page, seal_page
from .tier import Breaker, Tier

__all__ = ["ValkeyTier"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class ValkeyTier(Tier):
    """Keeps pages under ``kvhash:<fingerprint>:<block hash and group>`` on a server.

    The server decides what it drops (``maxmemory``, `ttl_seconds`), so no removal is told. A server that does not
    answer within `timeout` seconds is left alone for a while, longer each time; until then all is a miss.

    Raises MissingDependencyError without the redis package, InvalidRequestError for a URL that is none.
    """

    medium = "STORAGE"
    source = "external_unspecified"
    locality = "REMOTE"

    def __init__(
        self, *, url: str, timeout: float = 0.5, ttl_seconds: int | None = None, name: str = "valkey"
    ) -> None:
        super().__init__(name)
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise MissingDependencyError(
                "a tier on Valkey needs the redis package: pip install 'kvhash[serve]'"
            ) from None
        try:
            self._client = redis.Redis.from_url(
                url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0)
            )
        except ValueError:  # its message may have parts of the password
            raise InvalidRequestError(
                f"expected a redis:// or unix:// URL, got {_without_secrets(url)!r}"
            ) from None
        self._ttl = ttl_seconds
        self._fingerprint = b""
        self._prefix = b""
        self.breaker = Breaker(f"the Valkey server at {_without_secrets(url)}")

    def bind(self, fingerprint: bytes) -> list[bytes]:
        """Take the fingerprint; what is there is asked for when it is needed."""
        self._fingerprint = fingerprint
        self._prefix = b"kvhash:" + fingerprint.hex().encode() + b":"
        return []

    def contains(self, keys: Sequence[bytes]) -> set[bytes]:
        """Ask for all keys in one round trip."""

        def ask() -> list[object]:
            with self._client.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.exists(self._name(key))
                return list(pipe.execute())

        nothing: list[object] = []
        answers = self._try(ask, nothing) if keys else nothing
        return {key for key, there in zip(keys, answers, strict=False) if there}

    def get(self, key: bytes) -> bytes | None:
        """Fetch a page; what is not it is counted under what is wrong with it, and removed."""
        data = self._try(lambda: self._client.get(self._name(key)), None)
        if not isinstance(data, bytes):
            self.counters["misses"] += 1
            return None
        try:
            page = open_page(data, key, fingerprint=self._fingerprint)
        except BadPageError as error:
            _log.warning("the page %s on the Valkey server is %s; removed", key.hex(), error.reason)
            self.counters[error.reason] += 1
            self._try(lambda: self._client.unlink(self._name(key)), None)
            return None
        self.counters["hits"] += 1
        return page

    def put(self, key: bytes, page: bytes) -> bool | None:
        """Send a page, unless it is there."""
        name = self._name(key)
        there = self._try(lambda: self._client.exists(name), None)
        if there is None or there:
            return None if there is None else False
        data = seal_page(key, page, fingerprint=self._fingerprint)
        if not self._try(lambda: bool(self._client.set(name, data, ex=self._ttl)), False):
            return None
        self.counters["stores"] += 1
        self._changes.append((key, True))
        return True

    def clear(self) -> bool:
        """Remove every page of this fingerprint, those of other engines too."""

        def remove() -> bool:
            batch: list[bytes] = []
            for name in self._client.scan_iter(self._prefix + b"*", count=1000):
                batch.append(name)
                if len(batch) == 1000:
                    self._client.unlink(*batch)
                    batch.clear()
            if batch:
                self._client.unlink(*batch)
            return True

        return self._try(remove, False)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _try(self, ask: Callable[[], _T], otherwise: _T) -> _T:
        if self.breaker.is_open:
            self.counters["skipped"] += 1
            return otherwise
        try:
            answer = ask()
        except Exception as error:  # also what the client raises for what it cannot read or send
            self.counters["errors"] += 1
            self.breaker.failed(error)
            return otherwise
        self.breaker.worked()
        return answer


def _without_secrets(url: str) -> str:
    """Return a URL without user, password and options, for messages; only its scheme if unsure."""
    scheme, _, rest = url.rpartition("://") if url.count("://") == 1 else ("", "", url)
    address, _, options = rest.partition("?")
    shown = "..." if not scheme or "@" in options else address.rpartition("@")[2]
    return f"{scheme}://{shown}" if scheme else shown
