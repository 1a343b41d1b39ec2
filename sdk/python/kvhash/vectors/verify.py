"""Checks the corpus against this kvhash: every vector computed anew, every file against its checksum.

The other direction of the generator: it starts from the files, so a vendored or changed corpus can be checked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvhash import BlockHashView, KvHashError, answer, parse_request, resolve_block_sizes
from kvhash.block_hash import external_hash, json_hash, make_block_hash_with_group_id, parse_hash
from kvhash.digest import sha256, xxh3_128
from kvhash.events import decode_batch, encode_batch
from kvhash.events.lines import answer_all_lines, decode_answer

from .engine_model import check_engine
from .generate_blocks import accumulated, serialized
from .inputs import expand
from .load import REQUEST_KINDS, Corpus, VectorFile, read_checksums
from .stream_model import final_state

__all__ = ["verify", "verify_checksums", "verify_vector"]


def _refusal(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return run()
    except KvHashError as error:
        return {"error": {"code": error.code}}


def _agrees(got: dict[str, Any], vector: Mapping[str, Any]) -> bool:
    expected = vector["expected"]
    if "error" in expected:
        return "error" in got and got["error"]["code"] in expected["error"]["codes"]
    return got in vector.get("accepted", [expected])


def _request(vector: Mapping[str, Any]) -> Iterator[str]:
    if "line" in vector["input"]:
        (got,) = answer_all_lines([vector["input"]["line"].encode("utf-8", "surrogatepass")])
        got.pop("id")
        if not _agrees(got, vector):
            yield f"the line is answered {got}"
        return
    request = expand(vector["input"]["request"])
    for release in vector["input"]["vllm"]:
        got = _refusal(lambda release=release: answer(parse_request({**request, "vllm": release})))  # type: ignore[misc]
        if not _agrees(got, vector):
            yield f"at {release} it is answered {str(got)[:200]}"
    for value in vector.get("published", []):
        if value not in vector["expected"]["block_hashes"] + vector["expected"]["external"]:
            yield f"the published hash {value} is not among those expected"


def _serialization(vector: Mapping[str, Any]) -> Iterator[str]:
    data = serialized(vector["input"]["serialization"], vector["input"]["value"])
    if vector.get("serialized", data.hex()) != data.hex() or vector["serialized_length"] != len(data):
        yield "the serialized bytes differ"
    if vector["digests"] != {"sha256": sha256(data).hex(), "xxh3_128": xxh3_128(data).hex()}:
        yield "a digest differs"


def _external(vector: Mapping[str, Any]) -> Iterator[str]:
    asked = vector["input"]
    value: Any = int(asked["int"]) if "int" in asked else bytes.fromhex(asked["digest"])
    if "group_id" in asked:
        got = {"with_group_id": make_block_hash_with_group_id(value, asked["group_id"]).hex()}
    elif "int" in asked:
        got = {"uint64": str(external_hash(value))}
    else:
        got = {
            "uint64": str(external_hash(value)),
            "int64": str(external_hash(value, "int64")),
            "bytes": value.hex(),
        }
    if got != vector["expected"]:
        yield f"got {got}"


def _block_size(vector: Mapping[str, Any]) -> Iterator[str]:
    asked = vector["input"]

    def run() -> dict[str, Any]:
        if "factor" in asked:
            hashes: list[Any] = [parse_hash(value) for value in asked["hashes"]]
            return {"hashes": [json_hash(value) for value in BlockHashView(hashes, asked["factor"])]}
        options = {name: value for name, value in asked.items() if name != "groups"}
        found = resolve_block_sizes(asked["groups"], **options)
        return {
            "groups": list(found.groups),
            "hash_block_size": found.hash_block_size,
            "scheduler_block_size": found.scheduler_block_size,
        }

    got = _refusal(run)
    if not _agrees(got, vector):
        yield f"got {got}"


def _accumulated(vector: Mapping[str, Any]) -> Iterator[str]:
    asked = vector["input"]
    for release in asked["vllm"]:
        if accumulated(asked["algorithm"], release, asked["chains"]) != vector["digest"]:
            yield f"the digest at {release} differs"


def _events(vector: Mapping[str, Any]) -> Iterator[str]:
    payload = bytes.fromhex(vector["input"]["payload"])
    got = _refusal(lambda: decode_answer({"decode": payload.hex()}))
    if not _agrees(got, vector):
        yield f"it is decoded as {str(got)[:200]}"
    for release in vector.get("encodes_at", []):
        if encode_batch(decode_batch(payload), release) != payload:
            yield f"encoding it for {release} gives other bytes"


def _streams(vector: Mapping[str, Any]) -> Iterator[str]:
    got = final_state(vector["input"]["steps"])
    if not _agrees(got, vector):
        yield f"the state is {got}"


_CHECKS: dict[str, Callable[[Mapping[str, Any]], Iterator[str]]] = {
    **dict.fromkeys(REQUEST_KINDS, _request),
    "serialization": _serialization,
    "external": _external,
    "block_size": _block_size,
    "accumulated": _accumulated,
    "events": _events,
    "streams": _streams,
    "engine": check_engine,
}


def verify_vector(file: VectorFile, vector: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with one vector, in words; empty when this kvhash gives what it says."""
    check = _CHECKS.get(file.kind)
    if check is None:
        return [f"this kvhash knows no vectors of kind {file.kind!r}"]
    try:
        return list(check(vector))
    except KvHashError as error:
        return [f"it cannot be computed: {error}"]
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Only the fields that all of a kind have are looked at when a corpus is loaded.
        return [f"its input has not the form of its kind ({type(error).__name__}: {error})"]


def verify(corpus: Corpus) -> Iterator[tuple[str, list[str]]]:
    """Yield (id, faults) of every vector."""
    for file, vector in corpus:
        yield vector["id"], verify_vector(file, vector)


def verify_checksums(root: Path) -> list[str]:
    """Return the files that SHA256SUMS names and that are missing or differ, and those that it does not name.

    Raises CorpusError when SHA256SUMS itself cannot be read.
    """
    faults = []
    named = read_checksums(root)
    for name, digest in named.items():
        path = root / name
        if not path.is_file():
            faults.append(f"{name} is missing")
        elif hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            faults.append(f"{name} differs from its checksum")
    # Links, pipes and sockets too: only a folder is nothing of its own.
    found = (path for path in root.rglob("*") if path.is_symlink() or not path.is_dir())
    here = {path.relative_to(root).as_posix() for path in found}
    return faults + [f"{name} has no checksum" for name in sorted(here - named.keys() - {"SHA256SUMS"})]
