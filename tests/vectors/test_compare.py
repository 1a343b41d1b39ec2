"""What an answer may not look like, however right its values are: 1.0 for 1, hashes beside an error, an odd `error`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from kvhash.vectors import load_corpus
from kvhash.vectors.compare import compare

from .programs import CORPUS


@cache
def vectors(kind: str) -> tuple[dict[str, Any], ...]:
    """Return the vectors of a kind."""
    return tuple(dict(vector) for file, vector in load_corpus(CORPUS) if file.kind == kind)


def given(kind: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield vectors that have an answer, each with a copy of it."""
    for vector in vectors(kind)[::3]:
        if "error" not in vector["expected"]:
            yield vector, json.loads(json.dumps(vector["expected"]))


def changed(value: Any, change: Callable[[int], object], but: str = "") -> Any:
    """Return a copy of a JSON value with every integer in it changed; the field `but` stays."""
    if isinstance(value, int) and not isinstance(value, bool):
        return change(value)
    if isinstance(value, list):
        return [changed(item, change) for item in value]
    if isinstance(value, dict):
        return {name: item if name == but else changed(item, change) for name, item in value.items()}
    return value


def test_a_float_is_no_integer_in_extra_keys() -> None:
    """An offset or id that is written 1.0 or -3.0 fails as an extra key, and the message says why."""
    found = 0
    for vector, answer in given("extra_keys"):
        assert compare(vector, answer) is None
        keys = changed(answer["extra_keys"], float)
        if json.dumps(keys) == json.dumps(answer["extra_keys"]):
            continue
        difference = compare(vector, {**answer, "extra_keys": keys})
        assert difference is not None, vector["id"]
        assert difference.layer == "extra keys"
        if float_holds(answer["extra_keys"]):  # else the value differs, too, and that is what is said
            assert "an integer is written as one" in difference.message
            found += 1
    assert found > 50


def float_holds(value: object) -> bool:
    """Return whether every integer in it is the same as a float."""
    if isinstance(value, list):
        return all(map(float_holds, value))
    return not isinstance(value, int) or int(float(value)) == value


@pytest.mark.parametrize("change", [float, lambda value: value == 1 if value in (0, 1) else value])
def test_a_float_or_a_truth_value_is_no_integer_in_events(change: Callable[[int], object]) -> None:
    """Every integer of a batch counts, as one; the time may be written either way."""
    found = 0
    for vector, answer in given("events"):
        batch = answer["batch"]
        if isinstance(batch["ts"], float) and batch["ts"].is_integer():
            assert compare(vector, {"batch": {**batch, "ts": int(batch["ts"])}}) is None
        other = changed(batch, change, but="ts")
        # A field that is null or left out is the same, so an unchanged batch proves nothing.
        if json.dumps(other) != json.dumps(batch):
            difference = compare(vector, {"batch": other})
            assert difference is not None, vector["id"]
            assert difference.layer == "events"
            found += 1
    assert found > 10


def refused() -> dict[str, Any]:
    """Return a vector of a line that is to be refused."""
    return next(vector for vector in vectors("requests") if "error" in vector["expected"])


@pytest.mark.parametrize("name", ["none_hash", "block_hashes", "external", "extra_keys", "batch"])
@pytest.mark.parametrize("value", ["00", [], None])
def test_a_refusal_gives_no_hashes(name: str, value: object) -> None:
    """A field of an answer beside the right error fails: who reads it has a hash where there is none."""
    vector = refused()
    error = {"code": vector["expected"]["error"]["codes"][0], "message": "no"}
    assert compare(vector, {"error": error}) is None
    difference = compare(vector, {"error": error, name: value})
    assert difference is not None
    assert difference.layer == "refusal"
    assert repr(name) in difference.message


def test_fields_of_a_later_kvhash_may_stand_there() -> None:
    """What the documents do not name is not compared, in an answer and beside an error."""
    vector = refused()
    error = {"code": vector["expected"]["error"]["codes"][0], "message": "no", "hint": "ask again"}
    assert compare(vector, {"error": error, "more": 1}) is None
    vector, answer = next(given("chains"))
    assert compare(vector, {**answer, "more": 1}) is None


@pytest.mark.parametrize(
    ("value", "kind"), [("unknown-root", "text"), (None, "null"), (False, "a truth value"), ([], "a list")]
)
def test_an_error_that_is_no_object_is_told_so(value: object, kind: str) -> None:
    """The right code as text is not said to be the wrong code; and no answer has an `error`, null neither."""
    answered, right = next(given("chains"))
    for vector, answer in ((refused(), {}), (answered, right)):
        difference = compare(vector, {**answer, "error": value})
        assert difference is not None
        assert difference.layer == "protocol"
        assert f"'error' is {kind}, {json.dumps(value)}; expected an" in difference.message
