"""KV cache group specs: what a group of layers keeps of the past, and in which blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "ChunkedLocalAttentionSpec",
    "FullAttentionSpec",
    "GroupSpec",
    "MambaSpec",
    "SlidingWindowSpec",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec:
    """Every token is kept until the request ends."""

    block_size: int
    kind = "full_attention"
    sliding_window = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec:
    """The last ``sliding_window`` tokens are kept; blocks that slide out become the null block."""

    block_size: int
    sliding_window: int
    kind = "sliding_window"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocalAttentionSpec:
    """The tokens of the current chunk of ``attention_chunk_size`` are kept."""

    block_size: int
    attention_chunk_size: int
    kind = "chunked_local_attention"
    sliding_window = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """One recurrent state, copied at the ends of blocks (vLLM's ``mamba_cache_mode="align"``)."""

    block_size: int
    kind = "mamba"
    sliding_window = None


GroupSpec: TypeAlias = "FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec | MambaSpec"
