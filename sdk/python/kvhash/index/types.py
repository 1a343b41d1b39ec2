"""The index's values: what is known of an engine, what a lookup answers, and how an engine is described."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from kvhash._checks import check_int, check_text
from kvhash._errors import KvHashError, UsageError
from kvhash.events.verify import Verifier

__all__ = [
    "DEFAULT_TIERS",
    "MAX_BLOCK_TOKENS",
    "MAX_GROUPS",
    "EngineSettings",
    "GroupSettings",
    "Knowledge",
    "PrefixMatch",
    "State",
]

#: Tokens of one block at most, as everywhere in kvhash: so no number of blocks in memory reaches 2^64 tokens.
MAX_BLOCK_TOKENS = (1 << 31) - 1
#: KV cache groups that one rank may have: an engine has a handful; who names ever new ones gets no more.
MAX_GROUPS = 64

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


class PrefixMatch(msgspec.Struct, frozen=True, gc=False):
    """The longest prefix of a lookup's hashes that one rank of an engine holds.

    ``blocks``, ``tokens``: in all, over its tiers. ``by_tier``: blocks found in each tier, fastest first: the GPU's
    run from the start, then what the next tier adds to it, and so on. ``usable_tokens``: what a request with these
    hashes would not have to compute: cut to where the engine's hits may end, at least one token left to compute
    (where `num_tokens` was given), and without the unit that a drafter recomputes. ``remote``: blocks that REMOTE
    placements would add after ``blocks``, by tier; they count nowhere else. ``rank``: the rank that holds it.
    """

    blocks: int = 0
    tokens: int = 0
    by_tier: dict[str, int] = {}
    usable_tokens: int = 0
    remote: dict[str, int] = {}
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """A KV cache group's geometry, where events do not say it.

    ``kind`` as in events; ``block_size`` in tokens, context parallelism included. ``sliding_window`` and
    ``attention_chunk_size`` in tokens (the latter is never published). Sizes are 1 to 2^31 - 1.

    Raises UsageError, naming the field.
    """

    block_size: int
    kind: str | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def __post_init__(self) -> None:
        _take_integers(self, "block_size", "sliding_window", "attention_chunk_size")
        if self.kind is not None:
            check_text(self.kind, at="$.kind", what="the group's kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an index is told of an engine; all of it may be left out.

    ``tokens_per_hash``: tokens that one hash covers (the hash block size times context parallelism). Without it,
    that of the hash settings, else the greatest common divisor of the block sizes seen. ``groups``: by group id, 64 at
    most. ``use_eagle``: whether hits drop their last unit for a drafter. ``offload_chunk_blocks``: hashes per chunk of
    the tiers below the GPU; without it a chunk is what one event with tokens announces. ``reports_reuse``: whether
    requests ask for ``kv_cache_report_mode="full"``; a store is then no second copy, and duplicates make the
    knowledge DEGRADED. ``hashing``: the engine's hash settings, as `kvhash.events.Verifier` takes them; with them the
    first ``verify_blocks`` blocks of every life are recomputed, and a mismatch makes the engine UNKNOWN. Sizes are 1 to
    2^31 - 1, and so are the tokens of one hash.

    Raises UsageError, naming the field, and for bad hash settings what Verifier raises.
    """

    tokens_per_hash: int | None = None
    groups: Mapping[int, GroupSettings] = field(default_factory=dict)
    use_eagle: bool = False
    offload_chunk_blocks: int | None = None
    reports_reuse: bool = False
    hashing: Mapping[str, Any] | None = None
    verify_blocks: int = 4096

    def __post_init__(self) -> None:
        _take_integers(self, "tokens_per_hash", "offload_chunk_blocks")
        object.__setattr__(
            self,
            "verify_blocks",
            check_int(self.verify_blocks, at="$.verify_blocks", what="a number of blocks", minimum=0),
        )
        for name in ("use_eagle", "reports_reuse"):
            if not isinstance(value := getattr(self, name), bool):
                raise UsageError(f"expected true or false, got {value!r:.40}", at=f"$.{name}")
        object.__setattr__(self, "groups", _groups(self.groups))
        if self.hashing is not None:
            object.__setattr__(self, "hashing", _hashing(self.hashing))


def _take_integers(settings: Any, *names: str) -> None:
    """Make each of these fields that is not None an integer from 1 to `MAX_BLOCK_TOKENS`."""
    for name in names:
        value = getattr(settings, name)
        if value is None and name != "block_size":
            continue
        number = check_int(
            value, at=f"$.{name}", what=name.replace("_", " "), minimum=1, maximum=MAX_BLOCK_TOKENS
        )
        object.__setattr__(settings, name, number)


def _groups(groups: Any) -> dict[int, GroupSettings]:
    if not isinstance(groups, Mapping):
        raise UsageError(
            f"expected a mapping of group ids to GroupSettings, got {type(groups).__name__}", at="$.groups"
        )
    if len(groups) > MAX_GROUPS:
        raise UsageError(f"expected at most {MAX_GROUPS} groups, got {len(groups)}", at="$.groups")
    found = {}
    for number, group in groups.items():
        number = check_int(number, at="$.groups", what="a group id", minimum=0, maximum=(1 << 32) - 1)
        if not isinstance(group, GroupSettings):
            raise UsageError(f"expected GroupSettings, got {type(group).__name__}", at=f"$.groups[{number}]")
        found[number] = group
    return found


def _hashing(hashing: Any) -> dict[str, Any]:
    """Return hash settings if a Verifier can be made of them."""
    if not isinstance(hashing, Mapping) or not all(isinstance(name, str) for name in hashing):
        raise UsageError(
            f"expected a mapping of Verifier's settings, got {type(hashing).__name__}", at="$.hashing"
        )
    at = "$.hashing"
    if "max_blocks" in hashing:
        check_int(hashing["max_blocks"], at=f"{at}.max_blocks", what="a number of blocks", minimum=1)
    paths = hashing.get("lora_paths")
    sound = paths is None or isinstance(paths, Mapping)
    if not sound or not all(isinstance(text, str) for item in (paths or {}).items() for text in item):
        raise UsageError("expected adapters' paths by their names, both text", at=f"{at}.lora_paths")
    try:
        span = Verifier(**hashing).hasher.span
    except KvHashError as error:
        where = (error.at or "$").replace("$", at, 1)
        raise type(error)(error.message, at=where, code=error.code) from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"hash settings are those of Verifier: {error}", at=at) from None
    if span > MAX_BLOCK_TOKENS:
        raise UsageError(
            f"a hash covers at most {MAX_BLOCK_TOKENS} tokens, not {span}", at=f"{at}.block_size"
        )
    return dict(hashing)
