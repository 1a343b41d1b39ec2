"""What is routed to what: models with their hash settings and adapters, engines with their endpoints.

One immutable value, read from a JSON file or made from flags, and checked whole before it is used: a misspelt field
or an engine of an unknown model is an error that says where.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from kvhash import BlockHasher, KvHashError, Lora
from kvhash.contract import Contract
from kvhash.events.endpoint import check_connectable
from kvhash.events.subscriber import Source

from .decision import Policy

__all__ = [
    "AdapterConfig",
    "ConfigError",
    "EngineConfig",
    "HashSettings",
    "HealthConfig",
    "ModelConfig",
    "ProxyConfig",
    "RouterConfig",
    "check_index",
    "parse_engine_flag",
]


#: A longer time between two checks, or of silence, is a mistake, and so is one that an event loop would spend spinning.
_LONGEST_S = 86_400
_SHORTEST_S = 0.01
#: The bounds of a policy's numbers: with larger ones costs would be infinite, and no engine better than another.
_POLICY_BOUNDS = {
    "output_weight": 1e6,
    "overhead_tokens": 1e9,
    "recent_weight": 1e6,
    "tie_share": 1e6,
    "tie_tokens": 1e9,
}
#: Ranks behind one address: each is followed by a connection of its own.
_MOST_RANKS = 1024


class ConfigError(KvHashError):
    """The configuration cannot be used; says where and what would be right."""

    code = "invalid-config"


class HashSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decides an engine's block hashes; fields as those of `kvhash.BlockHasher`."""

    vllm: str = "latest"
    algorithm: str = "sha256"
    hash_seed: str | None = None
    block_size: int = 16
    lookahead: int = 0
    decode_context_parallel_size: int = 1

    def hasher(self) -> BlockHasher:
        """Return the hasher; raises as `BlockHasher` does."""
        return BlockHasher(**msgspec.structs.asdict(self))


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A LoRA adapter as the engines got it: ``path`` enters the hash from 0.31, ``id`` before 0.11.1."""

    path: str | None = None
    id: int | None = None


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One served model: how its engines hash, its tokenizer (None: token-id prompts only), its adapters by name.

    ``chat_template``: a file that replaces the tokenizer's template, as vLLM's ``--chat-template``. ``use_eagle``: a
    drafter makes hits one unit shorter. ``offload_chunk_blocks``: hashes per chunk of the tiers below the GPU.
    """

    hash: HashSettings = HashSettings()
    tokenizer: str | None = None
    chat_template: str | None = None
    content_format: Literal["auto", "string", "openai"] = "auto"
    adapters: dict[str, AdapterConfig] = {}
    use_eagle: bool = False
    offload_chunk_blocks: int | None = None

    def lora(self, name: str) -> Lora:
        """Return the adapter `name` as a request key."""
        adapter = self.adapters[name]
        return Lora(name=name, path=adapter.path, id=adapter.id)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: its HTTP base address, its model, and the endpoints of its events (None: it sends none).

    ``ranks``: data parallel ranks behind the address; the endpoints are rank 0's, vLLM's port rule gives the others.
    """

    url: str
    name: str = ""
    model: str = ""
    events: str | None = None
    replay: str | None = None
    ranks: int = 1

    def sources(self) -> list[Source]:
        """Return where the events come from, one a rank; empty for an engine that sends none."""
        if self.events is None:
            return []
        if self.ranks == 1:
            return [Source(self.events, self.replay)]
        return list(Source.for_ranks(self.events, self.replay, range(self.ranks)))


class HealthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Health checks: seconds between them, seconds until one has failed, failures in a row that make an engine down."""

    interval_s: float = 2.0
    timeout_s: float = 2.0
    failures: int = 2


class ProxyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How requests are passed on; times in seconds.

    ``read_timeout_s``: the longest silence of an engine before its answer begins; ``stream_idle_s``: within a stream
    that has begun. ``retries``: engines tried after the first.
    """

    connect_timeout_s: float = 5.0
    read_timeout_s: float = 600.0
    stream_idle_s: float = 120.0
    retries: int = 2
    max_body_bytes: int = 64 * 1024 * 1024


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration.

    ``index``: None keeps the residency index here, the ``redis://`` address of a server shares it, and so does a list
    of addresses of one cluster's nodes (some are enough, they tell of the others). ``max_blocks``: the most blocks that
    an index kept here holds, over all engines.
    """

    models: dict[str, ModelConfig]
    engines: tuple[EngineConfig, ...] = ()
    policy: Policy = Policy()
    health: HealthConfig = HealthConfig()
    proxy: ProxyConfig = ProxyConfig()
    index: str | tuple[str, ...] | None = None
    max_blocks: int | None = None

    @classmethod
    def load(cls, path: str | Path) -> RouterConfig:
        """Read a JSON file; raises ConfigError."""
        try:
            data = Path(path).read_bytes()
        except (OSError, ValueError) as error:
            said = error.strerror if isinstance(error, OSError) else None
            raise ConfigError(f"cannot read {path}: {said or error}") from None
        try:
            config = msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ConfigError(f"{path}: {error}") from None
        return config.checked()

    def checked(self) -> RouterConfig:
        """Return the configuration with names filled in; raises ConfigError, or what the hash settings raise."""
        if not self.models:
            raise ConfigError("expected at least one model", at="$.models")
        owners: dict[str, str] = {}
        for name, model in self.models.items():
            at = f"$.models.{name}"
            _check_hash(model, at)
            for served in (name, *model.adapters):
                if served in owners:
                    raise ConfigError(f"{served!r} is the name of two models or adapters", at=at)
                owners[served] = name
        engines = tuple(self._engine(engine, i) for i, engine in enumerate(self.engines))
        names = [engine.name for engine in engines]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"two engines are named {twice!r}", at="$.engines")
        _check_apart(engines)
        if self.max_blocks is not None and self.max_blocks < 1:
            raise ConfigError("expected at least 1 block", at="$.max_blocks")
        if self.index is not None:
            check_index(self.index)
        _check_policy(self.policy)
        for name in ("connect_timeout_s", "read_timeout_s", "stream_idle_s"):
            _check_time(getattr(self.proxy, name), at=f"$.proxy.{name}")
        for name in ("interval_s", "timeout_s"):
            _check_time(getattr(self.health, name), at=f"$.health.{name}")
        if self.proxy.retries < 0:
            raise ConfigError("expected a number of at least 0", at="$.proxy.retries")
        if self.proxy.max_body_bytes < 1:
            raise ConfigError("expected at least 1 byte", at="$.proxy.max_body_bytes")
        if self.health.failures < 1:
            raise ConfigError("expected at least 1 failure", at="$.health.failures")
        return msgspec.structs.replace(self, engines=engines)

    def _engine(self, engine: EngineConfig, place: int) -> EngineConfig:
        at = f"$.engines[{place}]"
        if "@" in engine.url.partition("://")[2].partition("/")[0]:
            raise ConfigError(
                f"expected an address without a user and password, got {_without_password(engine.url)!r}; a client's "
                "own authorization is passed on",
                at=f"{at}.url",
            )
        if not _is_address(engine.url):
            raise ConfigError(
                f"expected an http:// or https:// address with a host, got {engine.url!r}", at=f"{at}.url"
            )
        model = engine.model or (next(iter(self.models)) if len(self.models) == 1 else "")
        if model not in self.models:
            known = ", ".join(self.models)
            raise ConfigError(f"the engine's model is {model!r}; expected one of: {known}", at=f"{at}.model")
        if engine.ranks < 1:
            raise ConfigError(f"expected at least 1 rank, got {engine.ranks}", at=f"{at}.ranks")
        if engine.ranks > _MOST_RANKS:
            raise ConfigError(f"expected at most {_MOST_RANKS} ranks, got {engine.ranks}", at=f"{at}.ranks")
        if engine.events is None and engine.replay is not None:
            raise ConfigError("a replay endpoint without an endpoint of events", at=f"{at}.replay")
        try:
            for source in engine.sources():
                for endpoint in (source.endpoint, source.replay_endpoint):
                    if endpoint is not None:
                        check_connectable(endpoint)
        except KvHashError as error:
            raise ConfigError(str(error), at=at) from None
        url = engine.url.rstrip("/")
        name = engine.name or url.partition("://")[2]
        # It is sent in a header, and a label of the metrics and of the log.
        if not (name.isascii() and name.isprintable()) or name != name.strip():
            raise ConfigError(f"expected a name of printable ASCII characters, got {name!a}", at=f"{at}.name")
        return msgspec.structs.replace(engine, url=url, model=model, name=name)

    def no_such_model(self, served: Any) -> str:
        """Return what is said of a request whose `model` is not served."""
        if served:
            return f"the model {served!r:.200} does not exist"
        names = (served for name, model in self.models.items() for served in (name, *model.adapters))
        return f"expected the name of a model: {', '.join(names)}"

    def model_of(self, served: str | None) -> tuple[str, str | None] | None:
        """Return (model, adapter or None) for the name a request gives; None when it is not served.

        No name means the only model, where there is one.
        """
        if not served:
            return (next(iter(self.models)), None) if len(self.models) == 1 else None
        if served in self.models:
            return served, None
        return next(((name, served) for name, model in self.models.items() if served in model.adapters), None)


def _check_apart(engines: Sequence[EngineConfig]) -> None:
    """Raise ConfigError where two engines share an address or endpoint: one's blocks would be taken for the other's."""
    taken: dict[str, str] = {}
    for place, engine in enumerate(engines):
        events = {source.endpoint: "events" for source in engine.sources()}
        replays = {source.replay_endpoint: "replay" for source in engine.sources() if source.replay_endpoint}
        for address, field in {engine.url: "url", **events, **replays}.items():
            if address in taken:
                raise ConfigError(
                    f"engine {taken[address]!r} has {address} already", at=f"$.engines[{place}].{field}"
                )
        taken |= dict.fromkeys((engine.url, *events, *replays), engine.name)


def _is_address(url: str) -> bool:
    """Whether a URL is http or https, with a host, a port that can be and no query."""
    try:
        parts = urlsplit(url)
        wrong_port = parts.port == 0  # .port raises for one that is no number up to 65535
    except ValueError:
        return False
    plain = url.isascii() and url.isprintable() and " " not in url
    return (
        plain
        and parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and not (wrong_port or parts.query or parts.fragment)
    )


def _is_seed(text: str) -> bool:
    # As CPython reads it, by strtoul: spaces before it and a plus sign pass.
    return bool(re.fullmatch(r"\s*\+?[0-9]{1,40}", text, re.ASCII)) and int(text) < 2**32


def _check_hash(model: ModelConfig, at: str) -> None:
    try:
        contract = Contract.for_vllm(model.hash.vllm)
        hasher = model.hash.hasher()
    except KvHashError as error:
        place = (error.at or "$").replace("$", f"{at}.hash", 1)
        raise ConfigError(error.message, at=place) from None
    seed = model.hash.hash_seed
    if seed not in (None, "", "random") and not _is_seed(seed):
        raise ConfigError(
            f"Python starts with no PYTHONHASHSEED but 'random' or an integer from 0 to 4294967295, got {seed!r:.60}",
            at=f"{at}.hash.hash_seed",
        )
    if model.offload_chunk_blocks is not None and model.offload_chunk_blocks < 1:
        raise ConfigError("expected at least 1 block a chunk", at=f"{at}.offload_chunk_blocks")
    for name in model.adapters:
        try:
            hasher.chain(lora=model.lora(name))
        except KvHashError as error:
            place = f"{at}.adapters.{name}"
            raise ConfigError(f"{error.message} (vLLM {contract.release})", at=place) from None


def check_index(index: str | Sequence[str]) -> None:
    """Raise ConfigError unless `index` names a store that can be used here, or a cluster; connects to nothing."""
    if isinstance(index, str):
        _store_options(index, at="$.index", schemes=("redis", "rediss", "unix"))
        return
    if not index:
        raise ConfigError("expected the address of at least one node of the cluster", at="$.index")
    first: dict[str, Any] = {}
    for place, url in enumerate(index):
        at = f"$.index[{place}]"
        options = _store_options(url, at=at, schemes=("redis", "rediss"))
        if options.get("db"):
            raise ConfigError("a cluster has no database but 0", at=at)
        # One client speaks to all nodes, of which it learns nothing but host and port.
        options = {name: value for name, value in options.items() if name not in ("host", "port", "db")}
        first = first if place else options
        if options != first:
            raise ConfigError("expected the scheme, user, password and options of the first node", at=at)


def _store_options(url: str, *, at: str, schemes: Sequence[str]) -> dict[str, Any]:
    """Return what the client library reads in a store's address; raises ConfigError."""
    if url.partition("://")[0] not in schemes or "://" not in url:
        kinds = " or ".join(f"{scheme}://" for scheme in schemes)
        raise ConfigError(f"expected a {kinds} address, got {_without_password(url)!r}", at=at)
    try:
        from redis import connection
    except ImportError:
        raise ConfigError("a shared index needs the 'redis' package: pip install redis", at=at) from None
    try:
        options: dict[str, Any] = connection.parse_url(url)  # type: ignore[no-untyped-call]
        connection.ConnectionPool.from_url(url).make_connection()
    except TypeError:
        known = "socket_timeout, health_check_interval, protocol"
        raise ConfigError(f"the address has an option that is none; such as {known} are", at=at) from None
    except ValueError:  # its message may have parts of the password
        raise ConfigError("expected an address such as redis://host:6379", at=at) from None
    # The client library takes the database 0 for a path that is no number.
    if not url.startswith("unix://") and not re.fullmatch(r"/?[0-9]*", urlsplit(url).path, re.ASCII):
        raise ConfigError("expected a database's number behind the address's last slash", at=at)
    if "decode_responses" in options:
        raise ConfigError("decode_responses is not for an index, which holds bytes", at=at)
    return options


def _without_password(url: str) -> str:
    before, mark, after = url.rpartition("@")
    return f"...@{after}" if mark else before + after


def _check_policy(policy: Policy) -> None:
    if not 0 <= policy.degraded_trust <= 1:
        raise ConfigError("expected a share from 0 to 1", at="$.policy.degraded_trust")
    for name, most in _POLICY_BOUNDS.items():
        if not 0 <= getattr(policy, name) <= most:
            raise ConfigError(f"expected a number from 0 to {most:g}", at=f"$.policy.{name}")


def _check_time(seconds: float, *, at: str) -> None:
    if not _SHORTEST_S <= seconds <= _LONGEST_S:  # nor is NaN between them
        raise ConfigError(f"expected seconds from {_SHORTEST_S:g} to {_LONGEST_S:,}, got {seconds:g}", at=at)


_FLAG_FIELDS = {"name": str, "model": str, "events": str, "replay": str, "ranks": int}


def parse_engine_flag(text: str) -> EngineConfig:
    """Read ``URL[,events=E][,replay=E][,name=N][,model=M][,ranks=R]``; raises ConfigError."""
    url, *rest = text.split(",")
    values: dict[str, Any] = {}
    for part in rest:
        key, equals, value = part.partition("=")
        kind = _FLAG_FIELDS.get(key)
        if kind is None or not equals:
            raise ConfigError(f"{part!r} is not one of: {', '.join(f'{k}=...' for k in _FLAG_FIELDS)}")
        try:
            values[key] = kind(value)
        except ValueError:
            raise ConfigError(f"expected {key}= with a number, got {value!r}") from None
    return EngineConfig(url=url, **values)
