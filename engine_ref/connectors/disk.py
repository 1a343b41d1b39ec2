"""A tier on disk: one file a block, whole or not there, whenever the engine or the machine stops.

A file is written under a temporary name, synced and renamed, so that no name ever stands for half a block; what is
read is checked against its checksum, key and fingerprint all the same, since disks and people change files too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from kvhash._errors import InvalidRequestError

from .envelope import BadPageError, open_page, seal_page
from .tier import Breaker, Tier

__all__ = ["DiskTier"]

_log = logging.getLogger(__name__)
_NAME = re.compile(r"([0-9a-f]{24,136})\.kv")
_TEMPORARY = ".tmp"
#: A full disk, a full quota, a file past the limit.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DiskTier(Tier):
    """Keeps pages below `path`, in a directory for each fingerprint, at most `max_bytes` bytes of files in this one.

    The directory belongs to one engine at a time, by a lock. The least recently used file goes first; after a restart
    the times of the files say which that is. A disk that is full or fails costs nothing but hits: `put` says False,
    makes room once, and leaves the disk alone for a while when that does not help.

    Raises InvalidRequestError when the directory cannot be made or another engine has it.
    """

    medium = "STORAGE"
    source = "disk"

    def __init__(self, *, path: str | Path, max_bytes: int, name: str = "disk") -> None:
        super().__init__(name)
        self.path = Path(path)
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._files: OrderedDict[bytes, int] = OrderedDict()
        self._mutex = threading.RLock()
        self._numbers = itertools.count()
        self._breaker = Breaker(f"the disk tier at {self.path}")
        self._fingerprint = b""
        self._root = self.path
        self._lock_file: int | None = None

    def bind(self, fingerprint: bytes) -> list[bytes]:
        """Take the directory, clear what a crash left half-written, and return the keys of the files."""
        self._fingerprint = fingerprint
        self._root = self.path / fingerprint.hex()
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self._lock_file = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise InvalidRequestError(f"another engine keeps its blocks in {self._root}") from None
        except OSError as error:
            self.close()
            raise InvalidRequestError(f"no blocks can be kept in {self._root}: {error}") from None
        found: list[tuple[float, bytes, int]] = []
        for entry in os.scandir(self._root):
            if entry.name.endswith(_TEMPORARY):
                self._remove_file(entry.path)
                self.counters["leftovers"] += 1
            elif (match := _NAME.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                found.append((status.st_mtime, bytes.fromhex(match[1]), status.st_size))
        for _, key, size in sorted(found):
            self._files[key] = size
            self.num_bytes += size
        self._make_room(0)
        self._changes.clear()  # nobody has heard of these
        return list(self._files)

    def contains(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return the keys that have a file; whether it is sound shows when it is read."""
        with self._mutex:
            return {key for key in keys if key in self._files}

    def get(self, key: bytes) -> bytes | None:
        """Read a page; a file that does not hold it is counted under what is wrong with it, and removed."""
        with self._mutex:
            if key not in self._files:
                self.counters["misses"] += 1
                return None
        path = self._file(key)
        try:
            data = path.read_bytes()
            page = open_page(data, key, fingerprint=self._fingerprint)
        except BadPageError as error:
            _log.warning("%s is %s; removed, its block is computed again", path, error.reason)
            self._lose(key, error.reason)
            return None
        except FileNotFoundError:
            _log.warning("%s is gone; its block is computed again", path)
            self._lose(key, "vanished")
            return None
        except OSError as error:
            self._breaker.failed(error)
            self._lose(key, "read_errors")
            return None
        with self._mutex:
            if key in self._files:
                self._files.move_to_end(key)
        self.counters["hits"] += 1
        _touch(path)
        return page

    def put(self, key: bytes, page: bytes) -> bool | None:
        """Write a page; None if it is larger than the bound or the disk does not take it. One thread at a time."""
        data = seal_page(key, page, fingerprint=self._fingerprint)
        with self._mutex:
            if key in self._files:
                self._files.move_to_end(key)
                return False
            if len(data) > self.max_bytes:
                self.counters["too_large"] += 1
                return None
            if self._breaker.is_open:
                self.counters["skipped"] += 1
                return None
            self._make_room(len(data))
        if not self._try_to_write(key, data):
            return None
        with self._mutex:
            self._files[key] = len(data)
            self.num_bytes += len(data)
            self.counters["stores"] += 1
            self._changes.append((key, True))
        return True

    def _try_to_write(self, key: bytes, data: bytes) -> bool:
        """Write a file; when that fails, once more with room made: others fill the disk too."""
        for attempt in range(2):
            try:
                self._write(key, data)
            except OSError as error:
                self.counters["no_space" if error.errno in _FULL else "write_errors"] += 1
                with self._mutex:
                    if attempt or error.errno not in _FULL or not self._files:
                        self._breaker.failed(error)
                        return False
                    self._evict(max(2 * len(data), self.num_bytes // 10))
            else:
                self._breaker.worked()
                return True
        raise AssertionError("the second attempt returns")

    def clear(self) -> bool:
        """Remove every file of this fingerprint."""
        with self._mutex:
            for key in list(self._files):
                self._drop(key)
            return not self._files

    def close(self) -> None:
        """Give the directory back."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def _file(self, key: bytes) -> Path:
        return self._root / f"{key.hex()}.kv"

    def _write(self, key: bytes, data: bytes) -> None:
        temporary = self._root / f"{key.hex()}.{next(self._numbers)}{_TEMPORARY}"
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._file(key))
        except OSError:
            self._remove_file(temporary)
            raise

    def _make_room(self, size: int) -> None:
        self._evict(self.num_bytes + size - self.max_bytes)

    def _evict(self, size: int) -> None:
        """Remove the oldest files until `size` bytes are free."""
        target = self.num_bytes - size
        while self._files and self.num_bytes > target:
            self._drop(next(iter(self._files)))
            self.counters["evictions"] += 1

    def _lose(self, key: bytes, reason: str) -> None:
        self.counters[reason] += 1
        with self._mutex:
            if key in self._files:
                self._drop(key)

    def _drop(self, key: bytes) -> None:
        self.num_bytes -= self._files.pop(key)
        self._remove_file(self._file(key))
        self._changes.append((key, False))

    def _remove_file(self, path: str | Path) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            self.counters["remove_errors"] += 1
            _log.warning("%s cannot be removed: %s", path, error)


def _touch(path: Path) -> None:
    """Note that a file was used, for the next start."""
    with contextlib.suppress(OSError):  # only the order of eviction depends on it
        os.utime(path)
