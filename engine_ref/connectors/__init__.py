"""KV connectors: KV that outlives the pool, in host memory, on disk, or in a store that engines share."""

from __future__ import annotations

from .base import ConnectorOutput, KVConnector
from .config import make_connector
from .disk import DiskTier
from .host import HostTier
from .tier import Tier
from .tier_connector import TierConnector
from .valkey import ValkeyTier

__all__ = [
    "ConnectorOutput",
    "DiskTier",
    "HostTier",
    "KVConnector",
    "Tier",
    "TierConnector",
    "ValkeyTier",
    "make_connector",
]
