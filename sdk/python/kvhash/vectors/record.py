"""One vector as the corpus writes it, and the canonical text of a file of vectors.

Canonical: UTF-8, keys sorted, one vector a line, no space that means nothing, a line end at the end. Two runs of
the generator give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["SCHEMA_VERSION", "file_text", "fingerprint", "one_line", "vector"]

SCHEMA_VERSION = 1


def one_line(value: Any) -> str:
    """Return the canonical JSON text of a value on one line."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def vector(
    identity: str,
    name: str,
    *,
    flags: Iterable[str],
    since: str,
    until: str | None = None,
    result: str = "valid",
    input: Any,  # noqa: A002 - the field's name
    **rest: Any,
) -> dict[str, Any]:
    """Return one vector; fields of `rest` that are None are left out."""
    return {
        "id": identity,
        "name": name,
        "flags": sorted(set(flags)),
        "since": since,
        "until": until,
        "result": result,
        "input": input,
        **{key: value for key, value in rest.items() if value is not None},
    }


def file_text(kind: str, notes: Mapping[str, Mapping[str, str]], vectors: Iterable[Mapping[str, Any]]) -> str:
    """Return the canonical text of a file: its vectors in order, and the notes of the flags that they use."""
    items = list(vectors)
    used = sorted({flag for item in items for flag in item["flags"]})
    lines = ",\n".join(one_line(item) for item in items)
    explained = one_line({flag: notes[flag] for flag in used})
    return (
        f'{{"kind":{one_line(kind)},"notes":{explained},"schema":"schema/{kind}.schema.json",'
        f'"schema_version":{SCHEMA_VERSION},"vectors":[\n{lines}\n]}}\n'
    )


def fingerprint(kind: str, item: Mapping[str, Any]) -> str:
    """Return what the registry of ids keeps of a vector: a digest of what it asks.

    An id whose question changed is an id used twice; its answer may be corrected.
    """
    asked = [kind, item["input"], item["since"]]
    return hashlib.sha256(one_line(asked).encode()).hexdigest()[:16]
