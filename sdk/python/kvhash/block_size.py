"""How many tokens a hash covers when there are several KV cache groups, or context parallelism.

* With decode context parallelism D a block of an attention group spans ``block_size * D`` tokens, and so does its
  hash. State (Mamba) groups are not scaled.
* With several groups, hashes are made at the gcd of the groups' sizes (``hash_block_size``), unless overridden,
  and hits are aligned to their lcm (``scheduler_block_size``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ._checks import check_int
from ._errors import InvalidBlockSizeError

__all__ = ["BlockSizes", "check_block_size", "resolve_block_sizes"]


def check_block_size(value: object, *, at: str = "$.block_size", what: str = "the block size") -> int:
    """Return `value` as an int of at least 1 (and at most 2^31 - 1); raises InvalidBlockSizeError."""
    return check_int(value, at=at, what=what, minimum=1, maximum=(1 << 31) - 1, error=InvalidBlockSizeError)


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """The granularities of an engine, in tokens.

    ``groups``: tokens per block of each KV cache group, context parallelism included. ``hash_block_size``: tokens
    per hash. ``scheduler_block_size``: what cache hits are aligned to.
    """

    groups: tuple[int, ...]
    hash_block_size: int
    scheduler_block_size: int

    def factor(self, group: int) -> int:
        """Return how many hashes a block of this group spans, for `BlockHashView`."""
        return self.groups[group] // self.hash_block_size


def resolve_block_sizes(
    group_block_sizes: Sequence[int],
    *,
    hash_block_size: int | None = None,
    decode_context_parallel_size: int = 1,
    unscaled_groups: Sequence[int] = (),
) -> BlockSizes:
    """Return the granularities of an engine with these KV cache groups.

    `hash_block_size` overrides the gcd (vLLM's ``prefix_match_unit``) and must divide every group's size.
    `unscaled_groups`: indices of groups that context parallelism leaves alone (Mamba). Raises
    InvalidBlockSizeError. Source: ``resolve_kv_cache_block_sizes`` of vLLM 0.33.0.
    """
    if not group_block_sizes:
        raise InvalidBlockSizeError("expected at least one KV cache group", at="$.groups")
    dcp = check_block_size(
        decode_context_parallel_size,
        at="$.decode_context_parallel_size",
        what="the decode context parallel size",
    )
    sizes = tuple(
        check_block_size(size, at=f"$.groups[{i}]") * (1 if i in unscaled_groups else dcp)
        for i, size in enumerate(group_block_sizes)
    )
    unit = math.gcd(*sizes)
    if hash_block_size is not None:
        unit = check_block_size(hash_block_size, at="$.hash_block_size", what="the hash block size")
        for i, size in enumerate(sizes):
            if size % unit:
                raise InvalidBlockSizeError(
                    f"the hash block size {unit} does not divide the {size} tokens of group {i}",
                    at="$.hash_block_size",
                )
        if len(sizes) == 1 and unit != sizes[0]:
            raise InvalidBlockSizeError(
                f"with a single KV cache group hashes cover its block, {sizes[0]} tokens; got {unit}",
                at="$.hash_block_size",
            )
    return BlockSizes(sizes, unit, math.lcm(*sizes))
