"""Every language's line program refuses and answers the same lines and payloads, however odd they are."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from . import built
from .event_lines import damaged_payloads, python_answer, recorded_payloads
from .event_payloads import random_payloads
from .hostile_lines import changed_lines, edge_lines, long_lines
from .lines_program import assert_same_answers, awkward_lines, random_lines, run_lines

pytestmark = [
    pytest.mark.filterwarnings("ignore::kvhash.contract.NewerReleaseWarning"),
    pytest.mark.timeout(900),  # the programs are built first
]
OTHERS = [name for name in built.PROGRAMS if name != "python"]


def _lines_for(name: str, lines: list[bytes]) -> list[bytes]:
    # Java decodes no events: to it `decode` is an unknown field.
    return [line for line in lines if name != "java" or b'"decode"' not in line]


@pytest.mark.parametrize("name", OTHERS)
def test_lines_with_one_odd_thing_are_answered_as_python_does(name: str) -> None:
    """Numbers, texts, nesting, white space, releases and bytes at the edge of JSON: the same answer or code."""
    assert assert_same_answers(built.PROGRAMS[name](), _lines_for(name, edge_lines() + awkward_lines())) > 200


@pytest.mark.parametrize("name", OTHERS)
def test_changed_lines_are_answered_as_python_does(name: str) -> None:
    """Good and bad lines with characters changed at random: no program reads what another refuses."""
    lines = [line for line in random_lines(150, seed=5) + edge_lines() if line.strip() and len(line) < 1500]
    assert_same_answers(built.PROGRAMS[name](), _lines_for(name, changed_lines(lines, 2500, seed=6)))


@pytest.mark.parametrize("name", OTHERS)
def test_the_longest_line_is_the_same(name: str) -> None:
    """The limit does not count the line's end; a longer one is refused, blank or not, and the next is answered."""
    assert assert_same_answers(built.PROGRAMS[name](), long_lines()) == 3


@pytest.mark.parametrize("name", OTHERS)
def test_a_number_beyond_its_range_is_told_the_end_that_it_is_beyond(name: str) -> None:
    """An adapter's id of 2^63 is told that it is too large, not that it should be at least 1."""
    ids = (2**63, 2**100, 2**140)
    line = '{"id":%d,"hash_seed":"0","tokens":[1],"lora":{"name":"n","path":"p","id":%d}}\n'
    for answer in run_lines(built.PROGRAMS[name](), [(line % (i, i)).encode() for i in ids]):
        assert answer["error"]["code"] == "invalid-lora"
        assert re.search(r"2\^63 - 1|9223372036854775807", answer["error"]["message"]), answer


@pytest.mark.parametrize("name", OTHERS)
def test_many_random_requests_are_answered_as_python_does(name: str) -> None:
    """All releases, algorithms, keys, look-ahead and parallelism, mixed at random, give equal answers."""
    assert assert_same_answers(built.PROGRAMS[name](), random_lines(800, seed=8)) > 350


@pytest.mark.parametrize("name", [name for name in OTHERS if name != "java"])
def test_wild_payloads_are_decoded_as_python_does(name: str) -> None:
    """Anything in any place, in every width of msgpack: the same events, unreadable places and codes."""
    recorded = [payload for payload in recorded_payloads() if 0 < len(payload) < 2000]
    payloads = [p for p in damaged_payloads(recorded, 1500, seed=3) + random_payloads(2500, seed=4) if p]
    lines = [json.dumps({"id": i, "decode": p.hex()}).encode() + b"\n" for i, p in enumerate(payloads)]
    decoded = 0
    for payload, got in zip(payloads, run_lines(built.PROGRAMS[name](), lines), strict=True):
        expected = json.loads(json.dumps(python_answer(payload)))
        del got["id"]
        if "error" in got:
            got["error"] = got["error"]["code"]
        for event in got.get("batch", {}).get("events", ()):
            event.pop("message", None)
        assert _comparable(got) == _comparable(expected), payload.hex()
        decoded += "batch" in expected
    assert decoded > 1500


def _comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """Of maps in unknown fields only the values count: how keys that are no text are named differs by language."""
    batch = answer.get("batch", {})
    for holder in (batch, *batch.get("events", ())):
        for name in ("extra", "extra_keys"):
            if holder.get(name):
                holder[name] = _values(holder[name])
    return answer


def _values(value: Any) -> Any:
    if isinstance(value, list):
        return [_values(item) for item in value]
    if not isinstance(value, dict) or set(value) in ({"bytes"}, {"ext", "bytes"}, {"float"}):
        return value
    return sorted(json.dumps(_values(item), sort_keys=True) for item in value.values())
