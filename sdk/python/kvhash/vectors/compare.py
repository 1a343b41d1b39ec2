"""Compares a program's answer with a vector: right or not, the first layer that differs, and the known mistake."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvhash.digest import sha256, xxh3_128

__all__ = ["Difference", "compare"]


@dataclass(frozen=True)
class Difference:
    """How an answer differs.

    ``layer``: ``refusal``, ``error code``, ``extra keys``, ``serialization``, ``digest``, ``chain``,
    ``external form``, ``events`` or ``protocol``. ``mistakes``: the known ones that give this very value.
    """

    layer: str
    message: str
    mistakes: tuple[str, ...] = ()


def compare(vector: Mapping[str, Any], got: Mapping[str, Any]) -> Difference | None:
    """Return how the answer `got` (without ``id``) differs from what `vector` expects; None when it is right."""
    expected = vector["expected"]
    if "error" in expected:
        return _compare_refusal(expected["error"]["codes"], got, vector)
    if "error" in got:
        return Difference("refusal", f"refused with {_error(got)}; expected an answer")
    if "batch" in expected:
        return _compare_batch(expected["batch"], got.get("batch"))
    found = [_compare_hashes(choice, got, vector) for choice in vector.get("accepted", [expected])]
    return None if None in found else found[0]


def _error(got: Mapping[str, Any]) -> str:
    error = got["error"]
    return f"{error.get('code')!r} ({error.get('message')})" if isinstance(error, Mapping) else repr(error)


def _compare_refusal(
    codes: list[str], got: Mapping[str, Any], vector: Mapping[str, Any]
) -> Difference | None:
    said = " or ".join(codes)
    if "error" not in got:
        return Difference("refusal", f"answered; expected a refusal ({said})", _mistakes(vector, got))
    error = got["error"]
    code = error.get("code") if isinstance(error, Mapping) else None
    if code in codes:
        return None
    return Difference("error code", f"refused with {_error(got)}; expected {said}")


def _compare_hashes(
    expected: Mapping[str, Any], got: Mapping[str, Any], vector: Mapping[str, Any]
) -> Difference | None:
    for name in ("none_hash", "block_hashes", "external", "extra_keys"):
        if name not in got:
            return Difference("protocol", f"the answer has no {name!r}")
        if name != "none_hash" and not isinstance(got[name], list):
            return Difference("protocol", f"{name!r} is no list")
    mistakes = _mistakes(vector, got)

    def differs(layer: str, what: str, right: Any, wrong: Any) -> Difference:
        return Difference(layer, f"{what}: expected {_short(right)}, got {_short(wrong)}", mistakes)

    if got["none_hash"] != expected["none_hash"]:
        layer = _below(vector.get("serialized_root"), got["none_hash"])
        return differs(layer, "NONE_HASH", expected["none_hash"], got["none_hash"])
    hashes, right = got["block_hashes"], expected["block_hashes"]
    for i, (keys, wanted) in enumerate(zip(got["extra_keys"], expected["extra_keys"], strict=False)):
        if keys != wanted:
            return differs("extra keys", f"extra keys of block {i}", wanted, keys)
    for i, (value, wanted) in enumerate(zip(hashes, right, strict=False)):
        if value != wanted:
            preimages = vector.get("serialized") or []
            below = _below(preimages[i] if i < len(preimages) else None, value)
            layer = below if i == 0 or below == "digest" else "chain"
            return differs(layer, f"block {i}", wanted, value)
    for name, layer in (
        ("block_hashes", "chain"),
        ("extra_keys", "extra keys"),
        ("external", "external form"),
    ):
        if len(got[name]) != len(expected[name]):
            return differs(layer, f"number of {name}", len(expected[name]), len(got[name]))
    for i, (value, wanted) in enumerate(zip(got["external"], expected["external"], strict=True)):
        if value != wanted:
            return differs("external form", f"published value of block {i}", wanted, value)
    return None


def _below(serialized: str | None, value: Any) -> str:
    """Whether the right bytes were digested otherwise (``digest``) or other bytes were (``serialization``)."""
    if serialized is None:
        return "serialization"
    data = bytes.fromhex(serialized)
    digests = [sha256(data), xxh3_128(data)]
    digests += [digest[::-1] for digest in digests]
    forms: list[Any] = [digest.hex() for digest in digests]
    for digest in digests:
        forms += [{"int": str(int.from_bytes(part, "big"))} for part in (digest, digest[-8:], digest[:8])]
    return "digest" if value in forms else "serialization"


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
    text = str(value)
    return text if len(text) <= 90 else text[:87] + "..."


# --- events ---------------------------------------------------------------------------------------------------


def _compare_batch(expected: Mapping[str, Any], got: Any) -> Difference | None:
    if not isinstance(got, Mapping):
        return Difference("protocol", "the answer has no 'batch'")
    for name in ("ts", "data_parallel_rank", "layout", "extra"):
        if got.get(name) != expected.get(name):
            return Difference("events", f"{name}: expected {expected.get(name)!r}, got {got.get(name)!r}")
    events = got.get("events")
    if not isinstance(events, list) or len(events) != len(expected["events"]):
        return Difference("events", f"expected {len(expected['events'])} events, got {_short(events)}")
    for i, (event, wanted) in enumerate(zip(events, expected["events"], strict=True)):
        right, wrong = _plain(wanted), _plain(event)
        if right != wrong:
            names = [name for name in {**right, **wrong} if right.get(name) != wrong.get(name)]
            name = names[0] if names else "*"
            shown = f"expected {_short(right.get(name))}, got {_short(wrong.get(name))}"
            return Difference("events", f"event {i}, {name}: {shown}")
    return None


def _plain(event: Any) -> dict[str, Any]:
    """Return an event without what need not be written (nil fields) and what is for people (messages)."""
    if not isinstance(event, Mapping):
        return {"event": event}
    return {name: value for name, value in event.items() if value is not None and name != "message"}
