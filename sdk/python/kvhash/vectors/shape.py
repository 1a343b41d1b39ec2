"""The shape that a corpus must have before anything reads it: a wrong one is told with file, vector and field.

Only what this kvhash uses is looked at; fields that it does not know are let through, for a newer corpus may have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union

import msgspec

from .record import SCHEMA_VERSION
from .visible import visible

__all__ = ["KINDS", "REQUEST_KINDS", "check_file", "check_manifest", "check_vector"]

_Release = Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{1,6}(\.[0-9]{1,6}){1,3}\Z")]
_Hex = Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{2})*\Z")]
_Decimal = Annotated[str, msgspec.Meta(pattern=r"\A-?[0-9]{1,4000}\Z")]
_Text = Annotated[str, msgspec.Meta(min_length=1)]


class _Entry(msgspec.Struct):
    path: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_-][A-Za-z0-9._-]*\Z")]
    kind: str


class _Manifest(msgspec.Struct):
    schema_version: int
    files: list[_Entry]


class _File(msgspec.Struct):
    schema_version: int
    kind: str
    notes: dict[str, dict[str, str]]
    vectors: list[dict[str, Any]]


class _Common(msgspec.Struct):
    id: _Text
    name: str
    flags: list[str]
    since: _Release
    until: _Release | None
    result: Literal["valid", "invalid", "implementation_defined"]


class _Vector(_Common):
    input: dict[str, Any]


class _Int(msgspec.Struct):
    int: Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{1,78}\Z")]


_ChainValue = Union[_Hex, _Int]  # noqa: UP007 - evaluated by msgspec, also on Python 3.10


class _Answer(msgspec.Struct):
    none_hash: _ChainValue
    block_hashes: list[_ChainValue]
    external: list[_Decimal]
    extra_keys: list[list[Any] | None]


class _Codes(msgspec.Struct):
    codes: list[str]


class _Refusal(msgspec.Struct):
    error: _Codes


class _Event(msgspec.Struct):
    events: list[dict[str, Any]]


class _Batch(msgspec.Struct):
    batch: _Event


class _Expecting(_Vector):
    expected: dict[str, Any]


class _Request(_Expecting):
    accepted: list[_Answer] = msgspec.field(default_factory=list)
    serialized: list[_Hex] = msgspec.field(default_factory=list)
    serialized_root: _Hex = ""
    wrong: dict[str, str] = msgspec.field(default_factory=dict)
    published: list[str] = msgspec.field(default_factory=list)


class _Generated(msgspec.Struct):
    seed: Annotated[str, msgspec.Meta(pattern=r"\A[ -~]*\Z")]
    count: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
    vocabulary: Annotated[int, msgspec.Meta(ge=1)]


class _Generate(msgspec.Struct):
    generate: _Generated


class _Asked(msgspec.Struct):
    request: dict[str, Any]
    vllm: list[str]


class _Line(msgspec.Struct):
    line: str
    vllm: list[str]


class _PayloadInput(msgspec.Struct):
    payload: _Hex


class _Events(_Common):
    expected: dict[str, Any]
    input: _PayloadInput
    encodes_at: list[_Release] = msgspec.field(default_factory=list)


class _SerializationInput(msgspec.Struct):
    serialization: Literal["cbor", "pickle5"]
    value: Any


class _Digests(msgspec.Struct):
    sha256: _Hex
    xxh3_128: _Hex


class _Serialization(_Common):
    input: _SerializationInput
    serialized_length: int
    digests: _Digests
    serialized: _Hex = ""


class _AccumulatedInput(msgspec.Struct):
    algorithm: str
    vllm: list[_Release]
    chains: int
    blocks: int
    block_size: int
    stream: str
    vocabulary: int


class _Accumulated(_Common):
    input: _AccumulatedInput
    digest: _Hex


class _StreamStep(msgspec.Struct):
    frames: list[_Hex]
    rank: int
    from_: Literal["live", "replay"] = msgspec.field(name="from")


class _StreamInput(msgspec.Struct):
    steps: list[_StreamStep]


class _Streams(_Common):
    expected: dict[str, Any]
    input: _StreamInput


class _External(_Expecting):
    wrong: dict[str, str] = msgspec.field(default_factory=dict)


#: Kinds whose vectors are request lines, so that any line program can be asked them.
REQUEST_KINDS = ("none_hash", "chains", "extra_keys", "lookahead", "context_parallel", "requests", "recorded")
#: Every kind of vectors that this kvhash knows, and the shape of one of them.
KINDS: Mapping[str, type[_Common]] = {
    **dict.fromkeys(REQUEST_KINDS, _Request),
    "serialization": _Serialization,
    "external": _External,
    "block_size": _Expecting,
    "accumulated": _Accumulated,
    "events": _Events,
    "streams": _Streams,
    "engine": _Expecting,
}


def _wrong(value: Any, shape: Any, at: str = "") -> str | None:
    try:
        msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        return visible(f"{what} at ${at}{where.rstrip('`')}")
    except UnicodeEncodeError:
        return f"a text holds a lone surrogate, which UTF-8 cannot carry, at ${at}"
    return None


def _version(value: Mapping[str, Any]) -> str | None:
    version = value.get("schema_version")
    if type(version) is int and version != SCHEMA_VERSION:
        return (
            f"it has schema_version {version}, and this kvhash knows {SCHEMA_VERSION}; "
            f"{'update kvhash' if version > SCHEMA_VERSION else 'take a newer corpus'}"
        )
    return None


def check_manifest(value: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a manifest, in words; None when nothing is."""
    return _version(value) or _wrong(value, _Manifest)


def check_file(value: Mapping[str, Any], kind: str) -> str | None:
    """Return what is wrong with a file of vectors that the manifest says is of this kind, its vectors aside."""
    fault = _version(value) or _wrong(value, _File)
    if fault is None and value["kind"] != kind:
        return f"its kind is {value['kind']!r}, and manifest.json says {kind!r}"
    return fault


def check_vector(kind: str, vector: Mapping[str, Any], notes: Mapping[str, Any]) -> str | None:
    """Return what is wrong with one vector; of a kind that is not known only what all kinds have is looked at."""
    fault = _wrong(vector, KINDS.get(kind, _Vector))
    if fault:
        return fault
    unexplained = [flag for flag in vector["flags"] if flag not in notes]
    if unexplained:
        return f"the flag {unexplained[0]!r} is not explained in the notes at $.flags"
    expected = vector.get("expected", {})
    if kind in KINDS and "error" in expected:
        return _wrong(expected, _Refusal, ".expected")
    if kind == "events":
        return _wrong(expected, _Batch, ".expected")
    if kind in REQUEST_KINDS:
        return _wrong(expected, _Answer, ".expected") or _request_input(vector["input"])
    return None


def _request_input(asked: Mapping[str, Any]) -> str | None:
    if "line" in asked:
        return _wrong(asked, _Line, ".input")
    fault = _wrong(asked, _Asked, ".input")
    if fault is None and isinstance(asked["request"].get("tokens"), dict):
        return _wrong(asked["request"]["tokens"], _Generate, ".input.request.tokens")
    return fault
