"""The residency index that a configuration names: in this process, or in a store that several routers share."""

from __future__ import annotations

from .config import ConfigError, RouterConfig
from .residency import Residency

__all__ = ["make_residency"]


def make_residency(config: RouterConfig) -> Residency:
    """Return the index; raises ConfigError for an address of another kind, or where a store's client is missing."""
    if config.index is None:
        from kvhash.index import ResidencyIndex

        return Residency(ResidencyIndex(max_blocks=config.max_blocks))
    if config.index.startswith(("redis://", "rediss://", "unix://")):
        try:
            from .shared_store import SharedStore
        except ImportError:
            raise ConfigError("a shared index needs the 'redis' package", at="$.index") from None
        try:
            store = SharedStore(config.index)
        except ValueError as error:
            raise ConfigError(f"{config.index!r} is no address: {error}", at="$.index") from None
        return Residency(store, store=store)
    raise ConfigError(f"expected a redis:// address, got {config.index!r}", at="$.index")
