"""The generator: the checked-in corpus is up to date, ids are never used again, inputs are as the README says."""

from __future__ import annotations

import hashlib
import json
import pickletools
from typing import TYPE_CHECKING

import pytest

from kvhash.vectors import generate, load_corpus
from kvhash.vectors.generate_blocks import serialized
from kvhash.vectors.generate_events import event_shape
from kvhash.vectors.inputs import expand, tokens
from kvhash.vectors.load import REQUEST_KINDS
from kvhash.vectors.plain import PlainHasher

from ..data_files import RELEASES, hash_cases, hash_results, request_of
from .programs import CORPUS, DATA

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_the_checked_in_corpus_is_up_to_date() -> None:
    """The generator, run now, writes the very files that are checked in."""
    assert generate.check(CORPUS, DATA) == []


def test_check_notices_a_changed_and_a_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file edited by hand or gone is a fault, and a check writes nothing."""
    monkeypatch.setattr(generate, "build", lambda _data, _ids="": {"a.json": "1\n", "b.json": "2\n"})
    generate.write(tmp_path, DATA)
    assert generate.check(tmp_path, DATA) == []
    (tmp_path / "a.json").write_text("3\n")
    (tmp_path / "b.json").unlink()
    faults = generate.check(tmp_path, DATA)
    assert [fault.split()[0] for fault in faults] == ["a.json", "b.json"]
    assert (tmp_path / "a.json").read_text() == "3\n"
    assert not (tmp_path / "b.json").exists()


def test_an_id_is_never_used_for_something_else() -> None:
    """An id that asks something new is refused; a retired one stays in the registry, and cannot come back changed."""
    one = {"id": "external/a/0.33.0", "input": {"digest": "00"}, "since": "0.33.0"}
    registry = generate._ids({"external": [one]}, "")
    assert "external/retired/0.9.2 0123456789abcdef\n" in generate._ids(
        {"external": [one]}, registry + "external/retired/0.9.2 0123456789abcdef\n"
    )
    with pytest.raises(ValueError, match="asks something else"):
        generate._ids({"external": [{**one, "input": {"digest": "01"}}]}, registry)
    with pytest.raises(ValueError, match="two vectors"):
        generate._ids({"external": [one, one]}, "")


def test_generated_tokens_are_as_the_readme_says() -> None:
    """SHA-256 of the seed and an 8-byte counter, 4 bytes big-endian a token, modulo the vocabulary."""
    first = hashlib.sha256(b"long" + bytes(8)).digest()
    second = hashlib.sha256(b"long" + bytes(7) + b"\x01").digest()
    stream = first + second
    expected = [int.from_bytes(stream[i : i + 4], "big") % 150000 for i in range(0, 40, 4)]
    assert tokens("long", 10, 150000) == expected
    request = {"tokens": {"generate": {"seed": "long", "count": 10, "vocabulary": 150000}}, "block_size": 4}
    assert expand(request) == {"tokens": expected, "block_size": 4}


@pytest.mark.parametrize("release", RELEASES)
def test_every_recorded_case_of_a_release_is_in_the_corpus(release: str) -> None:
    """For each of vLLM's recorded cases the vector that holds at that release says what vLLM itself computed."""
    corpus = load_corpus(CORPUS)
    from kvhash.vectors.load import applies

    by_case: dict[str, list[dict[str, object]]] = {}
    for file, vector in corpus:
        if file.kind in REQUEST_KINDS and "recorded-case" in vector["flags"] and applies(vector, release):
            by_case.setdefault(vector["id"].split("/")[1], []).append(dict(vector))
    compared = 0
    for row in hash_results(release):
        (vector,) = by_case[row["id"]]
        asked = {
            k: v for k, v in request_of(hash_cases()[row["id"]], release).items() if k not in ("id", "vllm")
        }
        assert {
            k: v for k, v in vector["input"]["request"].items() if v is not None or k == "hash_seed"
        } == asked  # type: ignore[index]
        expected = vector["expected"]
        assert isinstance(expected, dict)
        if row.get("random_root") or "error" in row:
            assert "error" in expected, row["id"]
        else:
            assert expected == {name: row[name] for name in expected}, row["id"]
            compared += 1
    assert compared > 50


def test_the_recorded_wire_batches_and_captures_are_in_the_corpus() -> None:
    """Every recorded release has event vectors with payloads that it wrote, and every capture its requests."""
    corpus = load_corpus(CORPUS)
    provenance = [vector["provenance"] for _, vector in corpus if "provenance" in vector]
    for path in (DATA / "wire").glob("*.jsonl"):
        written = {json.loads(line)["payload"] for line in path.read_text().splitlines()}
        ours = {
            vector["input"]["payload"]
            for file, vector in corpus
            if file.kind == "events" and vector.get("provenance", "").endswith(f"vLLM {path.stem}")
        }
        assert len(ours) >= 4
        assert ours <= written
    for path in (DATA / "captures").glob("*.json"):
        assert any(path.stem in text for text in provenance)
    published = sum(len(vector.get("published", [])) for _, vector in corpus)
    assert published > 100


def test_the_independent_hasher_is_independent() -> None:
    """The second hasher does not use the SDK's serializers: breaking those does not change its answers."""
    import kvhash.serialize.cbor as cbor
    import kvhash.serialize.pickle5 as pickle5

    request = {
        "vllm": "0.33.0",
        "algorithm": "sha256",
        "hash_seed": "0",
        "block_size": 2,
        "tokens": [1, 2, 3, 4],
    }
    right = [PlainHasher({**request, "algorithm": name}).answer() for name in ("sha256", "sha256_cbor")]
    kept = cbor.head, pickle5.encode_pickle_int
    try:
        cbor.head = lambda *_: b"\x00"  # type: ignore[assignment]
        pickle5.encode_pickle_int = lambda _: b"\x00"
        again = [PlainHasher({**request, "algorithm": name}).answer() for name in ("sha256", "sha256_cbor")]
    finally:
        cbor.head, pickle5.encode_pickle_int = kept
    assert again == right


def test_every_shape_of_event_that_was_recorded_is_in_the_corpus() -> None:
    """Whatever type, set fields and form of hashes a release wrote, an event of that shape is in the corpus."""
    ours = {vector["input"]["payload"] for file, vector in load_corpus(CORPUS) if file.kind == "events"}
    shapes = 0
    for path in sorted((DATA / "wire").glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        written = {event_shape(event) for row in rows for event in row["events"]}
        covered = {event_shape(event) for row in rows if row["payload"] in ours for event in row["events"]}
        assert covered == written, path.name
        shapes += len(written)
    assert shapes > 300


def test_every_width_of_a_head_is_in_the_corpus() -> None:
    """CBOR heads of every width for every major type, and every opcode of pickle that a preimage can need."""
    heads: set[tuple[int, int]] = set()
    opcodes: set[str] = set()
    for file, vector in load_corpus(CORPUS):
        if file.kind != "serialization":
            continue
        data = serialized(vector["input"]["serialization"], vector["input"]["value"])
        if vector["input"]["serialization"] == "cbor":
            heads |= set(_cbor_heads(data))
        else:
            opcodes |= {opcode.name for opcode, _, _ in pickletools.genops(data)}
    widths = (0, 1, 2, 4)
    # Nothing of 2^32 bytes or items can be tried; tags are those of the big integers.
    assert heads == {
        *((major, width) for major in (0, 1, 2, 3, 4) for width in widths), (0, 8), (1, 8), (6, 0), (7, 0)
    }  # fmt: skip
    assert opcodes == {
        "PROTO", "FRAME", "STOP", "MEMOIZE", "MARK", "NONE", "BININT", "BININT1", "BININT2", "LONG1",
        "SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
        "TUPLE", "BINGET", "LONG_BINGET",
    }  # fmt: skip


def _cbor_heads(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the major type and the bytes of the argument of every head."""
    position = 0
    while position < len(data):
        major, low = data[position] >> 5, data[position] & 31
        width = 0 if low < 24 else 1 << (low - 24)
        argument = int.from_bytes(data[position + 1 : position + 1 + width], "big") if width else low
        yield major, width
        position += 1 + width + (argument if major in (2, 3) else 0)
