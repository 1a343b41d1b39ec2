"""``--kv-transfer-config``: vLLM's JSON, read into a connector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvhash._errors import InvalidRequestError

from .base import KVConnector
from .disk import DiskTier
from .host import HostTier
from .tier import Tier
from .tier_connector import TierConnector
from .valkey import ValkeyTier

__all__ = ["make_connector"]

#: The longest timeout; ending the engine may take as long.
_LONGEST_S = 60


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base: a field that is not known is an error."""


class _Host(_Strict, frozen=True, tag_field="type", tag="host"):
    max_bytes: int
    name: str = "host"

    def make(self) -> Tier:
        return HostTier(max_bytes=self.max_bytes, name=self.name)


class _Disk(_Strict, frozen=True, tag_field="type", tag="disk"):
    path: str
    max_bytes: int
    name: str = "disk"

    def make(self) -> Tier:
        return DiskTier(path=self.path, max_bytes=self.max_bytes, name=self.name)


class _Valkey(_Strict, frozen=True, tag_field="type", tag="valkey"):
    url: str
    timeout: float = 0.5
    ttl_seconds: int | None = None
    name: str = "valkey"

    def make(self) -> Tier:
        return ValkeyTier(url=self.url, timeout=self.timeout, ttl_seconds=self.ttl_seconds, name=self.name)


class _TierExtra(_Strict, frozen=True):
    tiers: list[_Host | _Disk | _Valkey]
    load_async: bool | None = None
    max_pending_bytes: int = 256 << 20
    close_timeout: float = 5.0


class _OffloadingExtra(_Strict, frozen=True):
    cpu_bytes_to_use: int


class _Transfer(_Strict, frozen=True):
    kv_connector: Literal["TierConnector", "OffloadingConnector"]
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"]
    kv_connector_extra_config: dict[str, Any] = {}
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    engine_id: str | None = None


def make_connector(config: Mapping[str, Any]) -> KVConnector:
    """Return the connector that a configuration in vLLM's shape asks for.

    ``kv_connector``: ``"TierConnector"`` with a list of ``tiers``, or vLLM's ``"OffloadingConnector"`` with
    ``cpu_bytes_to_use``, which is a tier in host memory. ``kv_role``: a producer only saves, a consumer only loads.

    Raises InvalidRequestError, with the path of what is wrong.
    """
    transfer = _read(config, _Transfer, "$")
    extra, at = transfer.kv_connector_extra_config, "$.kv_connector_extra_config"
    options = _TierExtra(tiers=[])
    if transfer.kv_connector == "OffloadingConnector":
        tiers: list[_Host | _Disk | _Valkey] = [
            _Host(max_bytes=_read(extra, _OffloadingExtra, at).cpu_bytes_to_use)
        ]
    else:
        options = _read(extra, _TierExtra, at)
        tiers = options.tiers
    _check(tiers, at)
    if not 0 <= options.close_timeout <= _LONGEST_S:
        raise InvalidRequestError(f"expected 0 to {_LONGEST_S} seconds", at=f"{at}.close_timeout")
    if options.max_pending_bytes < 0:
        raise InvalidRequestError("expected a number of bytes of at least 0", at=f"{at}.max_pending_bytes")
    return TierConnector(
        [tier.make() for tier in tiers],
        load_async=options.load_async,
        saves=transfer.kv_role != "kv_consumer",
        loads=transfer.kv_role != "kv_producer",
        kv_load_failure_policy=transfer.kv_load_failure_policy,
        max_pending_bytes=options.max_pending_bytes,
        close_timeout=options.close_timeout,
    )


def _check(tiers: list[_Host | _Disk | _Valkey], at: str) -> None:
    if not tiers:
        raise InvalidRequestError("expected at least one tier", at=f"{at}.tiers")
    names = [tier.name for tier in tiers]
    for index, tier in enumerate(tiers):
        here = f"{at}.tiers[{index}]"
        if tier.name in names[:index]:
            raise InvalidRequestError(
                f"two tiers are named {tier.name!r}; give one a name", at=f"{here}.name"
            )
        if isinstance(tier, _Valkey):
            if not 0 < tier.timeout <= _LONGEST_S:
                raise InvalidRequestError(
                    f"expected a timeout above 0 and of at most {_LONGEST_S} seconds", at=f"{here}.timeout"
                )
            if tier.ttl_seconds is not None and not 0 < tier.ttl_seconds < 1 << 31:
                raise InvalidRequestError("expected a number of seconds above 0", at=f"{here}.ttl_seconds")
        elif tier.max_bytes <= 0:
            raise InvalidRequestError("expected a number of bytes above 0", at=f"{here}.max_bytes")
        if isinstance(tier, _Disk) and not tier.path.strip():
            raise InvalidRequestError("expected the path of a folder", at=f"{here}.path")


def _read(value: Any, kind: type[msgspec.Struct], at: str) -> Any:
    try:
        return msgspec.convert(value, type=kind)
    except msgspec.ValidationError as error:
        # msgspec ends a message with " - at `$.path`"; the path is ours to give.
        text, _, path = str(error).partition(" - at ")
        raise InvalidRequestError(
            f"bad --kv-transfer-config: {text}", at=at + path.strip("`").removeprefix("$")
        ) from None
