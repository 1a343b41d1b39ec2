"""The residency index: which engine holds which prefix, in which tier, fed by KV events."""

from .layer import ROOT, UNPLACED
from .ledger import REASONS
from .rank import Place
from .residency import HotPrefix, ResidencyIndex
from .snapshot import SnapshotError
from .types import DEFAULT_TIERS, EngineSettings, GroupSettings, Knowledge, PrefixMatch, State

__all__ = [
    "DEFAULT_TIERS",
    "REASONS",
    "ROOT",
    "UNPLACED",
    "EngineSettings",
    "GroupSettings",
    "HotPrefix",
    "Knowledge",
    "Place",
    "PrefixMatch",
    "ResidencyIndex",
    "SnapshotError",
    "State",
]
