"""Hashing that lets a running engine step: in slices, with pauses, where hashing holds the interpreter.

The native backend lets the interpreter go while it hashes a long prompt and needs none of this. The pure Python path
would share it half and half with the step thread for as long as the prompt takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from kvhash import BlockHasher
from kvhash.extra_keys import RequestKeys
from kvhash.hasher import Chain

__all__ = ["PatientHasher"]

#: Tokens of a slice, less than a millisecond's work, and the seconds left to the engine after it.
_SLICE = 1024
_PAUSE_S = 0.005


class PatientHasher:
    """Starts chains as `BlockHasher.chain` does; pauses between slices of a long prompt while `busy` says so."""

    def __init__(self, hasher: BlockHasher, busy: Callable[[], bool]) -> None:
        self._hasher = hasher
        self._busy = busy

    def chain(self, tokens: Sequence[int], **keys: Any) -> Chain:
        """Return the chain of a whole prompt; raises as `BlockHasher.chain` does."""
        if len(tokens) <= _SLICE:
            return self._hasher.chain(tokens, **keys)
        RequestKeys.of(**keys, num_tokens=len(tokens))  # without tokens a chain cannot check what spans them
        chain = self._hasher.chain(None, **keys)
        for start in range(0, len(tokens), _SLICE):
            if start and self._busy():
                time.sleep(_PAUSE_S)
            chain.append(tokens[start : start + _SLICE])
        return chain
