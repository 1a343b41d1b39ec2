"""The residency index that a configuration names: in this process, or in a store that several routers share."""

from __future__ import annotations

from .config import RouterConfig, check_index
from .residency import Residency

__all__ = ["make_residency"]


def make_residency(config: RouterConfig) -> Residency:
    """Return the index; raises ConfigError for an address of another kind, or where a store's client is missing."""
    if config.index is None:
        from kvhash.index import ResidencyIndex

        return Residency(ResidencyIndex(max_blocks=config.max_blocks))
    check_index(config.index)
    from .shared_store import SharedStore

    store = SharedStore(config.index)
    return Residency(store, store=store)
