"""Writes the corpus, and checks that a checked-in one is what the generator writes.

The vectors come from the SDK's pure Python path; each request is confirmed by an independent hasher over `cbor2`
and `pickle` while it is made, and by vLLM's recorded outputs in the tests.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvhash.contract import Release

from .mistakes import MISTAKES
from .notes import NOTES
from .record import SCHEMA_VERSION, file_text, fingerprint, one_line
from .schemas import schema_files

__all__ = ["build", "check", "real_releases", "write"]

#: What a consumer needs for a kind, beside JSON.
_NEEDS = {
    "serialization": ["cbor", "pickle5", "sha256", "xxh3", "negative ints", "bignums"],
    "none_hash": ["cbor", "pickle5", "sha256", "xxh3"],
    "chains": ["cbor", "pickle5", "sha256", "xxh3"],
    "extra_keys": ["cbor", "pickle5", "sha256", "xxh3", "negative ints"],
    "lookahead": ["cbor", "pickle5", "sha256", "xxh3", "negative ints"],
    "context_parallel": ["cbor", "pickle5", "sha256", "xxh3", "negative ints"],
    "requests": ["cbor", "sha256"],
    "recorded": ["cbor", "pickle5", "sha256", "xxh3"],
    "external": [],
    "block_size": [],
    "accumulated": ["cbor", "pickle5", "sha256", "xxh3"],
    "events": ["msgpack"],
    "streams": ["msgpack"],
    "engine": ["cbor", "pickle5", "sha256", "msgpack"],
}
#: The hashers of this repository that the tests ask the corpus through `kvhash conformance`, and which of its
#: capabilities each does not claim.
_PROGRAMS = {
    "python": [],
    "rust": [],
    "go": [],
    "typescript": [],
    "java": ["events"],
}


def real_releases(data: Path) -> list[Release]:
    """Return the releases that outputs were recorded from, oldest first."""
    names = {path.name.split(".json")[0] for path in (data / "oracle" / "hash").glob("0.*.jsonl.gz")}
    names |= {path.name.removesuffix(".jsonl") for path in (data / "wire").glob("*.jsonl")}
    return sorted({Release.parse(name) for name in names if re.fullmatch(r"[0-9.]+", name)})


def build(data: Path, previous_ids: str = "") -> dict[str, str]:
    """Return the corpus's generated files, path to text. `data`: the recorded outputs (``tests/data``).

    `previous_ids`: the registry of ids so far; raises ValueError when an id in it now asks something else, and
    keeps the ids that are no longer used.
    """
    from .generate_blocks import make_blocks
    from .generate_engine import make_engine
    from .generate_events import make_events
    from .generate_requests import make_requests
    from .generate_streams import make_streams

    real = real_releases(data)
    vectors = {
        **make_blocks(),
        **make_requests(data, real),
        **make_events(data),
        **make_streams(),
        **make_engine(data),
    }
    ordered = {kind: vectors[kind] for kind in _NEEDS}
    assert set(ordered) == set(vectors)
    files = {f"{kind}.json": file_text(kind, NOTES, items) for kind, items in ordered.items()}
    files |= schema_files()
    files["mistakes.json"] = (
        json.dumps(
            {name: {"cost": kind.cost, "does": kind.said} for name, kind in sorted(MISTAKES.items())},
            indent=1,
        )
        + "\n"
    )
    files["ids.txt"] = _ids(ordered, previous_ids)
    files["manifest.json"] = _manifest(ordered, real)
    return files


def _ids(vectors: dict[str, list[dict[str, Any]]], previous: str) -> str:
    known = dict(line.split(" ") for line in previous.splitlines() if line and not line.startswith("#"))
    for kind, items in vectors.items():
        seen: set[str] = set()
        for item in items:
            identity, asked = item["id"], fingerprint(kind, item)
            if identity in seen:
                raise ValueError(f"two vectors have the id {identity}")
            seen.add(identity)
            if known.get(identity, asked) != asked:
                raise ValueError(
                    f"{identity} asks something else than it did; take a new id and retire this one"
                )
            known[identity] = asked
    head = "# Every id that was ever used, and a digest of what it asks. None is used again for something else.\n"
    return head + "".join(f"{identity} {asked}\n" for identity, asked in sorted(known.items()))


def _manifest(vectors: dict[str, list[dict[str, Any]]], real: Iterable[Release]) -> str:
    files = []
    for kind, items in vectors.items():
        ends = [item["until"] for item in items]
        files.append(
            {
                "kind": kind,
                "path": f"{kind}.json",
                "schema": f"schema/{kind}.schema.json",
                "needs": _NEEDS[kind],
                "since": str(min(Release.parse(item["since"]) for item in items)),
                "until": None if None in ends else str(max(Release.parse(end) for end in ends)),
                "counts": {
                    result: sum(item["result"] == result for item in items)
                    for result in ("valid", "invalid", "implementation_defined")
                },
            }
        )
    body = {
        "schema_version": SCHEMA_VERSION,
        "count": sum(map(len, vectors.values())),
        "releases": [str(release) for release in real],
        "files": files,
        "programs": [{"name": name, "without": without} for name, without in _PROGRAMS.items()],
    }
    return json.dumps(body, indent=1, sort_keys=True) + "\n"


def _sums(root: Path, files: dict[str, str]) -> str:
    """Return SHA256SUMS over every file of the corpus, as ``sha256sum -c`` reads it."""
    texts = {name: text.encode() for name, text in files.items()}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_file() and name != "SHA256SUMS" and name not in texts:
            texts[name] = path.read_bytes()
    return "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(texts.items()))


def _complete(root: Path, data: Path) -> dict[str, str]:
    registry = root / "ids.txt"
    files = build(data, registry.read_text() if registry.exists() else "")
    files["SHA256SUMS"] = _sums(root, files)
    return files


def write(root: Path, data: Path) -> list[str]:
    """Write the corpus into `root` and return the names of the files that changed."""
    changed = []
    for name, text in _complete(root, data).items():
        path = root / name
        if not path.exists() or path.read_bytes() != text.encode():
            path.write_bytes(text.encode())
            changed.append(name)
    return changed


def check(root: Path, data: Path) -> list[str]:
    """Return what is wrong with the corpus in `root`, in words; empty when it is what the generator writes."""
    faults = []
    for name, text in _complete(root, data).items():
        path = root / name
        if not path.exists():
            faults.append(f"{name} is missing")
        elif path.read_bytes() != text.encode():
            faults.append(f"{name} is not what the generator writes; run `kvhash vectors generate`")
    return faults


def canonical(text: str) -> bool:
    """Whether a vectors file is in canonical form."""
    data = json.loads(text)
    return file_text(data["kind"], data["notes"], data["vectors"]) == text and one_line(data) != ""
