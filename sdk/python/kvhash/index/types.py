"""The index's values: what is known of an engine, what a lookup answers, and how an engine is described."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kvhash._errors import UsageError

__all__ = ["DEFAULT_TIERS", "EngineSettings", "GroupSettings", "Knowledge", "PrefixMatch", "State"]

#: Medium as published, upper case -> tier. The order of the tiers is the order in which an engine looks.
DEFAULT_TIERS: Mapping[str, str] = MappingProxyType(
    {
        "GPU": "GPU",
        "CPU": "CPU",
        "CPU_PINNED": "CPU",
        "DISK": "STORAGE",
        "STORAGE": "STORAGE",
    }
)


class State(enum.Enum):
    """How far an index may be trusted about one engine.

    ``EXACT``: it is the engine's own hash map as of the last batch that was applied. ``DEGRADED``: something was
    lost, or is missing and not replayed yet: it may claim too much or too little. ``UNKNOWN``: nothing was heard of
    the engine, or its hashes do not verify under the settings that lookups use.
    """

    EXACT = "exact"
    DEGRADED = "degraded"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Knowledge:
    """The state of an engine, or of one of its ranks.

    ``since``: when the oldest unhealed fault was noticed, in seconds since the epoch by the index's clock.
    ``reasons``: what is wrong, each a key of `kvhash.index.REASONS`. ``as_of``: the engine's own time of the last
    batch applied (the oldest of its ranks'), None where none was.
    """

    state: State
    since: float | None = None
    reasons: tuple[str, ...] = ()
    as_of: float | None = None

    @property
    def exact(self) -> bool:
        """Whether the state is EXACT."""
        return self.state is State.EXACT


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest prefix of a lookup's hashes that one rank of an engine holds.

    ``blocks``, ``tokens``: in all, over its tiers. ``by_tier``: blocks found in each tier, fastest first: the GPU's
    run from the start, then what the next tier adds to it, and so on. ``usable_tokens``: what a request with these
    hashes would not have to compute: cut to where the engine's hits may end, at least one token left to compute
    (where `num_tokens` was given), and without the unit that a drafter recomputes. ``remote``: blocks that REMOTE
    placements would add after ``blocks``, by tier; they count nowhere else. ``rank``: the rank that holds it.
    """

    blocks: int = 0
    tokens: int = 0
    by_tier: Mapping[str, int] = field(default_factory=dict)
    usable_tokens: int = 0
    remote: Mapping[str, int] = field(default_factory=dict)
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """A KV cache group's geometry, where events do not say it.

    ``kind`` as in events; ``block_size`` in tokens, context parallelism included. ``sliding_window`` and
    ``attention_chunk_size`` in tokens (the latter is never published).
    """

    block_size: int
    kind: str | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an index is told of an engine; all of it may be left out.

    ``tokens_per_hash``: tokens that one hash covers (the hash block size times context parallelism). Without it,
    that of the hash settings, else the greatest common divisor of the block sizes seen. ``groups``: by group id.
    ``use_eagle``: whether hits drop their last unit for a drafter. ``offload_chunk_blocks``: hashes per chunk of the
    tiers below the GPU; without it a chunk is what one event with tokens announces. ``reports_reuse``: whether
    requests ask for ``kv_cache_report_mode="full"``; a store is then no second copy, and duplicates make the
    knowledge DEGRADED. ``hashing``: the engine's hash settings, as `kvhash.events.Verifier` takes them; with them the
    first ``verify_blocks`` blocks of every life are recomputed, and a mismatch makes the engine UNKNOWN.

    Raises UsageError.
    """

    tokens_per_hash: int | None = None
    groups: Mapping[int, GroupSettings] = field(default_factory=dict)
    use_eagle: bool = False
    offload_chunk_blocks: int | None = None
    reports_reuse: bool = False
    hashing: Mapping[str, Any] | None = None
    verify_blocks: int = 4096

    def __post_init__(self) -> None:
        sizes = {"tokens_per_hash": self.tokens_per_hash, "offload_chunk_blocks": self.offload_chunk_blocks}
        sizes |= {f"groups[{i}].block_size": group.block_size for i, group in self.groups.items()}
        for name, value in sizes.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"expected an integer of at least 1, got {value!r}", at=f"$.{name}")
