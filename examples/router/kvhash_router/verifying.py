"""Whether an engine hashes as it is configured here: its own events are the judge.

Every block of an engine's first batches is recomputed, later those of one batch in `_SAMPLE`. One mismatch means that
the settings are not the engine's (another algorithm, seed or release, another path of an adapter), and nothing that
is looked up for it can be trusted, until the engine restarts or the configuration changes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import msgspec

from kvhash.events.schema import BlockStored, EventBatch
from kvhash.events.verify import Verifier

from .config import ModelConfig

__all__ = ["EngineVerifier", "Verification"]

_ALL_UNTIL = 512
_SAMPLE = 16


@dataclass(frozen=True, slots=True)
class Verification:
    """Blocks that matched, that did not, and that could not be recomputed; by adapter why it is not trusted.

    The adapter None is the base model: a mismatch there holds for every request.
    """

    matched: int
    mismatched: int
    not_derivable: int
    faults: dict[str | None, str]

    def fault(self, adapter: str | None) -> str | None:
        """Return why requests of `adapter` (None: of the base model) cannot be looked up, or None."""
        return self.faults.get(None) or self.faults.get(adapter)


class EngineVerifier:
    """Recomputes one engine's published hashes. Fed by one thread, read by any."""

    def __init__(self, config: ModelConfig, *, max_blocks: int = 100_000) -> None:
        self._config = config
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Begin anew: the engine restarted, and may have other settings."""
        paths = {name: one.path for name, one in self._config.adapters.items() if one.path is not None}
        verifier = Verifier(
            **msgspec.structs.asdict(self._config.hash), lora_paths=paths, max_blocks=self._max_blocks
        )
        with self._lock:
            self._verifier = verifier
            self._batches = 0
            self._faults: dict[str | None, str] = {}

    def feed(self, batch: EventBatch) -> None:
        """Check a batch, or pass it over when enough have matched."""
        if not any(isinstance(event, BlockStored) for event in batch.events):
            return
        self._batches += 1
        if self._verifier.verdicts["match"] > _ALL_UNTIL and self._batches % _SAMPLE:
            return
        for check in self._verifier.feed(batch):
            if check.verdict == "mismatch" and check.lora_name not in self._faults:
                event: Any = batch.events[check.event]
                fault = (
                    f"hash-mismatch: the engine published {check.published!r} where the configured settings give "
                    f"{check.expected!r} (a block of {event.block_size} tokens"
                    + (f", adapter {check.lora_name!r}" if check.lora_name else "")
                    + "); `kvhash identify` with its tokens tells which settings fit"
                )
                with self._lock:
                    self._faults[check.lora_name] = fault

    def state(self) -> Verification:
        """Return the verdicts so far."""
        verdicts = self._verifier.verdicts
        with self._lock:
            faults = dict(self._faults)
        return Verification(verdicts["match"], verdicts["mismatch"], verdicts["not-derivable"], faults)
