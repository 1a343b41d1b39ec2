r"""Recordings: a file of raw frames with receive times, appended to, readable after a cut at any byte.

::

    header   b"KVHREC1\n", file id (8 random bytes)
    record   b"\xa5KVR", body length (u32), CRC-32 of length and body (u32), body
    body     flags (u8; 1: the last frame is a zstd frame), rank (i32, -2^31: none), receive time in ns since
             the epoch (u64), endpoint length (u16), endpoint (UTF-8), number of frames (u8), each frame's
             length (u32), the frames

All integers are little-endian. A record that is cut or damaged is passed over and reported, never returned.
``<name>.idx`` beside the file holds one checked entry for each stretch of records, so that ``from_seq``
passes over stretches that end before it. It is only a help: a missing, stale or damaged one costs time,
nothing else.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from kvhash._errors import MissingDependencyError

from ._errors import RecordingError
from .decode import MAX_PAYLOAD_BYTES

try:
    import fcntl
except ImportError:  # not a POSIX system: one writer at a time is up to the user there
    fcntl = None  # type: ignore[assignment]

__all__ = ["Damage", "Record", "Recording", "RecordingWriter"]

_MAGIC, _INDEX_MAGIC, _MARK = b"KVHREC1\n", b"KVHIDX1\n", b"\xa5KVR"
_HEAD_BYTES = 16
_RECORD = struct.Struct("<4sII")
_BODY = struct.Struct("<BiQH")
_ENTRY = struct.Struct("<QQQqqI")  # start, end, records, lowest and highest seq, CRC-32 of the rest
_NO_RANK = -(1 << 31)
_ZSTD = 1
_MAX_BODY = MAX_PAYLOAD_BYTES + (1 << 20)
#: An index entry covers at least this many bytes of records.
_STRETCH = 1 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """One received message: its frames (topic, sequence number, payload) as they came, when and from where.

    ``received_ns``: ns since the epoch. ``offset``: where the record starts in the file.
    """

    received_ns: int
    endpoint: str
    rank: int | None
    frames: tuple[bytes, ...]
    offset: int = 0

    @property
    def topic(self) -> bytes:
        """The first frame, or empty."""
        return self.frames[0] if self.frames else b""

    @property
    def seq(self) -> int | None:
        """The sequence number; None when the message is not three frames with eight bytes in the second."""
        if len(self.frames) != 3 or len(self.frames[1]) != 8:
            return None
        return int.from_bytes(self.frames[1], "big", signed=True)

    @property
    def payload(self) -> bytes:
        """The last frame, or empty."""
        return self.frames[-1] if self.frames else b""


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a recording that hold no whole record; ``tail``: they are its end, as after a cut."""

    offset: int
    length: int
    reason: str
    tail: bool


# --- zstd, optional -----------------------------------------------------------------------------------------


def _zstd() -> Any:
    """Return (compress, decompress bounded to `MAX_PAYLOAD_BYTES`); raises MissingDependencyError."""
    try:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        pass
    else:

        def bounded(data: bytes) -> bytes:
            reader = zstd.ZstdDecompressor()
            return bytes(reader.decompress(data, max_length=MAX_PAYLOAD_BYTES + 1))

        return zstd.compress, bounded
    try:
        import zstandard
    except ImportError:
        raise MissingDependencyError(
            "compressed recordings need zstandard; install it with: pip install 'kvhash[zstd]'"
        ) from None

    def bounded_too(data: bytes) -> bytes:
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            return bytes(reader.read(MAX_PAYLOAD_BYTES + 1))

    return zstandard.ZstdCompressor().compress, bounded_too


def _decompress(data: bytes) -> bytes:
    _, decompress = _zstd()
    try:
        payload: bytes = decompress(data)
    except MissingDependencyError:
        raise
    except Exception as error:  # each zstd package has its own error type
        raise ValueError(f"bad zstd frame: {error}") from None
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError("a zstd frame larger than is read")
    return payload


# --- one record ---------------------------------------------------------------------------------------------


def _pack(record: Record, compress: Any) -> bytes:
    frames, flags = list(record.frames), 0
    if compress is not None and frames:
        frames[-1], flags = compress(frames[-1]), _ZSTD
    endpoint = record.endpoint.encode("utf-8", "surrogateescape")
    if len(endpoint) > 0xFFFF or len(frames) > 0xFF or sum(map(len, frames)) > MAX_PAYLOAD_BYTES:
        raise RecordingError("the message is too large to be recorded", code="frame-too-large")
    rank = _NO_RANK if record.rank is None else record.rank
    body = b"".join(
        (
            _BODY.pack(flags, rank, record.received_ns, len(endpoint)),
            endpoint,
            bytes((len(frames),)),
            struct.pack(f"<{len(frames)}I", *map(len, frames)),
            *frames,
        )
    )
    return _RECORD.pack(_MARK, len(body), _checksum(body)) + body


def _checksum(body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(len(body).to_bytes(4, "little")))


def _unpack(body: bytes, offset: int) -> Record:
    """Read a body whose checksum was right; raises ValueError where another writer's format differs."""
    try:
        flags, rank, received_ns, size = _BODY.unpack_from(body)
        position = _BODY.size + size
        endpoint = body[_BODY.size : position].decode("utf-8", "surrogateescape")
        count = body[position]
        sizes = struct.unpack_from(f"<{count}I", body, position + 1)
    except (struct.error, IndexError, UnicodeDecodeError):
        raise ValueError("malformed record") from None
    position += 1 + 4 * count
    if flags & ~_ZSTD or position + sum(sizes) != len(body):
        raise ValueError("malformed record")
    frames = []
    for size in sizes:
        frames.append(body[position : position + size])
        position += size
    if flags & _ZSTD and frames:
        frames[-1] = _decompress(frames[-1])
    return Record(received_ns, endpoint, None if rank == _NO_RANK else rank, tuple(frames), offset)


# --- reading ------------------------------------------------------------------------------------------------


class Recording:
    """Reads a recording, also while it is being written: what is whole at that moment is there.

    ``damage`` lists what the latest pass found unreadable. Raises RecordingError (``not-a-recording``,
    ``unsupported-recording``), MissingDependencyError when it is compressed and zstd is not there, and
    OSError.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.damage: list[Damage] = []
        with self.path.open("rb") as file:
            self.file_id = _read_header(file, self.path)

    def __iter__(self) -> Iterator[Record]:
        return self.records()

    def records(self, *, from_seq: int | None = None) -> Iterator[Record]:
        """Yield the records in file order; with `from_seq`, those of at least this sequence number.

        With several publishers in one file, `from_seq` counts for each of them.
        """
        self.damage = []
        with self.path.open("rb") as file:
            _read_header(file, self.path)
            end = os.fstat(file.fileno()).st_size
            for start, stop in self._stretches(from_seq, end):
                for record in self._scan(file, start, stop):
                    if from_seq is None or (record.seq is not None and record.seq >= from_seq):
                        yield record

    def _stretches(self, from_seq: int | None, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of the file that may hold `from_seq` or later."""
        position = min(_HEAD_BYTES, end)
        if from_seq is not None:
            for entry in _read_index(self.path, self.file_id):
                if entry.start != position or entry.end > end:
                    break
                if entry.highest >= from_seq:
                    yield entry.start, entry.end
                position = entry.end
        yield position, end

    def _scan(self, file: IO[bytes], start: int, end: int) -> Iterator[Record]:
        position = start
        while position < end:
            record, following, reason = _read_record(file, position, end)
            if record is not None:
                yield record
                position = following
                continue
            again = _resume(file, position + 1, end)
            self.damage.append(Damage(position, again - position, reason, again >= end))
            position = again


def _read_header(file: IO[bytes], path: Path) -> bytes:
    head = file.read(_HEAD_BYTES)
    if head[:6] != _MAGIC[:6]:
        if head and not _MAGIC.startswith(head):
            raise RecordingError(f"{path} is no kvhash recording", code="not-a-recording")
    elif len(head) >= 8 and head[:8] != _MAGIC:
        raise RecordingError(f"{path} is a recording of a newer kind", code="unsupported-recording")
    return head[8:]


def _read_record(file: IO[bytes], position: int, end: int) -> tuple[Record | None, int, str]:
    """Return the record at `position` and where the next starts, or None and why there is none."""
    file.seek(position)
    head = file.read(min(_RECORD.size, end - position))
    if len(head) < _RECORD.size:
        return None, position, "cut within a record's head"
    mark, length, checksum = _RECORD.unpack(head)
    if mark != _MARK:
        return None, position, "no record starts here"
    if length > _MAX_BODY:
        return None, position, "a record longer than is read"
    if position + _RECORD.size + length > end:
        return None, position, "cut within a record"
    body = file.read(length)
    if len(body) < length or _checksum(body) != checksum:
        return None, position, "a record whose checksum is wrong"
    try:
        return _unpack(body, position), position + _RECORD.size + length, ""
    except ValueError as error:
        return None, position, str(error)


def _resume(file: IO[bytes], position: int, end: int) -> int:
    """Return where the next whole record starts, or `end`."""
    while position < end:
        file.seek(position)
        chunk = file.read(min(1 << 16, end - position))
        found = chunk.find(_MARK)
        if found < 0:
            if len(chunk) < len(_MARK):
                return end
            position += len(chunk) - len(_MARK) + 1
            continue
        position += found
        if _read_record(file, position, end)[0] is not None:
            return position
        position += 1
    return end


# --- the index ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    start: int
    end: int
    records: int
    lowest: int
    highest: int

    def pack(self) -> bytes:
        data = _ENTRY.pack(self.start, self.end, self.records, self.lowest, self.highest, 0)[:-4]
        return data + zlib.crc32(data).to_bytes(4, "little")


def _index_path(path: Path) -> Path:
    return path.with_name(path.name + ".idx")


def _read_index(path: Path, file_id: bytes) -> list[_Entry]:
    """Return the entries up to the first that is cut or damaged; none when the index is of another file."""
    try:
        data = _index_path(path).read_bytes()
    except OSError:
        return []
    if data[:_HEAD_BYTES] != _INDEX_MAGIC + file_id:
        return []
    entries: list[_Entry] = []
    for offset in range(_HEAD_BYTES, len(data) - _ENTRY.size + 1, _ENTRY.size):
        *values, checksum = _ENTRY.unpack_from(data, offset)
        entry = _Entry(*values)
        if zlib.crc32(data[offset : offset + _ENTRY.size - 4]) != checksum or entry.end <= entry.start:
            break
        entries.append(entry)
    return entries


# --- writing ------------------------------------------------------------------------------------------------


class RecordingWriter:
    """Appends messages to a recording, making it when it is not there; a cut tail is dropped first.

    Each record is written by one call, so a reader sees it whole or not yet. ``dropped_tail`` is what was cut
    off when an existing file was opened. Only one writer may have the file. `compress`: zstd. Raises
    RecordingError (``recording-locked``, ``not-a-recording``), MissingDependencyError, OSError (a full disk
    leaves the file as it was before the record).
    """

    def __init__(self, path: str | os.PathLike[str], *, compress: bool = False) -> None:
        self.path = Path(path)
        self.dropped_tail: Damage | None = None
        self._compress = _zstd()[0] if compress else None
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        self._index: int | None = None
        try:
            self._lock()
            self._open()
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RecordingError(
                f"{self.path} is being written by another process", code="recording-locked"
            ) from None

    def _open(self) -> None:
        size = os.fstat(self._fd).st_size
        entries: list[_Entry] = []
        if size:
            with self.path.open("rb") as file:
                _read_header(file, self.path)
        if size < _HEAD_BYTES:
            os.ftruncate(self._fd, 0)
            self._file_id = os.urandom(8)
            self._end = 0
            self._put(_MAGIC + self._file_id)
        else:
            reader = Recording(self.path)
            self._file_id = reader.file_id
            entries = _chained(_read_index(self.path, self._file_id), size)
            self._end = entries[-1].end if entries else _HEAD_BYTES
        index = _index_path(self.path)
        self._index = os.open(index, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        os.ftruncate(self._index, 0)
        head = _INDEX_MAGIC + self._file_id
        _write_all(self._index, head + b"".join(entry.pack() for entry in entries), 0)
        self._index_end = _HEAD_BYTES + _ENTRY.size * len(entries)
        self._begin_stretch()
        if size > self._end:
            reader = Recording(self.path)
            with self.path.open("rb") as file:
                for record in reader._scan(file, self._end, size):
                    self._note(record.seq)
                    self._end = file.tell()
            if reader.damage and reader.damage[-1].tail:
                self.dropped_tail = reader.damage[-1]
                size = self.dropped_tail.offset
                os.ftruncate(self._fd, size)
            self._end = size

    def write(
        self,
        frames: Sequence[bytes],
        *,
        endpoint: str,
        rank: int | None = None,
        received_ns: int | None = None,
    ) -> None:
        """Append one message. `received_ns`: ns since the epoch, default now. Raises as the class says."""
        now = time.time_ns() if received_ns is None else received_ns
        record = Record(now, endpoint, rank, tuple(frames))
        self._put(_pack(record, self._compress))
        self._note(record.seq)
        if self._end - self._start >= _STRETCH:
            self._end_stretch()

    def _put(self, data: bytes) -> None:
        try:
            _write_all(self._fd, data, self._end)
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
            raise
        self._end += len(data)

    def _begin_stretch(self) -> None:
        self._start, self._records = self._end, 0
        self._lowest, self._highest = (1 << 63) - 1, -(1 << 63)

    def _note(self, seq: int | None) -> None:
        self._records += 1
        if seq is not None:
            self._lowest, self._highest = min(self._lowest, seq), max(self._highest, seq)

    def _end_stretch(self) -> None:
        if self._records and self._index is not None:
            entry = _Entry(self._start, self._end, self._records, self._lowest, self._highest)
            with contextlib.suppress(OSError):  # the index is a help; the recording goes on without it
                _write_all(self._index, entry.pack(), self._index_end)
                self._index_end += _ENTRY.size
        self._begin_stretch()

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        """End the recording; a second call does nothing."""
        if self._fd < 0:
            return
        if self._index is not None:
            self._end_stretch()
            os.close(self._index)
            self._index = None
        os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> RecordingWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _chained(entries: list[_Entry], size: int) -> list[_Entry]:
    """Return the entries that follow each other from the start and lie within the file."""
    position, good = _HEAD_BYTES, []
    for entry in entries:
        if entry.start != position or entry.end > size:
            break
        good.append(entry)
        position = entry.end
    return good


def _write_all(fd: int, data: bytes, position: int) -> None:
    os.lseek(fd, position, os.SEEK_SET)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
