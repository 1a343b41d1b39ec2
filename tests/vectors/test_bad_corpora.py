"""A corpus that is damaged, foreign or newer is a typed error that says where, never a traceback or a silent pass."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvhash import KvHashError
from kvhash.vectors import Corpus, CorpusError, VectorFile, load_corpus
from kvhash.vectors.compare import compare
from kvhash.vectors.conformance import select
from kvhash.vectors.coverage import gaps
from kvhash.vectors.generate import _sums
from kvhash.vectors.shape import check_vector
from kvhash.vectors.verify import verify_checksums, verify_vector
from kvhash_cli.conformance_cmd import conformance
from kvhash_cli.vectors_cmd import vectors

from .programs import CORPUS, sdk_program

#: One small file of vectors of each shape.
KEPT = ("none_hash", "external", "events", "accumulated", "streams", "engine", "serialization", "block_size")


def invoke(*arguments: str) -> Result:
    """Run a command; what it may raise is a typed error, which the program's entry turns into one line."""
    command = conformance if arguments[0] == "conformance" else vectors
    result = CliRunner().invoke(command, [a for a in arguments if a != "conformance"])
    if not isinstance(result.exception, (type(None), SystemExit, KvHashError)):
        raise result.exception
    return result


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a copy of the corpus with a few vectors of some files."""
    root = tmp_path / "corpus"
    root.mkdir()
    manifest = json.loads((CORPUS / "manifest.json").read_text())
    manifest["files"] = [entry for entry in manifest["files"] if entry["kind"] in KEPT]
    for entry in manifest["files"]:
        data = json.loads((CORPUS / entry["path"]).read_text())
        small = [v for v in data["vectors"] if len(json.dumps(v)) < 20000]
        data["vectors"] = [v for v in small if v["result"] == "valid"][:2]
        data["vectors"] += [v for v in small if v["result"] == "invalid"][:1]
        (root / entry["path"]).write_text(json.dumps(data))
    (root / "manifest.json").write_text(json.dumps(manifest))
    (root / "VERSION").write_text("2.0.0\n")
    seal(root)
    return root


def seal(root: Path) -> None:
    """Write the checksums anew."""
    (root / "SHA256SUMS").write_text(_sums(root, {}))


def change(root: Path, kind: str, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit one file of vectors and seal the corpus."""
    path = root / f"{kind}.json"
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    seal(root)


def test_the_small_copy_is_a_corpus(small: Path) -> None:
    """What the tests below damage is right before they do."""
    assert len(load_corpus(small)) > len(KEPT)
    assert invoke("verify", "--corpus", str(small)).exit_code == 0
    passed = invoke("conformance", "--cmd", sdk_program(), "--corpus", str(small))
    assert passed.exit_code == 0, passed.output


FIELDS = [
    ("none_hash", "id"),
    ("none_hash", "input"),
    ("none_hash", "expected"),
    ("external", "expected"),
    ("events", "expected"),
    ("events", "input"),
    ("streams", "input"),
    ("accumulated", "digest"),
    ("serialization", "digests"),
    ("engine", "since"),
    ("block_size", "name"),
    ("external", "until"),
    ("external", "result"),
]


@pytest.mark.parametrize("value", ["gone", 5, [], {}])
@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_a_vector_of_a_wrong_shape_is_told_with_its_place(
    small: Path, kind: str, field: str, value: object
) -> None:
    """File, vector and field are named when a field is missing or has another type, before anything uses it."""

    def edit(data: dict[str, Any]) -> None:
        if value == "gone":
            del data["vectors"][0][field]
        else:
            data["vectors"][0][field] = value

    identity = json.loads((small / f"{kind}.json").read_text())["vectors"][0]["id"]
    change(small, kind, edit)
    if field == "expected" and value == {} and kind not in ("none_hash", "events"):
        return  # the fields of these are looked at by `vectors verify` alone
    with pytest.raises(CorpusError) as error:
        load_corpus(small)
    assert f"{kind}.json" in str(error.value)
    assert field in str(error.value)
    assert (identity if field != "id" else "number 0" if value != "gone" else "") in str(error.value)
    for command in (["list"], ["show", identity], ["verify"], ["coverage"], ["conformance", "--cmd", "true"]):
        assert isinstance(invoke(*command, "--corpus", str(small)).exception, CorpusError), command


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("none_hash", ("input", "vllm"), "0.33.0"),
        ("none_hash", ("input", "vllm"), None),
        ("none_hash", ("input", "request"), 7),
        ("none_hash", ("input", "request", "tokens"), {"generate": {"seed": 1, "count": 1, "vocabulary": 2}}),
        ("none_hash", ("input", "request", "tokens"), {}),
        ("none_hash", ("expected", "block_hashes"), None),
        ("none_hash", ("expected", "none_hash"), 5),
        ("none_hash", ("expected", "external"), [5]),
        ("none_hash", ("wrong",), ["x"]),
        ("none_hash", ("serialized_root",), "no hex"),
        ("events", ("input", "payload"), 5),
        ("events", ("expected", "batch"), []),
        ("events", ("expected", "batch", "events"), None),
        ("streams", ("input", "steps"), [{}]),
        ("external", ("flags",), 5),
        ("external", ("flags",), [5]),
        ("external", ("flags",), ["no-such-flag"]),
        ("external", ("since",), "soon"),
        ("serialization", ("digests", "sha256"), None),
    ],
)
def test_a_wrong_field_within_a_vector_is_told(
    small: Path, kind: str, path: tuple[str, ...], value: object
) -> None:
    """The innermost fields that the runner and `vectors` use are looked at too."""

    def edit(data: dict[str, Any]) -> None:
        at = data["vectors"][0]
        for name in path[:-1]:
            at = at[name]
        at[path[-1]] = value

    change(small, kind, edit)
    with pytest.raises(CorpusError, match=path[-1]):
        load_corpus(small)


@pytest.mark.parametrize("name", ["manifest.json", "none_hash.json", "VERSION", "SHA256SUMS"])
@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff\xfe", b"[5]", b"[" * 100000])
def test_a_damaged_file_is_told_by_its_name(small: Path, name: str, content: bytes | None) -> None:
    """A file that is missing, empty, not UTF-8 or something else is named by every command."""
    if content is None:
        (small / name).unlink()
    else:
        (small / name).write_bytes(content)
    for command in (["list"], ["show", "a/b/1"], ["verify"], ["conformance", "--cmd", "true"]):
        result = invoke(*command, "--corpus", str(small))
        if name == "SHA256SUMS" and content is not None and command[0] in ("list", "show"):
            continue  # these do not read what it says
        if isinstance(result.exception, SystemExit):
            assert result.exit_code == 1
            assert command == ["verify"]
            assert "has no checksum" in result.output if name == "SHA256SUMS" else name in result.output
        else:
            assert isinstance(result.exception, KvHashError), command
            if command[0] != "show" or name != "SHA256SUMS":
                assert name in str(result.exception) or content == b"", command
                assert result.exception is not None


@pytest.mark.parametrize("name", ["manifest.json", "none_hash.json"])
@pytest.mark.parametrize("version", [2, 99])
def test_a_newer_schema_is_refused_with_what_to_do(small: Path, name: str, version: int) -> None:
    """A corpus of a schema that this kvhash does not know is not guessed at."""
    path = small / name
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": version}))
    seal(small)
    with pytest.raises(CorpusError, match=f"schema_version {version}.*update kvhash"):
        load_corpus(small)


def test_vectors_of_an_unknown_kind_are_said_to_be_not_asked(small: Path) -> None:
    """A newer kind does not stop the rest, is told on stderr, and is counted in the report."""
    manifest = json.loads((small / "manifest.json").read_text())
    manifest["files"].append({"kind": "holograms", "path": "holograms.json"})
    (small / "manifest.json").write_text(json.dumps(manifest))
    data = json.loads((small / "none_hash.json").read_text())
    data["kind"] = "holograms"
    for vector in data["vectors"]:
        vector["id"] = "holograms/" + vector["id"]
        vector["input"] = {"depth": 3}
    (small / "holograms.json").write_text(json.dumps(data))
    seal(small)
    asked = ["conformance", "--cmd", sdk_program(), "--corpus", str(small), "--run", "none_hash/*"]
    text = invoke(*asked)
    assert text.exit_code == 0, text.output
    assert "holograms" in text.stderr
    assert f"not asked: {len(data['vectors'])} vectors of kind 'holograms'" in text.stdout
    body = json.loads(invoke(*asked, "-o", "json").stdout)
    assert body["not_asked"] == {"holograms": len(data["vectors"])}
    assert invoke("verify", "--corpus", str(small)).exit_code == 1


def test_the_runner_does_not_ask_a_damaged_corpus(small: Path) -> None:
    """A vector that was edited by hand is no measure of a program."""
    path = small / "none_hash.json"
    path.write_text(path.read_text() + "\n")
    result = invoke("conformance", "--cmd", sdk_program(), "--corpus", str(small))
    assert isinstance(result.exception, KvHashError)
    assert "damaged" in str(result.exception)
    assert "none_hash.json" in str(result.exception)


def test_a_corpus_that_came_with_kvhash_and_is_damaged_is_said_to_be(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --corpus the damage is said on stderr, and the run goes on."""
    path = small / "none_hash.json"
    path.write_text(path.read_text() + "\n")
    monkeypatch.setattr("kvhash.vectors.load.corpus_root", lambda: small)
    result = invoke("conformance", "--cmd", sdk_program(), "--run", "none_hash/*")
    assert result.exit_code == 0, result.output
    assert "none_hash.json differs from its checksum" in result.stderr


def test_two_vectors_of_one_id_are_refused(small: Path) -> None:
    """An id names one vector, also over files."""
    change(small, "external", lambda data: data["vectors"].append(data["vectors"][0]))
    with pytest.raises(CorpusError, match="second vector"):
        load_corpus(small)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value within a JSON value."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else list(enumerate(value))[:2]
    for name, item in items:
        yield (*path, name)
        yield from places(item, (*path, name))


@pytest.mark.parametrize("kind", KEPT)
def test_no_change_of_a_vector_is_a_traceback(small: Path, kind: str) -> None:
    """Whatever field is gone or has another type: loading refuses it, or verifying and covering say so in words."""
    whole = load_corpus(small)
    (file,) = [file for file in whole.files if file.kind == kind]
    refused = told = 0
    for place in places({name: file.vectors[0][name] for name in file.vectors[0]}):
        for value in (None, 5, "x", [], {}, ["\ud800"]):
            vector = json.loads(json.dumps(file.vectors[0]))
            at = vector
            for name in place[:-1]:
                at = at[name]
            at[place[-1]] = value
            if check_vector(kind, vector, file.notes):
                refused += 1
                continue
            changed = VectorFile(kind, file.notes, (vector,))
            told += bool(verify_vector(changed, vector))
            one = Corpus(small, (changed,))
            gaps(one)
            for case in select(one, algorithm=None):
                for answer in (file.vectors[0]["expected"], {}, {"error": None}, {"batch": {"events": [5]}}):
                    compare(case.vector, answer)
    assert refused
    assert told


def test_a_foreign_corpus_prints_nothing_that_commands_a_terminal(small: Path) -> None:
    """Names, values and notes of a corpus are written out where they would not print, also in errors."""
    evil = "\x1b]0;owned\x07\x9b2J\u202e"

    def edit(data: dict[str, Any]) -> None:
        data["vectors"][0] |= {"name": evil, "id": f"external/{evil}/0.33.0"}

    change(small, "external", edit)
    where = ("--corpus", str(small))
    for command in (
        ["list"],
        ["list", "-o", "jsonl"],
        ["show", f"external/{evil}/0.33.0"],
        ["verify"],
        ["coverage"],
    ):
        result = invoke(*command, *where)
        assert all(c.isprintable() or c == "\n" for c in result.output), command
    change(small, "external", lambda data: data["vectors"][0].update(result=evil))
    with pytest.raises(CorpusError) as error:
        load_corpus(small)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("kind", ["pipe", "link to a file", "link to a folder", "link to nothing", "file"])
def test_whatever_lies_in_the_folder_and_has_no_checksum_is_told(small: Path, kind: str) -> None:
    """A stray pipe or link is found as a stray file is; a pipe that stands for a file is not waited for."""
    stray = small / "stray"
    if kind == "pipe":
        os.mkfifo(stray)
    elif kind == "file":
        stray.touch()
    else:
        places = {"file": "VERSION", "folder": "..", "nothing": "nowhere"}
        stray.symlink_to(places[kind.split()[-1]])
    assert verify_checksums(small) == ["stray has no checksum"]


def test_an_export_into_a_link_to_an_empty_folder(small: Path, tmp_path: Path) -> None:
    """The help says that DIR may be empty: the link stays, and what it names is the corpus."""
    (tmp_path / "empty").mkdir()
    link = tmp_path / "link"
    link.symlink_to("empty")
    result = invoke("export", str(link), "--corpus", str(small))
    assert result.exit_code == 0, result.output
    assert link.is_symlink()
    assert verify_checksums(tmp_path / "empty") == []
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("command", "place"), [("export", "through"), ("archive", "deep/er")])
def test_nothing_is_written_into_a_corpus(small: Path, tmp_path: Path, command: str, place: str) -> None:
    """A folder within a corpus is refused, also through a link; the corpus stays what it was."""
    vendored = tmp_path / "vendored"
    shutil.copytree(small, vendored)
    (tmp_path / "way").symlink_to(vendored)
    folder = tmp_path / "way" / "sub" if place == "through" else vendored / place
    result = invoke(command, str(folder), "--corpus", str(small))
    assert isinstance(result.exception, KvHashError)
    assert result.exception.code == "folder-in-corpus"
    assert verify_checksums(vendored) == []


def test_an_archive_makes_its_folder(tmp_path: Path) -> None:
    """The example of the help works where the folder is not there yet."""
    result = invoke("archive", str(tmp_path / "new" / "dist"), "--corpus", str(CORPUS))
    assert result.exit_code == 0, result.output
    assert Path(result.stdout.strip()).is_file()
    shutil.rmtree(tmp_path / "new")
