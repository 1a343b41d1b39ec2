"""Fuzz the recording reader: any file gives whole records and a list of damage, or RecordingError.

Run as ``python tests/fuzz/fuzz_recording.py CORPUS_FOLDER -max_total_time=60``; needs atheris.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvhash"]):
    from kvhash._errors import MissingDependencyError
    from kvhash.events import Recording, RecordingError

FOLDER = tempfile.TemporaryDirectory()
PATH = Path(FOLDER.name) / "fuzzed.kvrec"


def one(data: bytes) -> None:
    """Read; records and damage together cover the file, in order."""
    PATH.write_bytes(data)
    try:
        recording = Recording(PATH)
        records = list(recording)
    except (RecordingError, MissingDependencyError):
        return
    starts = [record.offset for record in records]
    assert starts == sorted(set(starts))
    for damage in recording.damage:
        assert damage.length > 0
        assert damage.offset + damage.length <= len(data)
        assert not any(damage.offset <= start < damage.offset + damage.length for start in starts)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
