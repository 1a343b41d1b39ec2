"""The decision log: one JSON line a request, with what was known, what was chosen and how it ended.

A line's ``prompts`` hold either hashes alone or, where tokens may be logged, whole request lines; `kvhash diff` takes
two of either and says where they part and why.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

from kvhash.block_hash import external_hash

from .config import ConfigError
from .prompts import HashedPrompt

__all__ = ["DecisionLog", "prompt_json"]


def prompt_json(prompt: HashedPrompt, *, with_tokens: bool) -> dict[str, Any]:
    """Return what the log says of a prompt: a request line, or the hashes as events carry them (decimal text)."""
    if with_tokens:
        return prompt.request.to_json()
    return {
        "block_hashes": [str(external_hash(value)) for value in prompt.hashes],
        "num_tokens": prompt.num_tokens,
    }


class DecisionLog:
    """Appends lines to a file (``-``: stdout) from a thread of its own; never holds up a request.

    At most `limit` lines wait; more are dropped and counted. Raises ConfigError when the file cannot be opened.
    """

    def __init__(self, path: str, *, with_tokens: bool = False, limit: int = 10_000) -> None:
        self.with_tokens = with_tokens
        #: Lines that were dropped.
        self.dropped = 0
        self._own = path != "-"
        try:
            self._file: TextIO = Path(path).open("a", encoding="utf-8") if self._own else sys.stdout  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"cannot write the decision log {path}: {error.strerror or error}") from None
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(limit)
        self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
        self._thread.start()

    def write(self, record: dict[str, Any]) -> bool:
        """Queue a record; returns whether there was room."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1
            return False
        return True

    def close(self, timeout: float = 5.0) -> None:
        """Write what waits, then close."""
        self._queue.put(None)
        self._thread.join(timeout)
        if self._own:
            self._file.close()

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            try:
                self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
                if self._queue.empty():
                    self._file.flush()
            except (OSError, ValueError):
                self.dropped += 1
        if self._own:
            self._file.flush()
