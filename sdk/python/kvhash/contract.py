"""What each vLLM release hashes and publishes: one table of changes, and the contract of a release read from it.

This is the only module that knows a vLLM release number. A new release is a new row of `CHANGES`, never a new
branch somewhere else.

Source of every row: vLLM's own code of that release, confirmed by the recorded outputs in ``tests/data``.
"""

from __future__ import annotations

import functools
import re
import warnings
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from ._errors import AlgorithmError, UnknownReleaseError

__all__ = [
    "ALGORITHMS",
    "CHANGES",
    "NEWEST",
    "OLDEST",
    "Algorithm",
    "Change",
    "Contract",
    "EventContract",
    "EventField",
    "NewerReleaseWarning",
    "Release",
    "changes_between",
]


class NewerReleaseWarning(UserWarning):
    """The release is newer than the newest that this table knows; the newest known contract is used."""


# --- releases -------------------------------------------------------------------------------------------------

_RELEASE = re.compile(
    r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?(?:\.(\d{1,6}))?"
    r"(?:[-_.]?(?:alpha|beta|pre|post|dev|rc|a|b)[-_.]?\d{0,9}){0,4}(?:\+[a-z0-9._-]*)?",
    re.IGNORECASE | re.ASCII,
)


@dataclass(frozen=True, order=True, slots=True)
class Release:
    """A vLLM release as three numbers; a fourth (0.10.1.1), pre-release and local parts do not change the contract.

    A development version (``0.31.0.dev12``, ``0.31.0rc1``) counts as the release that it leads to.
    """

    major: int
    minor: int
    patch: int = 0

    @classmethod
    def parse(cls, text: str) -> Release:
        """Read ``0.31.0``, ``v0.31``, ``0.10.1.1``, ``0.31.0rc2.dev7+g1234``; raises UnknownReleaseError."""
        match = _RELEASE.fullmatch(text.strip()) if isinstance(text, str) and len(text) <= 100 else None
        if match is None:
            raise UnknownReleaseError(
                f"{text!r:.60} is not a vLLM release; expected one such as {NEWEST!s} or 'latest'"
            )
        return cls(int(match[1]), int(match[2]), int(match[3] or 0))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


# --- algorithms -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One value of vLLM's ``--prefix-caching-hash-algo``: a serialization, a digest, and how the digest is kept.

    ``keeps``: ``"digest"`` for all of it, ``"low64"`` for its low 64 bits. ``collision_resistant`` decides whether
    vLLM may use a fixed NONE_HASH.
    """

    name: str
    serialization: Literal["pickle5", "cbor"]
    digest: Literal["sha256", "xxh3_128"]
    keeps: Literal["digest", "low64"] = "digest"

    @property
    def collision_resistant(self) -> bool:
        """Whether the digest resists collisions made on purpose (SHA-256 does, XXH3 does not)."""
        return self.digest == "sha256"


#: Every algorithm that can be reproduced, by vLLM's name.
ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("sha256", "pickle5", "sha256"),
        Algorithm("sha256_cbor", "cbor", "sha256"),
        Algorithm("sha256_cbor_64bit", "cbor", "sha256", "low64"),
        Algorithm("xxhash", "pickle5", "xxh3_128"),
        Algorithm("xxhash_cbor", "cbor", "xxh3_128"),
    )
}


# --- the contract of one release ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EventField:
    """A field of an event; ``optional`` means that a map leaves it out when it is None."""

    name: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class EventContract:
    """How one release writes its events.

    ``layout``: each event is an ``array`` (tag first, every field written) or a ``map`` (with a ``type`` key,
    optional fields left out when None). ``hash_bytes``: whether the publisher can be set to raw bytes hashes.
    ``replay_topic_frame``: whether a replay reply carries the topic as a live message does. ``port_zero_from_os``:
    whether a rank's port is left to the operating system when the configured port is 0 (before, the rank is added).
    """

    layout: Literal["array", "map"]
    block_stored: tuple[EventField, ...]
    block_removed: tuple[EventField, ...]
    hash_bytes: bool = False
    replay_topic_frame: bool = False
    port_zero_from_os: bool = False

    def fields(self, tag: str) -> tuple[EventField, ...]:
        """Return the fields of the event type `tag`, in wire order; empty for ``AllBlocksCleared``."""
        return {"BlockStored": self.block_stored, "BlockRemoved": self.block_removed}.get(tag, ())


@dataclass(frozen=True, slots=True)
class Contract:
    """Everything about one vLLM release that decides a block hash, its published form, and its events.

    An immutable value; `Contract.for_vllm` makes it from the table of changes.
    """

    release: Release
    algorithms: tuple[str, ...]
    #: What is chained: the digest as an integer, or its bytes.
    chain_values: Literal["int", "bytes"]
    #: The seed of NONE_HASH without PYTHONHASHSEED, for collision-resistant algorithms; None where it is random.
    default_seed: str | None
    lora_key: Literal["id", "name", "name_and_path"]
    multimodal_key: Literal["identifier", "identifier_and_offset"]
    prompt_embeds_key: Literal["absent", "bytes", "sha256"]
    #: Whether extra keys carry a tag saying what they are, in the hash (events stay untagged).
    tagged_keys: bool
    lookahead: bool
    events: EventContract

    @classmethod
    def for_vllm(cls, release: str | Release = "latest") -> Contract:
        """Return the contract of a vLLM release.

        `release` is a version (patch, pre-release and development versions too), or ``"latest"`` for the newest
        that the table knows. A newer one works as the newest and says so once with `NewerReleaseWarning`.
        Raises UnknownReleaseError for what is no version, or older than 0.9.2.
        """
        if isinstance(release, str) and release.strip().lower() == "latest":
            return _contract_at(NEWEST)
        asked = release if isinstance(release, Release) else Release.parse(release)
        if asked < OLDEST:
            raise UnknownReleaseError(
                f"vLLM {asked} is older than {OLDEST}, the first release whose block hashes can be reproduced; "
                f"expected {OLDEST} to {NEWEST}"
            )
        return replace(_contract_at(_clamp(asked)), release=asked)

    @classmethod
    def events_for_vllm(cls, release: str | Release = "latest") -> EventContract:
        """Return how a release writes events; these reach further back than the hashes, to 0.9.1.

        Raises UnknownReleaseError as `for_vllm` does.
        """
        if isinstance(release, str) and release.strip().lower() == "latest":
            return _contract_at(NEWEST).events
        asked = release if isinstance(release, Release) else Release.parse(release)
        if asked < OLDEST_EVENTS:
            raise UnknownReleaseError(
                f"vLLM {asked} is older than {OLDEST_EVENTS}, the first release whose events are known; "
                f"expected {OLDEST_EVENTS} to {NEWEST}"
            )
        return _contract_at(max(_clamp(asked), OLDEST)).events

    def algorithm(self, name: str) -> Algorithm:
        """Return the algorithm `name` of this release; raises AlgorithmError when it has none of that name."""
        if not isinstance(name, str):
            raise AlgorithmError(f"the algorithm must be text, got {type(name).__name__}", at="$.algorithm")
        expected = ", ".join(self.algorithms)
        if name == "builtin":
            raise AlgorithmError(
                "algorithm 'builtin' is Python's own hash(), which differs by process and by build, so its block "
                f"hashes cannot be reproduced; start vLLM with one of: {expected}",
                at="$.algorithm",
                code="algorithm-not-reproducible",
            )
        if name not in ALGORITHMS:
            raise AlgorithmError(
                f"unknown algorithm {name!r}; vLLM {self.release} has: {expected}", at="$.algorithm"
            )
        if name not in self.algorithms:
            raise AlgorithmError(
                f"vLLM {self.release} has no algorithm {name!r}; it has: {expected}",
                at="$.algorithm",
                code="algorithm-not-in-release",
            )
        return ALGORITHMS[name]

    def hash_fields(self) -> dict[str, Any]:
        """Return the fields that decide hashes (all but the release and the events); equal means equal hashes."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("release", "events")}


# --- the table ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """One row: from release ``since`` on, these fields of the contract (and of its events) have these values.

    ``hashes`` and ``events`` are the new values; ``stored`` and ``removed`` are fields added at the end of the
    two event types. ``summary`` says it in words.
    """

    since: Release
    summary: str
    hashes: dict[str, Any] = field(default_factory=dict)
    events: dict[str, Any] = field(default_factory=dict)
    stored: tuple[EventField, ...] = ()
    removed: tuple[EventField, ...] = ()


def _optional(*names: str) -> tuple[EventField, ...]:
    return tuple(EventField(name, optional=True) for name in names)


_V = Release
OLDEST = _V(0, 9, 2)
OLDEST_EVENTS = _V(0, 9, 1)
NEWEST = _V(0, 33, 0)

_START = Contract(
    release=OLDEST,
    algorithms=("sha256",),
    chain_values="int",
    default_seed=None,
    lora_key="id",
    multimodal_key="identifier",
    prompt_embeds_key="absent",
    tagged_keys=False,
    lookahead=False,
    events=EventContract(
        layout="array",
        block_stored=tuple(
            map(EventField, ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"))
        ),
        block_removed=(EventField("block_hashes"),),
    ),
)

CHANGES: tuple[Change, ...] = (
    Change(
        OLDEST,
        "the first reproducible recipe: sha256 over pickle, the digest as an integer, NONE_HASH from PYTHONHASHSEED; "
        "LoRA by integer id; multimodal items by identifier; salt on block 0; events are arrays",
    ),
    Change(
        _V(0, 10, 0),
        "adds sha256_cbor_64bit: canonical CBOR, low 64 bits as an integer; NONE_HASH comes from the chosen algorithm",
        hashes={"algorithms": ("sha256", "sha256_cbor_64bit")},
    ),
    Change(
        _V(0, 10, 2),
        "chain values are the digest's bytes; sha256_cbor replaces sha256_cbor_64bit; events gain medium, "
        "and publish the low 64 bits or (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0) the bytes",
        hashes={"chain_values": "bytes", "algorithms": ("sha256", "sha256_cbor")},
        events={"hash_bytes": True},
        stored=(EventField("medium"),),
        removed=(EventField("medium"),),
    ),
    Change(
        _V(0, 11, 1),
        "the LoRA key is the adapter's name; prompt embeddings enter the key as the raw bytes of the block's rows",
        hashes={"lora_key": "name", "prompt_embeds_key": "bytes"},
    ),
    Change(
        _V(0, 13, 0),
        "adds xxhash (pickle) and xxhash_cbor: XXH3-128, 16 bytes",
        hashes={"algorithms": ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")},
    ),
    Change(_V(0, 14, 0), "events gain lora_name", stored=(EventField("lora_name"),)),
    Change(
        _V(0, 17, 0),
        "the prompt-embeds key is the SHA-256 digest of those bytes; events gain extra_keys, one entry per block",
        hashes={"prompt_embeds_key": "sha256"},
        stored=_optional("extra_keys"),
    ),
    Change(
        _V(0, 19, 0),
        "the multimodal key is (identifier, offset from the block's start), negative on continuation blocks",
        hashes={"multimodal_key": "identifier_and_offset"},
    ),
    Change(
        _V(0, 20, 0),
        "events gain group_idx",
        stored=_optional("group_idx"),
        removed=_optional("group_idx"),
    ),
    Change(
        _V(0, 22, 0),
        "events gain kv_cache_spec_kind and kv_cache_spec_sliding_window",
        stored=_optional("kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    ),
    Change(
        _V(0, 24, 0),
        "each event is a map with a type key; the batch around them stays an array",
        events={"layout": "map"},
    ),
    Change(
        _V(0, 26, 0),
        "events gain locality; replay replies gain a topic frame",
        events={"replay_topic_frame": True},
        stored=_optional("locality"),
        removed=_optional("locality"),
    ),
    Change(
        _V(0, 29, 0),
        "without PYTHONHASHSEED, sha256* has the fixed NONE_HASH H('vllm-none-hash') (xxhash* stays random); "
        "events gain ownership",
        hashes={"default_seed": "vllm-none-hash"},
        stored=_optional("ownership"),
        removed=_optional("ownership"),
    ),
    Change(_V(0, 30, 0), "events gain session_id", stored=_optional("session_id")),
    Change(
        _V(0, 31, 0),
        "extra keys are tagged in the hash, and the LoRA key holds the adapter's path: ('lora', name, path), "
        "('mm', identifier, offset), ('cache_salt', salt), ('prompt_embeds', digest); events stay untagged",
        hashes={"lora_key": "name_and_path", "tagged_keys": True},
    ),
    Change(
        _V(0, 33, 0),
        "look-ahead hashing: with L > 0 the key is flat, (extra keys or null, t1, .., tL), of the L tokens after the "
        "block, and images count that reach into those; events gain lookahead_token_ids",
        hashes={"lookahead": True},
        events={"port_zero_from_os": True},
        stored=_optional("lookahead_token_ids"),
    ),
)


def _apply(contract: Contract, change: Change) -> Contract:
    events = replace(
        contract.events,
        block_stored=contract.events.block_stored + change.stored,
        block_removed=contract.events.block_removed + change.removed,
        **change.events,
    )
    return replace(contract, release=change.since, events=events, **change.hashes)


@functools.lru_cache(maxsize=64)
def _contract_at(release: Release) -> Contract:
    contract = _START
    for change in CHANGES:
        if change.since <= release:
            contract = _apply(contract, change)
    return replace(contract, release=release)


def _clamp(asked: Release) -> Release:
    """Return `asked`, or the newest known line's release with a warning when `asked` is beyond it."""
    if (asked.major, asked.minor) > (NEWEST.major, NEWEST.minor):
        warnings.warn(
            NewerReleaseWarning(
                f"vLLM {asked} is newer than {NEWEST}, the newest release that this kvhash knows; "
                f"hashing as {NEWEST} does"
            ),
            stacklevel=4,
        )
        return NEWEST
    return asked


def changes_between(old: str | Release, new: str | Release) -> tuple[Change, ...]:
    """Return the rows that lie after release `old` and up to `new`, oldest first.

    Either order is accepted; raises UnknownReleaseError as `Contract.for_vllm` does.
    """
    first, last = sorted((Contract.for_vllm(old).release, Contract.for_vllm(new).release))
    return tuple(change for change in CHANGES if first < change.since <= last)
