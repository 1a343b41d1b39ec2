"""How an index is kept: its values sealed as bytes, and checked, every one of them, when they come back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from kvhash._errors import DecodeError

from .checks import MAX_RANKS
from .types import MAX_BLOCK_TOKENS

__all__ = ["DumpedGroup", "DumpedLedger", "DumpedRank", "Snapshot", "SnapshotError", "seal", "unseal"]

_FORMAT = "kvhash-index-2"


class SnapshotError(DecodeError):
    """The bytes are no snapshot of an index, or one of a form that is not known."""

    code = "invalid-snapshot"


_Count = Annotated[int, msgspec.Meta(ge=0)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_TOKENS)]


class DumpedLedger(msgspec.Struct, forbid_unknown_fields=True):
    """A rank's ledger as it is kept."""

    seq: _Count | None
    ts: float | None
    expected: _Count | None
    faults: dict[str, float]
    missing: list[tuple[_Count, _Count, float]]
    heard: bool
    peak: float | None = None


#: Number, tokens by tier, smallest, kind, window, chunk.
DumpedGroup = tuple[int, dict[str, _Tokens], _Tokens, str | None, _Count | None, _Tokens | None]


class DumpedRank(msgspec.Struct, forbid_unknown_fields=True):
    """A rank as it is kept: places are tier, remote, group; blocks are key, copies, parent, digest, ends_chunk."""

    ledger: DumpedLedger
    counts: dict[str, int]
    media: dict[str, _Count]
    groups: list[DumpedGroup]
    places: list[tuple[tuple[str, bool, int], list[tuple[int, int, int, bytes | None, bool]]]]


class _Sealed(msgspec.Struct):
    format: str
    digest: bytes = b""
    body: bytes = b""


class Snapshot(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An index as it is kept."""

    counts: dict[str, int]
    media: dict[str, _Count] = {}
    refused: dict[str, float] = {}
    engines: dict[str, list[tuple[int | None, DumpedRank]]]


def _digest(body: bytes) -> bytes:
    """Return what a damaged body does not have; no proof of who wrote it."""
    return hashlib.blake2b(body, digest_size=16).digest()


def seal(value: Mapping[str, Any]) -> bytes:
    """Return an index's values as bytes that `unseal` takes."""
    body = msgspec.msgpack.encode(value)
    return msgspec.msgpack.encode({"format": _FORMAT, "digest": _digest(body), "body": body})


def unseal(data: bytes | bytearray | memoryview, tiers: Sequence[str]) -> Snapshot:
    """Return an index's values from what `seal` gave; `tiers`: those that the index has. Raises SnapshotError."""
    try:
        outer = msgspec.msgpack.decode(data, type=_Sealed)
        if outer.format != _FORMAT:
            raise SnapshotError(f"expected a snapshot of form {_FORMAT!r}, got {outer.format!r:.40}")
        if outer.digest != _digest(outer.body):
            raise SnapshotError("the snapshot is damaged: its digest is not that of its contents")
        value = msgspec.msgpack.decode(outer.body, type=Snapshot)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SnapshotError(f"the bytes are no snapshot of an index: {error}") from None
    for ranks in value.engines.values():
        if len(ranks) > MAX_RANKS or len({number for number, _ in ranks}) < len(ranks):
            raise SnapshotError(f"an engine has at most {MAX_RANKS} ranks, each once")
        for _, rank in ranks:
            _check_places(rank, tiers)
    return value


def _check_places(rank: DumpedRank, tiers: Sequence[str]) -> None:
    groups = {number for number, *_ in rank.groups}
    places = [place for place, _ in rank.places]
    for tier, _, group in places:
        if tier not in tiers:
            raise SnapshotError(f"a place has the tier {tier!r:.40}, and this index has {[*tiers]}")
        if group not in groups:
            raise SnapshotError(f"a place is of group {group}, which is not described")
    for _, sizes, *_ in rank.groups:
        if not set(sizes) <= {*tiers}:
            raise SnapshotError(f"a group has the tiers {[*sizes]!r:.60}, and this index has {[*tiers]}")
    if len(set(places)) < len(places) or len(groups) < len(rank.groups):
        raise SnapshotError("a place or a group is there twice")
