"""Messages from files: recordings, hex lines, one raw payload, or a JSON object of frames."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvhash._errors import DecodeError
from kvhash.request import parse_json

from .recording import Damage, Record, Recording

__all__ = ["FileSource"]

_MAGIC = b"KVHREC"
_HEX_LINE = re.compile(rb"\s*(?:[0-9a-fA-F]{2})+(?:\s+(?:[0-9a-fA-F]{2})+)*\s*")


class FileSource:
    """The messages of one file, whatever its form; iterate it for `Record` values.

    A recording; text lines of hex (a payload, or topic, sequence number and payload apart by blanks); a JSON object
    whose ``frames`` are such triples; else the bytes are one payload. ``name`` ``-`` is not opened here: give the
    bytes as `data`. ``damage`` lists what a recording's last pass could not read. Lines that are no hex raise
    DecodeError.
    """

    def __init__(self, name: str, data: bytes | None = None) -> None:
        self.name = name
        self._recording: Recording | None = None
        self._data = b""
        if data is not None:
            self._data = data
            return
        with Path(name).open("rb") as file:
            start = file.read(len(_MAGIC))
            if start == _MAGIC:
                self._recording = Recording(name)
            else:
                self._data = start + file.read()

    @property
    def damage(self) -> list[Damage]:
        """What the last pass over a recording found unreadable."""
        return [] if self._recording is None else self._recording.damage

    def records(self, from_seq: int | None = None) -> Iterator[Record]:
        """Yield the messages; with `from_seq`, those of at least this sequence number."""
        if self._recording is not None:
            yield from self._recording.records(from_seq=from_seq)
            return
        for number, frames in enumerate(self._frames()):
            record = Record(0, self.name, None, frames, number)
            if from_seq is None or (record.seq is not None and record.seq >= from_seq):
                yield record

    def __iter__(self) -> Iterator[Record]:
        return self.records()

    def _frames(self) -> Iterator[tuple[bytes, ...]]:
        data = self._data
        if not data.strip():
            raise DecodeError(f"{self.name} is empty", code="empty-input")
        if data.lstrip()[:1] == b"{":
            yield from self._json_frames(parse_json(data, what=self.name))
            return
        first = data.lstrip().splitlines()[0]
        if not _HEX_LINE.fullmatch(first):
            yield (b"", bytes(8), data)
            return
        for number, line in enumerate(data.splitlines()):
            if not line.strip():
                continue
            if not _HEX_LINE.fullmatch(line):
                raise DecodeError(f"{self.name}: line {number + 1} is not hex", code="invalid-hex")
            parts = tuple(bytes.fromhex(part.decode()) for part in line.split())
            yield parts if len(parts) == 3 else (b"", number.to_bytes(8, "big"), b"".join(parts))

    def _json_frames(self, value: Any) -> Iterator[tuple[bytes, ...]]:
        frames = value.get("frames") if isinstance(value, dict) else None
        if not isinstance(frames, list):
            raise DecodeError(
                f"{self.name}: expected an object with a list of 'frames'", code="invalid-frames"
            )
        for i, message in enumerate(frames):
            try:
                yield tuple(bytes.fromhex(part) for part in message)
            except (TypeError, ValueError):
                raise DecodeError(
                    f"{self.name}: expected frames as hex - at $.frames[{i}]", code="invalid-frames"
                ) from None
