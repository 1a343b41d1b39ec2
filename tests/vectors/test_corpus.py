"""The checked-in corpus is what it says: schema-valid, canonical, complete, and right."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvhash.vectors import CorpusError, load_corpus
from kvhash.vectors.archive import archive_name, write_archive
from kvhash.vectors.coverage import gaps, rows
from kvhash.vectors.generate import canonical
from kvhash.vectors.load import REQUEST_KINDS, Corpus, VectorFile
from kvhash.vectors.mistakes import MISTAKES
from kvhash.vectors.record import fingerprint
from kvhash.vectors.verify import verify_checksums, verify_vector

from .programs import CORPUS

MANIFEST = json.loads((CORPUS / "manifest.json").read_text())
PATHS = [entry["path"] for entry in MANIFEST["files"]]


@cache
def corpus() -> Corpus:
    """Return the checked-in corpus."""
    return load_corpus(CORPUS)


@cache
def text_of(path: str) -> str:
    """Return the text of one file of the corpus."""
    return (CORPUS / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("entry", MANIFEST["files"], ids=PATHS)
def test_every_file_fits_its_schema(entry: dict[str, Any]) -> None:
    """Schemas are valid 2020-12, and every file is valid by the one that it names."""
    schema = json.loads((CORPUS / entry["schema"]).read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    data = json.loads(text_of(entry["path"]))
    assert data["schema"] == entry["schema"]
    faults = [
        f"{e.json_path}: {e.message[:200]}" for e in jsonschema.Draft202012Validator(schema).iter_errors(data)
    ]
    assert not faults


def test_a_schema_refuses_what_is_wrong() -> None:
    """A vector without an answer, or with an unknown field, does not pass the schema."""
    data = json.loads(text_of("external.json"))
    schema = json.loads((CORPUS / "schema" / "external.schema.json").read_text())
    for change in ({"expected": None}, {"sinse": "0.33.0"}, {"id": "no slash"}, {"result": "maybe"}):
        wrong = {**data, "vectors": [{**data["vectors"][0], **change}]}
        assert not jsonschema.Draft202012Validator(schema).is_valid(wrong), change


@pytest.mark.parametrize("path", PATHS)
def test_every_file_is_canonical(path: str) -> None:
    """A file is written in the one canonical way, so that a diff shows what changed."""
    assert canonical(text_of(path))


def test_there_are_at_least_1500_vectors() -> None:
    """The corpus is large, and the manifest counts it rightly."""
    assert len(corpus()) >= 1500
    assert MANIFEST["count"] == len(corpus())
    for entry, file in zip(MANIFEST["files"], corpus().files, strict=True):
        assert sum(entry["counts"].values()) == len(file.vectors)
        assert entry["needs"] == sorted(set(entry["needs"]), key=entry["needs"].index)


def test_ids_are_unique_and_registered() -> None:
    """Every id stands once, and the registry knows it with what it asks; so none can be used for something else."""
    registry = dict(
        line.split(" ") for line in (CORPUS / "ids.txt").read_text().splitlines() if not line.startswith("#")
    )
    ids = [vector["id"] for _, vector in corpus()]
    assert len(set(ids)) == len(ids)
    assert {
        vector["id"]: fingerprint(file.kind, vector) for file, vector in corpus()
    }.items() <= registry.items()


def test_every_flag_is_explained_and_every_explained_flag_has_a_case() -> None:
    """Notes and flags fit, every change of the contract has vectors on both sides, every algorithm has answers."""
    assert gaps(corpus()) == []
    for file in corpus().files:
        for note in file.notes.values():
            assert note["mistake"]
            assert note["cost"]


def test_a_change_without_vectors_is_a_gap() -> None:
    """Coverage notices when the vectors of a boundary are gone."""
    kept = tuple(
        VectorFile(f.kind, f.notes, tuple(v for v in f.vectors if v["since"] != "0.31.0"))
        for f in corpus().files
    )
    assert any("0.31.0" in gap for gap in gaps(Corpus(CORPUS, kept)))


def test_every_hash_change_is_asked_at_the_last_release_before_it() -> None:
    """A port that applies a change a release early is caught: a range is asked at its last real release too."""
    real = MANIFEST["releases"]
    for row in rows(corpus()):
        if not row.change.hashes:
            continue
        ended = [
            vector
            for file, vector in corpus()
            if file.kind in REQUEST_KINDS and vector["until"] == str(row.change.since)
        ]
        assert any(len(vector["input"]["vllm"]) > 1 for vector in ended) or not any(
            row.change.since > load(release) > load(vector["since"]) for vector in ended for release in real
        )


def load(release: str) -> Any:
    """Return a release that can be compared."""
    from kvhash import Release

    return Release.parse(release)


def test_no_json_number_exceeds_53_bits_but_token_ids() -> None:
    """A reader whose numbers are doubles loses nothing: larger values are text, but for ids in requests."""
    large = re.compile(r'(?<![\w".-])-?\d{16,}(?![\w".])')
    for path in PATHS:
        for line in text_of(path).splitlines():
            if not large.search(line):
                continue
            vector = json.loads(line.rstrip(","))
            if path in ("requests.json",) or path == "events.json":
                continue  # request lines and decoded events have their numbers as the wire does
            request = vector["input"].get("request", {})
            request.pop("tokens", None)
            (request.get("lora") or {}).pop("id", None)
            for keys in ("expected", "accepted"):
                _without_tokens(vector.get(keys))
            left = json.dumps({key: vector[key] for key in vector if key not in ("id", "name", "serialized")})
            assert not large.search(re.sub(r'"(\\.|[^"\\])*"', '""', left)), vector["id"]


def _without_tokens(value: Any) -> None:
    # Look-ahead tokens stand in the key slot after the keys.
    if isinstance(value, dict) and "extra_keys" in value:
        value["extra_keys"] = []


@pytest.mark.parametrize("kind", [file.kind for file in corpus().files])
def test_every_vector_is_what_this_sdk_gives(kind: str) -> None:
    """Every vector computed anew from its file gives what the file says (100,000 blocks are left to the generator)."""
    (file,) = [file for file in corpus().files if file.kind == kind]
    checked = 0
    for vector in file.vectors:
        if kind == "accumulated" and vector["input"]["chains"] > 100:
            continue
        assert verify_vector(file, vector) == [], vector["id"]
        checked += 1
    assert checked > 0


def test_a_wrong_vector_is_found() -> None:
    """Verification is not empty: a changed answer of each kind is noticed."""
    for file in corpus().files:
        vector = json.loads(json.dumps(next(v for v in file.vectors if v["result"] == "valid")))
        if file.kind == "serialization":
            vector["serialized_length"] += 1
        elif file.kind == "accumulated":
            vector["digest"] = "00" * 32
        elif file.kind == "engine":
            vector["expected"]["steps"][-1]["requests"][0]["cached_tokens"] += 4
        else:
            vector["expected"]["one more"] = 1
        assert verify_vector(file, vector), file.kind


def test_wrong_values_are_wrong_and_their_mistakes_known() -> None:
    """No ``wrong`` value is also right, each names a known mistake, and every mistake shows somewhere."""
    shown = set()
    explained = json.loads((CORPUS / "mistakes.json").read_text())
    assert set(explained) == set(MISTAKES)
    for _, vector in corpus():
        for name, value in vector.get("wrong", {}).items():
            shown.add(name)
            assert value not in _values(vector["expected"]), (vector["id"], name)
    assert shown == set(MISTAKES)


def _values(expected: dict[str, Any]) -> set[str]:
    values = [expected.get("none_hash"), *expected.get("block_hashes", []), *expected.get("external", [])]
    return {value["int"] if isinstance(value, dict) else str(value) for value in values}


def test_checksums_hold_and_notice_a_change(tmp_path: Path) -> None:
    """SHA256SUMS covers every file; a changed, missing or added one is named."""
    assert verify_checksums(CORPUS) == []
    copy = tmp_path / "vectors"
    shutil.copytree(CORPUS, copy)
    (copy / "streams.json").write_text("{}")
    (copy / "VERSION").unlink()
    (copy / "more.json").write_text("{}")
    faults = verify_checksums(copy)
    assert sorted(fault.split()[0] for fault in faults) == ["VERSION", "more.json", "streams.json"]


def test_the_corpus_can_be_vendored_alone(tmp_path: Path) -> None:
    """A copy of the folder alone loads, and a folder that is none is a typed error."""
    copy = tmp_path / "third_party"
    shutil.copytree(CORPUS, copy)
    assert len(load_corpus(copy)) == len(corpus())
    (copy / "chains.json").write_text("{")
    with pytest.raises(CorpusError, match=r"chains\.json cannot be read"):
        load_corpus(copy)
    with pytest.raises(CorpusError, match="does not exist"):
        load_corpus(tmp_path)


def test_the_licence_is_0bsd_and_the_version_is_one() -> None:
    """The data may be copied without conditions, and has a version of its own."""
    assert "0BSD" in (CORPUS / "LICENSE").read_text()
    assert re.fullmatch(r"\d+\.\d+\.\d+", corpus().version)
    assert f"## {corpus().version}" in (CORPUS / "CHANGELOG.md").read_text()


def test_the_release_archive_holds_the_corpus_and_is_reproducible(tmp_path: Path) -> None:
    """Two archives are the same bytes, and what is unpacked from one is the corpus, whole."""
    first, second = tmp_path / "a.tar.gz", tmp_path / "b.tar.gz"
    for target in (first, second):
        write_archive(corpus(), target)
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as tar:
        tar.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive_name(corpus()).removesuffix(".tar.gz")
    assert verify_checksums(unpacked) == []
    assert len(load_corpus(unpacked)) == len(corpus())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["a.tar.gz", "b.tar.gz", unpacked.name])


def test_the_engine_sequences_are_what_the_engine_gives() -> None:
    """The recorded sequences behind the engine vectors are played anew and are the same."""
    done = subprocess.run(
        [sys.executable, "tools/make_engine_sequences.py", "--check"],
        cwd=CORPUS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_engine_vector_with_a_foreign_hash_is_found() -> None:
    """A published hash that no request has, and a hit that the events do not explain, are both noticed."""
    (file,) = [file for file in corpus().files if file.kind == "engine"]
    vector = json.loads(json.dumps(next(v for v in file.vectors if v["id"] == "engine/twice/0.33.0")))
    vector["input"]["engine"]["hash_seed"] = "1"
    assert any("none of a request's" in fault for fault in verify_vector(file, vector))
    assert any("tokens cached" in fault for fault in verify_vector(file, vector))
