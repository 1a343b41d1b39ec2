"""Recordings: whole after a cut anywhere, honest about damage, one writer."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhash import MissingDependencyError
from kvhash.events import Record, Recording, RecordingError, RecordingWriter, export_jsonl, export_parquet
from kvhash.events import recording as module

from .wire import frames

FRAMES = frames("vllm-0.32.0-sha256_cbor")


def write(path: Path, messages: list[list[bytes]] = FRAMES, **options: Any) -> list[Record]:
    """Record messages and return what must be read again."""
    with RecordingWriter(path, **options) as writer:
        for i, message in enumerate(messages):
            writer.write(message, endpoint="tcp://127.0.0.1:5557", rank=i % 3 or None, received_ns=i)
    return [Record(i, "tcp://127.0.0.1:5557", i % 3 or None, tuple(m)) for i, m in enumerate(messages)]


def read(path: Path, **options: Any) -> list[Record]:
    """Return a recording's records without their offsets."""
    found = Recording(path).records(**options)
    return [Record(r.received_ns, r.endpoint, r.rank, r.frames) for r in found]


@pytest.mark.parametrize("compress", [False, True])
def test_what_was_written_is_read(tmp_path: Path, compress: bool) -> None:
    """Frames, receive time, endpoint and rank come back as they were."""
    path = tmp_path / "r"
    written = write(path, compress=compress)
    assert read(path) == written
    assert Recording(path).damage == []


def test_any_frames_are_kept(tmp_path: Path) -> None:
    """Messages of other shapes than three frames are kept too; they have no sequence number."""
    messages = [[], [b""], [b"a", b"b", b"c", b"d"], [b"t", bytes(7), b"p"]]
    path = tmp_path / "r"
    written = write(path, messages)
    assert read(path) == written
    assert [record.seq for record in written] == [None] * 4


def test_a_cut_at_every_byte_of_the_last_4_kib_loses_at_most_the_cut_record(tmp_path: Path) -> None:
    """Whatever byte the file ends at, it opens, all whole records are there, and the rest is reported."""
    path = tmp_path / "r"
    written = write(path)
    data = path.read_bytes()
    ends = [*[record.offset for record in Recording(path)][1:], len(data)]
    for size in range(len(data) - 4096, len(data)):
        path.write_bytes(data[:size])
        recording = Recording(path)
        found = list(recording)
        whole = sum(end <= size for end in ends)
        assert [r.frames for r in found] == [r.frames for r in written[:whole]]
        cut = size - ends[whole - 1]
        assert [(d.offset, d.length, d.tail) for d in recording.damage] == (
            [(ends[whole - 1], cut, True)] if cut else []
        )


def test_a_cut_within_the_first_bytes(tmp_path: Path) -> None:
    """A file cut within its header opens as empty, and can be gone on with."""
    path = tmp_path / "r"
    write(path)
    data = path.read_bytes()
    for size in range(17):
        path.write_bytes(data[:size])
        assert read(path) == []
    for size in range(17):
        path.write_bytes(data[:size])
        written = write(path, FRAMES[:2])
        assert read(path) == written


@pytest.mark.parametrize("cut", [0, 1, 5, 11, 12, 40, 300])
def test_appending_after_a_cut_goes_on_behind_the_last_whole_record(tmp_path: Path, cut: int) -> None:
    """Opening a cut file for writing drops the cut tail, says so, and new records follow."""
    path = tmp_path / "r"
    written = write(path, FRAMES[:10])
    end = list(Recording(path))[-1].offset
    path.write_bytes(path.read_bytes()[: end + cut])
    with RecordingWriter(path) as writer:
        assert (writer.dropped_tail.length if writer.dropped_tail else 0) == cut
        writer.write(FRAMES[20], endpoint="e", received_ns=7)
    assert read(path) == [*written[:9], Record(7, "e", None, tuple(FRAMES[20]))]
    recording = Recording(path)
    assert list(recording)
    assert recording.damage == []


def test_damage_in_the_middle_loses_only_that_record(tmp_path: Path) -> None:
    """A flipped byte costs its record; the reader finds the next one and says what it passed over."""
    path = tmp_path / "r"
    written = write(path)
    offsets = [record.offset for record in Recording(path)]
    for place in (0, 5, 9, 40, 100):
        data = bytearray(path.read_bytes())
        data[offsets[30] + place] ^= 0x41
        (tmp_path / "d").write_bytes(data)
        recording = Recording(tmp_path / "d")
        assert [r.frames for r in recording] == [r.frames for i, r in enumerate(written) if i != 30]
        assert [(d.offset, d.offset + d.length, d.tail) for d in recording.damage] == [
            (offsets[30], offsets[31], False)
        ]


def test_from_seq_reads_only_what_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index passes over stretches that end before the number; without it the answer is the same."""
    monkeypatch.setattr(module, "_STRETCH", 4096)
    path = tmp_path / "r"
    written = write(path)
    for seq in (0, 1, 40, 71, 72):
        assert read(path, from_seq=seq) == written[seq:]
    seen: list[int] = []
    plain = module._read_record

    def watched(file: Any, position: int, end: int) -> Any:
        seen.append(position)
        return plain(file, position, end)

    monkeypatch.setattr(module, "_read_record", watched)
    assert read(path, from_seq=70) == written[70:]
    assert len(seen) < 15
    index = path.with_name("r.idx")
    for bad in (b"", b"junk" * 30, index.read_bytes()[:-20], index.read_bytes()[:40] + bytes(200)):
        index.write_bytes(bad)
        assert read(path, from_seq=70) == written[70:]
    index.unlink()
    assert read(path, from_seq=70) == written[70:]


def test_appending_keeps_the_index_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording written in many goes answers `from_seq` as one written at once."""
    monkeypatch.setattr(module, "_STRETCH", 4096)
    path = tmp_path / "r"
    for start in range(0, 72, 7):
        with RecordingWriter(path) as writer:
            for i, message in enumerate(FRAMES[start : start + 7], start):
                writer.write(message, endpoint="e", received_ns=i)
    for seq in (0, 6, 7, 35, 71):
        assert [r.received_ns for r in Recording(path).records(from_seq=seq)] == list(range(seq, 72))


def test_two_writers_never(tmp_path: Path) -> None:
    """A second writer, in another process too, is refused and changes nothing; readers are not hindered."""
    path = tmp_path / "r"
    with RecordingWriter(path) as writer:
        writer.write(FRAMES[0], endpoint="e")
        before = path.read_bytes()
        with pytest.raises(RecordingError) as caught:
            RecordingWriter(path)
        assert caught.value.code == "recording-locked"
        code = f"from kvhash.events import RecordingWriter; RecordingWriter({str(path)!r})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "RecordingError" in done.stderr
        assert path.read_bytes() == before
        assert len(read(path)) == 1
        writer.write(FRAMES[1], endpoint="e")
        assert len(read(path)) == 2


def test_what_is_no_recording_is_left_alone(tmp_path: Path) -> None:
    """Another file is neither read nor overwritten; one of a later kind says so."""
    path = tmp_path / "notes.txt"
    path.write_bytes(b"my notes, which nobody should touch")
    for open_it in (Recording, RecordingWriter):
        with pytest.raises(RecordingError) as caught:
            open_it(path)
        assert caught.value.code == "not-a-recording"
    assert path.read_bytes() == b"my notes, which nobody should touch"
    path.write_bytes(b"my")
    with pytest.raises(RecordingError):
        RecordingWriter(path)
    assert path.read_bytes() == b"my"
    path.write_bytes(b"KVHREC9\n" + bytes(40))
    with pytest.raises(RecordingError) as caught:
        Recording(path)
    assert caught.value.code == "unsupported-recording"


def test_a_failed_write_leaves_no_half_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is full within a record, the file ends with the record before."""
    path = tmp_path / "r"
    with RecordingWriter(path) as writer:
        writer.write(FRAMES[0], endpoint="e")
        before = path.read_bytes()
        real = module.os.write
        calls = []

        def full(fd: int, data: Any) -> int:
            calls.append(1)
            if len(calls) > 1:
                raise OSError(28, "No space left on device")
            return real(fd, data[:20])

        monkeypatch.setattr(module.os, "write", full)
        with pytest.raises(OSError, match="No space"):
            writer.write(FRAMES[1], endpoint="e")
        monkeypatch.undo()
        assert path.read_bytes() == before
        writer.write(FRAMES[2], endpoint="e")
    assert [record.frames for record in read(path)] == [tuple(FRAMES[0]), tuple(FRAMES[2])]


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without zstd or pyarrow the error names the command that installs it, and no file is left."""
    real = builtins.__import__

    def without(name: str, *rest: Any, **options: Any) -> Any:
        if name.partition(".")[0] in ("zstandard", "compression", "pyarrow"):
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependencyError, match="pip install"):
        RecordingWriter(tmp_path / "r", compress=True)
    with pytest.raises(MissingDependencyError, match="pip install"):
        export_parquet([], tmp_path / "p")
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=300),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 9999), st.binary(max_size=4)), max_size=4),
)
def test_any_file_is_read_or_refused(tmp_path_factory: Any, data: bytes, real: bool, changes: Any) -> None:
    """Random files, and real ones with bytes overwritten, give records, damage, or the typed error."""
    path = tmp_path_factory.mktemp("fuzz") / "r"
    if real:
        write(path, FRAMES[:4])
        content = bytearray(path.read_bytes())
        for where, new in changes:
            content[where % len(content) : where % len(content) + len(new)] = new
        data = bytes(content)
    path.write_bytes(data)
    try:
        recording = Recording(path)
        list(recording.records(from_seq=1))
        found = list(recording)
    except RecordingError:
        return
    lost = sum(damage.length for damage in recording.damage)
    assert (lost > 0) or found or len(data) <= 16


def test_export_jsonl(tmp_path: Path) -> None:
    """One line a message, hashes as decimal text, and a bad payload as an error in its place."""
    path = tmp_path / "r"
    write(path, [*FRAMES[:2], [b"t", bytes(8), b"\xc1"]])
    assert export_jsonl(Recording(path), tmp_path / "out") == 3
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [line["seq"] for line in lines] == [0, 1, 0]
    first = lines[0]["events"][0]
    assert (first["type"], len(first["token_ids"]), first["parent_block_hash"]) == ("BlockStored", 128, None)
    assert all(hash_text.isdecimal() for hash_text in first["block_hashes"])
    assert lines[2]["error"]["code"] == "invalid-msgpack"


def test_an_export_into_a_pipe_leaves_the_pipe(tmp_path: Path) -> None:
    """What is no file is written to, not replaced: a device's name would be gone for everybody."""
    path, pipe = tmp_path / "r", tmp_path / "pipe"
    write(path, FRAMES[:1])
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert export_jsonl(Recording(path), pipe) == 1
        assert json.loads(os.read(reader, 1 << 16))["seq"] == 0
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["pipe", "r", "r.idx"]


def test_export_parquet(tmp_path: Path) -> None:
    """One row an event, the same events as in the recording, written in several groups."""
    if os.environ.get("KVHASH_REQUIRE_ALL") == "1":
        import pyarrow.parquet as pq
    else:
        pq = pytest.importorskip(
            "pyarrow.parquet", reason="pyarrow is not installed: Parquet export untested"
        )
    path = tmp_path / "r"
    write(path)
    count = export_parquet(Recording(path), tmp_path / "out", rows_per_group=20)
    table = pq.read_table(tmp_path / "out").to_pylist()
    assert len(table) == count > 72
    assert {row["type"] for row in table} == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    assert len(table[0]["token_ids"]) == 128
    assert table[0]["block_hashes"][0].isdecimal()


def test_a_failed_export_leaves_the_old_file(tmp_path: Path) -> None:
    """An export that fails half-way leaves what was there, and no draft."""

    def failing() -> Any:
        yield Record(0, "e", None, tuple(FRAMES[0]))
        raise OSError("gone")

    (tmp_path / "out").write_text("before")
    with pytest.raises(OSError, match="gone"):
        export_jsonl(failing(), tmp_path / "out")
    assert (tmp_path / "out").read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
