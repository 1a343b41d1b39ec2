"""Reads the corpus: from a checkout's ``vectors/``, from a folder that was vendored, or from the wheel."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvhash._errors import UsageError
from kvhash.contract import Release

from .shape import KINDS, REQUEST_KINDS, check_file, check_manifest, check_vector

__all__ = [
    "REQUEST_KINDS",
    "Corpus",
    "CorpusError",
    "VectorFile",
    "applies",
    "corpus_root",
    "load_corpus",
    "read_checksums",
]


class CorpusError(UsageError):
    """The corpus is missing, cannot be read, or a vector of that id does not exist."""

    code = "corpus-error"


@dataclass(frozen=True)
class VectorFile:
    """One file of the corpus: the vectors of one kind, and what their flags mean."""

    kind: str
    notes: Mapping[str, Mapping[str, str]]
    vectors: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Corpus:
    """Every vector of the corpus at `root`, in the order of its files."""

    root: Path
    files: tuple[VectorFile, ...]

    def __iter__(self) -> Iterator[tuple[VectorFile, Mapping[str, Any]]]:
        return ((file, vector) for file in self.files for vector in file.vectors)

    def __len__(self) -> int:
        return sum(len(file.vectors) for file in self.files)

    @cached_property
    def version(self) -> str:
        """The corpus's own version, from its VERSION file; raises CorpusError."""
        path = self.root / "VERSION"
        version = _text(path).strip()
        if not re.fullmatch(r"[0-9]{1,9}\.[0-9]{1,9}\.[0-9]{1,9}", version):
            raise CorpusError(f"{path} holds {version[:40]!r}; expected a version such as 1.0.0")
        return version

    def unknown_kinds(self) -> dict[str, int]:
        """Return the kinds that this kvhash does not know, and how many vectors each has."""
        return {file.kind: len(file.vectors) for file in self.files if file.kind not in KINDS}

    def get(self, identity: str) -> tuple[VectorFile, Mapping[str, Any]]:
        """Return the vector of that id and its file; raises CorpusError."""
        for file, vector in self:
            if vector["id"] == identity:
                return file, vector
        raise CorpusError(f"the corpus has no vector {identity!r}; `kvhash vectors list` shows the ids")


def applies(vector: Mapping[str, Any], release: str) -> bool:
    """Whether the vector says something about this release: ``since`` <= release < ``until``."""
    asked = Release.parse(release)
    until = vector["until"]
    return Release.parse(vector["since"]) <= asked and (until is None or asked < Release.parse(until))


def corpus_root() -> Path:
    """Return the folder of the corpus that came with this kvhash; raises CorpusError when there is none.

    In a checkout that is ``vectors/`` at its top, in a wheel the package data of ``kvhash.vectors``.
    """
    here = Path(__file__).resolve()
    for root in (here.parent / "data", *(parent / "vectors" for parent in here.parents)):
        if (root / "manifest.json").is_file():
            return root
    raise CorpusError("this installation carries no corpus; name its folder with --corpus")


def load_corpus(root: Path | str | None = None) -> Corpus:
    """Read every file that the manifest names; raises CorpusError, naming the file, the vector and the field.

    What it returns has the shape that the README promises, so nothing that uses it needs to look again. A file of a
    kind that this kvhash does not know is read too (`Corpus.unknown_kinds`).
    """
    folder = corpus_root() if root is None else Path(root)
    path = folder / "manifest.json"
    manifest = _read(path)
    _raise(path, check_manifest(manifest))
    files = []
    ids: set[str] = set()
    for entry in manifest["files"]:
        path = folder / entry["path"]
        data = _read(path)
        _raise(path, check_file(data, entry["kind"]))
        for i, vector in enumerate(data["vectors"]):
            identity = vector.get("id")
            name = repr(identity) if isinstance(identity, str) else f"number {i}"
            _raise(f"{path}, vector {name}", check_vector(data["kind"], vector, data["notes"]))
            _raise(f"{path}, vector {name}", "a second vector of this id" if identity in ids else None)
            ids.add(vector["id"])
        files.append(VectorFile(data["kind"], data["notes"], tuple(data["vectors"])))
    corpus = Corpus(folder, tuple(files))
    corpus.version  # noqa: B018 - a corpus without one is told here
    _text(folder / "SHA256SUMS")
    return corpus


def _raise(where: Path | str, fault: str | None) -> None:
    if fault:
        raise CorpusError(f"{where}: {fault}")


def read_checksums(root: Path) -> dict[str, str]:
    """Return SHA256SUMS as file name to digest; raises CorpusError."""
    path = root / "SHA256SUMS"
    sums = {}
    for number, line in enumerate(_text(path).splitlines(), 1):
        found = re.fullmatch(r"([0-9a-f]{64}) [ *](\S.*)", line)
        if not found or Path(found[2]).is_absolute() or ".." in Path(found[2]).parts:
            raise CorpusError(f"{path}, line {number}: expected a digest, two spaces and the name of a file")
        sums[found[2]] = found[1]
    return sums


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise CorpusError(f"{path} does not exist; expected the folder of a kvhash corpus") from None
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} is not UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error.strerror or error}") from None


def _read(path: Path) -> dict[str, Any]:
    text = _text(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise CorpusError(f"{path} holds no JSON object")
    return data
