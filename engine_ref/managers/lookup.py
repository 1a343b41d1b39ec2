"""What a group's search for the longest hit is given and what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvhash.block_hash import ChainValue

from ..block import Block
from ..block_pool import BlockPool

__all__ = ["GroupHit", "Lookup"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """A search over the groups ``group_ids``, which share one spec.

    ``hashes``: the request's, at the pool's hash block size. ``max_length``: tokens that a hit may have at most.
    ``alignment``: tokens that its length must be a multiple of. ``drop_eagle``: one more unit than the hit must be
    there, and is then dropped, because the drafter needs its hidden states recomputed.
    """

    hashes: Sequence[ChainValue]
    max_length: int
    group_ids: Sequence[int]
    pool: BlockPool
    alignment: int
    drop_eagle: bool = False


@dataclass(frozen=True, slots=True)
class GroupHit:
    """The blocks of each group, null blocks where none is needed, and the tokens that they cover."""

    blocks: list[list[Block]]
    length: int
