"""Compares a program's answer with a vector: right or not, the first layer that differs, and the known mistake."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvhash.digest import sha256, xxh3_128

__all__ = ["Difference", "compare"]


#: The fields of an answer. Others may stand beside them and beside an error: a later kvhash may know more.
_ANSWERS = ("none_hash", "block_hashes", "external", "extra_keys", "batch")


@dataclass(frozen=True)
class Difference:
    """How an answer differs.

    ``layer``: ``refusal``, ``error code``, ``extra keys``, ``serialization``, ``digest``, ``hex case``, ``chain``,
    ``external form``, ``events`` or ``protocol``. ``mistakes``: the known ones that give this very value.
    """

    layer: str
    message: str
    mistakes: tuple[str, ...] = ()


def compare(vector: Mapping[str, Any], got: Mapping[str, Any]) -> Difference | None:
    """Return how the answer `got` (without ``id``) differs from what `vector` expects; None when it is right."""
    expected = vector["expected"]
    if "error" in got and not isinstance(got["error"], Mapping):
        wanted = "an object with 'code' and 'message'" if "error" in expected else "an answer without it"
        return Difference("protocol", f"'error' is {_kind(got['error'])}, {_short(got['error'])}; expected {wanted}")
    if "error" in expected:
        return _compare_refusal(expected["error"]["codes"], got, vector)
    if "error" in got:
        return Difference("refusal", f"refused with {_error(got['error'])}; expected an answer")
    if "batch" in expected:
        return _compare_batch(expected["batch"], got.get("batch"))
    found = [_compare_hashes(choice, got, vector) for choice in vector.get("accepted", [expected])]
    return None if None in found else found[0]


def _error(error: Mapping[str, Any]) -> str:
    return f"{error.get('code')!r} ({error.get('message')})"


def _compare_refusal(
    codes: list[str], got: Mapping[str, Any], vector: Mapping[str, Any]
) -> Difference | None:
    said = " or ".join(codes)
    if "error" not in got:
        return Difference("refusal", f"answered; expected a refusal ({said})", _mistakes(vector, got))
    if got["error"].get("code") not in codes:
        return Difference("error code", f"refused with {_error(got['error'])}; expected {said}")
    given = [repr(name) for name in _ANSWERS if name in got]
    if given:
        # Whoever reads these without looking at `error` has hashes of a request that has none.
        return Difference("refusal", f"refused, but the line has {', '.join(given)} too; leave them out")
    return None


def _compare_hashes(
    expected: Mapping[str, Any], got: Mapping[str, Any], vector: Mapping[str, Any]
) -> Difference | None:
    for name in ("none_hash", "block_hashes", "external", "extra_keys"):
        if name not in got:
            return Difference("protocol", f"the answer has no {name!r}")
        if name != "none_hash" and not isinstance(got[name], list):
            return Difference("protocol", f"{name!r} is no list")
    mistakes = _mistakes(vector, got)

    def differs(layer: str, what: str, right: Any, wrong: Any, *more: str) -> Difference:
        named = mistakes + tuple(name for name in more if name not in mistakes)
        return Difference(layer, f"{what}: {_told(right, wrong)}", named)

    if not _same(got["none_hash"], expected["none_hash"]):
        below = _below(vector.get("serialized_root"), expected["none_hash"], got["none_hash"])
        return differs(below.layer, "NONE_HASH", expected["none_hash"], got["none_hash"], *below.mistakes)
    hashes, right = got["block_hashes"], expected["block_hashes"]
    for i, (keys, wanted) in enumerate(zip(got["extra_keys"], expected["extra_keys"], strict=False)):
        if not _same(keys, wanted):
            return differs("extra keys", f"extra keys of block {i}", wanted, keys)
    for i, (value, wanted) in enumerate(zip(hashes, right, strict=False)):
        if not _same(value, wanted):
            preimages = vector.get("serialized") or []
            below = _below(preimages[i] if i < len(preimages) else None, wanted, value)
            named = {*mistakes, *below.mistakes}
            # Block 0 has NONE_HASH as its parent, which is right; of a later one the parent may be what is wrong.
            # A mistake that gives this very value tells which.
            parent = i > 0 and below.layer == "serialization" and (not named or bool(named & _OF_THE_CHAIN))
            layer = "chain" if parent else below.layer
            return differs(layer, f"block {i}", wanted, value, *below.mistakes)
    for name, layer in (
        ("block_hashes", "chain"),
        ("extra_keys", "extra keys"),
        ("external", "external form"),
    ):
        if len(got[name]) != len(expected[name]):
            return differs(layer, f"number of {name}", len(expected[name]), len(got[name]))
    for i, (value, wanted) in enumerate(zip(got["external"], expected["external"], strict=True)):
        if not _same(value, wanted):
            return differs("external form", f"published value of block {i}", wanted, value)
    return None


#: Known mistakes whose first wrong block is wrong because of its parent, or is not to be hashed at all.
_OF_THE_CHAIN = {
    "first-parent-null",
    "not-chained",
    "parent-as-bytes-too-early",
    "parent-as-hex-text",
    "parent-as-integer",
    "parent-truncated-to-64-bits",
    "partial-block-hashed",
}


def _same(got: Any, wanted: Any) -> bool:
    """Whether the JSON value `got` is the `wanted` one: where an integer is, 1.0 and true are not.

    Where a float is expected 1 is as good as 1.0, for many a JSON writer knows no other form.
    """
    if isinstance(got, bool) or isinstance(wanted, bool):
        return got is wanted
    if isinstance(got, list) and isinstance(wanted, list):
        return len(got) == len(wanted) and all(map(_same, got, wanted))
    if isinstance(got, dict) and isinstance(wanted, dict):
        return got.keys() == wanted.keys() and all(_same(got[name], wanted[name]) for name in got)
    if isinstance(got, float) and isinstance(wanted, int):
        return False
    return bool(got == wanted)


@dataclass(frozen=True)
class _Below:
    """What a wrong chain value tells of the layer in which it became wrong."""

    layer: str
    mistakes: tuple[str, ...] = ()


def _below(serialized: str | None, wanted: Any, value: Any) -> _Below:
    """Tell apart the right digest written otherwise, the right bytes digested otherwise, and other bytes."""
    if isinstance(value, str) and isinstance(wanted, str) and value.lower() == wanted:
        return _Below("hex case")
    if isinstance(wanted, dict) and wanted["int"] in (
        str(value.get("int") if isinstance(value, dict) else value),
        str(int(value, 16)) if isinstance(value, str) and re.fullmatch("[0-9a-fA-F]{1,64}", value) else None,
    ):
        return _Below("protocol")  # the right number in another form
    if _reversed(wanted, value):
        return _Below("digest", ("digest-little-endian",))
    if serialized is None:
        return _Below("serialization")
    data = bytes.fromhex(serialized)
    digests = [sha256(data), xxh3_128(data)]
    digests += [digest[::-1] for digest in digests]
    if value in [form for digest in digests for form in _forms(digest)]:
        return _Below("digest")
    empty = _with_empty_keys(data)
    if empty and value in [form for digest in (sha256(empty), xxh3_128(empty)) for form in _forms(digest)]:
        return _Below("serialization", ("empty-tuple-for-null",))
    return _Below("serialization")


def _forms(digest: bytes) -> list[Any]:
    """Return the ways in which a digest may stand in an answer as a chain value."""
    return [
        digest.hex(),
        *({"int": str(int.from_bytes(part, "big"))} for part in (digest, digest[-8:], digest[:8])),
    ]


def _reversed(wanted: Any, value: Any) -> bool:
    """Whether `value` is the right digest with its bytes in the other order."""
    if isinstance(wanted, str) and isinstance(value, str):
        return bytes.fromhex(wanted)[::-1].hex() == value.lower()
    if isinstance(wanted, dict) and isinstance(value, dict) and "int" in wanted:
        number = int(wanted["int"])
        size = next((n for n in (8, 16, 32) if number < 1 << 8 * n), 0)
        turned = {
            str(int.from_bytes(number.to_bytes(n, "big"), "little"))
            for n in (8, 16, 32)
            if size and n >= size
        }
        return value.get("int") in turned
    return False


def _with_empty_keys(data: bytes) -> bytes | None:
    """Return the preimage with an empty tuple where it has null for no extra keys; None when it has some."""
    for null, empty in ((b"\xf6", b"\x80"), (b"N\x87\x94.", b")\x87\x94.")):
        if data.endswith(null):
            return data.removesuffix(null) + empty
    return None


def _told(right: Any, wrong: Any) -> str:
    """Return what was expected and what came, each as JSON, so that 1 and "1" differ to the eye."""
    shown, came = _short(right), _short(wrong)
    if isinstance(right, str) and re.fullmatch("-?[0-9]+", right) and _kind(wrong) == "a number":
        return f"expected decimal text, {shown}; got a number, {came}"
    if isinstance(right, dict) and isinstance(wrong, dict) and _kind(wrong.get("int")) == "a number":
        return f"expected decimal text, {shown}; got a number, {came}"
    if isinstance(right, str) and isinstance(wrong, str) and right == wrong.lower():
        return f"expected {shown}, got {came}: hex is lower case"
    if right == wrong and _kind(right) not in ("a number", "a truth value"):
        return f"expected {shown}, got {came}: an integer is written as one, not as 1.0 or true"
    if _kind(right) == _kind(wrong) == "a number" and right == wrong:
        return f"expected an integer, {shown}; got {came}"
    if str(right) == str(wrong):
        return f"expected {_kind(right)}, {shown}; got {_kind(wrong)}, {came}"
    return f"expected {shown}, got {came}"


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "a truth value"
    names = ((str, "text"), ((int, float), "a number"), (list, "a list"), (Mapping, "an object"))
    return next((name for kind, name in names if isinstance(value, kind)), "null")


def _values(got: Mapping[str, Any]) -> Iterator[str]:
    for value in (got.get("none_hash"), *_listed(got, "block_hashes"), *_listed(got, "external")):
        yield str(value.get("int")) if isinstance(value, Mapping) else str(value)


def _listed(got: Mapping[str, Any], name: str) -> list[Any]:
    value = got.get(name)
    return value if isinstance(value, list) else []


def _mistakes(vector: Mapping[str, Any], got: Mapping[str, Any]) -> tuple[str, ...]:
    values = set(_values(got))
    return tuple(name for name, value in vector.get("wrong", {}).items() if value in values)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 90 else text[:87] + "..."


# --- events ---------------------------------------------------------------------------------------------------


def _compare_batch(expected: Mapping[str, Any], got: Any) -> Difference | None:
    if not isinstance(got, Mapping):
        return Difference("protocol", "the answer has no 'batch'")
    for name in ("ts", "data_parallel_rank", "layout", "extra"):
        if not _same(got.get(name), expected.get(name)):
            return Difference("events", f"{name}: {_told(expected.get(name), got.get(name))}")
    events = got.get("events")
    if not isinstance(events, list) or len(events) != len(expected["events"]):
        return Difference("events", f"expected {len(expected['events'])} events, got {_short(events)}")
    for i, (event, wanted) in enumerate(zip(events, expected["events"], strict=True)):
        right, wrong = _plain(wanted), _plain(event)
        if not _same(wrong, right):
            names = [name for name in {**right, **wrong} if not _same(wrong.get(name), right.get(name))]
            name = names[0] if names else "*"
            return Difference("events", f"event {i}, {name}: {_told(right.get(name), wrong.get(name))}")
    return None


def _plain(event: Any) -> dict[str, Any]:
    """Return an event without what need not be written (nil fields) and what is for people (messages)."""
    if not isinstance(event, Mapping):
        return {"event": event}
    return {name: value for name, value in event.items() if value is not None and name != "message"}
