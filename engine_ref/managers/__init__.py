"""One manager per kind of KV cache group."""

from __future__ import annotations

from .base import GroupManager
from .chunked_local import ChunkedLocalAttentionManager
from .factory import make_manager
from .full_attention import FullAttentionManager
from .mamba import MambaManager
from .sliding_window import SlidingWindowManager

__all__ = [
    "ChunkedLocalAttentionManager",
    "FullAttentionManager",
    "GroupManager",
    "MambaManager",
    "SlidingWindowManager",
    "make_manager",
]
