"""The decision log: one JSON line a request, with what was known, what was chosen and how it ended.

A line's ``prompts`` hold either hashes alone or, where tokens may be logged, whole request lines; `kvhash diff` takes
two of either and says where they part and why.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

from kvhash.block_hash import external_hash

from .config import ConfigError
from .prompts import HashedPrompt

__all__ = ["DecisionLog", "prompt_json"]

_log = logging.getLogger(__name__)


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

    At most `limit` lines wait. Those that find no room, and those that cannot be written, are dropped and counted; a
    line of which a part was written is ended before the next. A file that was moved away or removed is begun anew under
    its name. Raises ConfigError when the file cannot be opened.
    """

    def __init__(self, path: str, *, with_tokens: bool = False, limit: int = 10_000) -> None:
        self.with_tokens = with_tokens
        #: Lines that were dropped.
        self.dropped = 0
        #: Called, from any thread, for each line that is dropped.
        self.on_drop: Callable[[], object] = lambda: None
        self._path = None if path == "-" else Path(path)
        self._torn = False
        self._failing = False
        try:
            self._file: BinaryIO = _open(self._path)
        except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
            said = error.strerror if isinstance(error, OSError) else None
            raise ConfigError(f"cannot write the decision log {path}: {said or error}") from None
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(limit)
        self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
        self._thread.start()

    def write(self, record: dict[str, Any]) -> bool:
        """Queue a record; returns whether there was room."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._drop()
            return False
        return True

    def close(self, timeout: float = 5.0) -> None:
        """Write what waits, then close."""
        self._queue.put(None)
        self._thread.join(timeout)
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _drop(self) -> None:
        self.dropped += 1
        self.on_drop()

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            try:
                line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
                self._put_down(line)
                self._failing = False
            except (OSError, ValueError) as error:
                self._drop()
                if not self._failing:
                    self._failing = True
                    _log.warning("the decision log cannot be written, its lines are dropped: %s", error)

    def _put_down(self, line: bytes) -> None:
        if self._path is not None and _is_elsewhere(self._file, self._path):
            with contextlib.suppress(OSError):  # its folder is gone too: what is open is written on
                moved, self._file = self._file, _open(self._path)
                moved.close()
                self._torn = False
        left = memoryview(b"\n" + line if self._torn else line)
        self._torn = True
        while left:
            left = left[self._file.write(left) :]
        self._file.flush()
        self._torn = False


def _open(path: Path | None) -> BinaryIO:
    # Unbuffered: what failed is not kept, to come out later as half a line.
    return sys.stdout.buffer if path is None else cast(BinaryIO, path.open("ab", buffering=0))


def _is_elsewhere(file: BinaryIO, path: Path) -> bool:
    """Whether another file, or none, has the name under which `file` was opened."""
    try:
        return not os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return True
