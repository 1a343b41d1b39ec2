"""Reads the corpus: from a checkout's ``vectors/``, from a folder that was vendored, or from the wheel."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvhash._errors import UsageError
from kvhash.contract import Release

__all__ = ["REQUEST_KINDS", "Corpus", "CorpusError", "VectorFile", "applies", "corpus_root", "load_corpus"]

#: Kinds whose vectors are request lines, so that any line program can be asked them.
REQUEST_KINDS = ("none_hash", "chains", "extra_keys", "lookahead", "context_parallel", "requests", "recorded")


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
        """The corpus's own version, from its VERSION file."""
        return (self.root / "VERSION").read_text().strip()

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
    """Read every file that the manifest names; raises CorpusError, naming the file that cannot be read."""
    folder = corpus_root() if root is None else Path(root)
    manifest = _read(folder / "manifest.json")
    files = []
    for entry in manifest["files"]:
        data = _read(folder / entry["path"])
        files.append(VectorFile(data["kind"], data["notes"], tuple(data["vectors"])))
    return Corpus(folder, tuple(files))


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CorpusError(f"{path} does not exist; expected the folder of a kvhash corpus") from None
    except (OSError, ValueError) as error:
        raise CorpusError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise CorpusError(f"{path} holds no JSON object")
    return data
