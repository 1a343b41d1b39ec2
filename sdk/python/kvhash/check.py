"""Expected hashes checked line by line, in the manner of ``sha256sum -c``.

A check line is a request line with an ``expect`` object that holds any of ``none_hash``, ``block_hashes``,
``external`` and ``extra_keys`` as answer lines carry them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ._checks import check_fields
from ._errors import InvalidRequestError, KvHashError
from .request import answer, parse_json, parse_request

__all__ = ["CheckResult", "check_lines"]

_EXPECTED = ("none_hash", "block_hashes", "external", "extra_keys")


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The outcome of one line: ``ok``, or what differs (``detail``); ``error`` when it could not be hashed."""

    id: Any
    ok: bool
    detail: str | None = None
    error: KvHashError | None = None


def check_lines(lines: Iterable[bytes], defaults: Mapping[str, Any] | None = None) -> Iterator[CheckResult]:
    """Check each line; blank lines are passed over, and a bad line is a result with its error."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        identity: Any = f"line {number}"
        try:
            value = parse_json(line)
            if not isinstance(value, dict):
                raise InvalidRequestError(f"expected a JSON object, got {type(value).__name__}", at="$")
            identity = value.get("id", identity)
            expected = check_fields(value.pop("expect", None) or {}, at="$.expect", allowed=_EXPECTED)
            if not expected:
                raise InvalidRequestError("expected an 'expect' object with hashes to compare", at="$.expect")
            _check_types(expected)
            detail = _compare(expected, answer(parse_request(value, defaults)))
            yield CheckResult(identity, detail is None, detail)
        except KvHashError as error:
            yield CheckResult(identity, False, error=error)


def _check_types(expected: Mapping[str, Any]) -> None:
    for name, value in expected.items():
        good = isinstance(value, (str, dict)) if name == "none_hash" else isinstance(value, list)
        if not good:
            what = "a hash" if name == "none_hash" else "a list"
            raise InvalidRequestError(f"expected {what}, got {type(value).__name__}", at=f"$.expect.{name}")


def _compare(expected: Mapping[str, Any], got: Mapping[str, Any]) -> str | None:
    for name in _EXPECTED:
        if name not in expected or expected[name] == got[name]:
            continue
        wanted, found = expected[name], got[name]
        if not isinstance(wanted, list):
            return f"{name}: expected {wanted}, computed {found}"
        if len(wanted) != len(found):
            return f"{name}: expected {len(wanted)} blocks, computed {len(found)}"
        index = next(i for i, (a, b) in enumerate(zip(wanted, found, strict=True)) if a != b)
        return f"{name}: block {index} differs: expected {wanted[index]}, computed {found[index]}"
    return None
