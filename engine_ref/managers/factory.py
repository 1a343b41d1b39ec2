"""The manager that fits a group's spec."""

from __future__ import annotations

from ..block import cdiv
from ..block_pool import BlockPool
from ..spec import ChunkedLocalAttentionSpec, GroupSpec, MambaSpec, SlidingWindowSpec
from .base import GroupManager
from .chunked_local import ChunkedLocalAttentionManager
from .full_attention import FullAttentionManager
from .mamba import MambaManager
from .sliding_window import SlidingWindowManager

__all__ = ["make_manager"]


def make_manager(
    spec: GroupSpec,
    *,
    pool: BlockPool,
    group_id: int,
    hit_alignment: int,
    decode_context_parallel_size: int,
    max_in_flight_tokens: int,
    max_model_len: int,
) -> GroupManager:
    """Return a manager for `spec`.

    A group that recycles blocks is admitted by what it holds at once: its window or chunk and the tokens in flight,
    with one block more for a window that starts inside a block.
    """
    scaled = 1 if isinstance(spec, MambaSpec) else decode_context_parallel_size
    size = spec.block_size * scaled
    if isinstance(spec, MambaSpec):
        return MambaManager(block_size=size, pool=pool, group_id=group_id, hit_alignment=hit_alignment)
    if isinstance(spec, SlidingWindowSpec):
        tokens = min(spec.sliding_window - 1 + max_in_flight_tokens, max_model_len)
        return SlidingWindowManager(
            sliding_window=spec.sliding_window,
            block_size=size,
            pool=pool,
            group_id=group_id,
            hit_alignment=hit_alignment,
            admission_cap=cdiv(tokens, spec.block_size) + 1,
        )
    if isinstance(spec, ChunkedLocalAttentionSpec):
        tokens = min(spec.attention_chunk_size + max_in_flight_tokens, max_model_len)
        return ChunkedLocalAttentionManager(
            attention_chunk_size=spec.attention_chunk_size,
            block_size=size,
            pool=pool,
            group_id=group_id,
            hit_alignment=hit_alignment,
            admission_cap=cdiv(tokens, spec.block_size),
        )
    return FullAttentionManager(block_size=size, pool=pool, group_id=group_id, hit_alignment=hit_alignment)
