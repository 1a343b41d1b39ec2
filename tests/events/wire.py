"""The recorded batches and captures, read for the tests of events."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data"
RELEASES = sorted(path.name.removesuffix(".jsonl") for path in (DATA / "wire").glob("*.jsonl"))
CAPTURES = sorted(path.stem for path in (DATA / "captures").glob("*.json"))


@cache
def wire_lines(release: str) -> list[dict[str, Any]]:
    """Return the batches recorded from a release: payload, and what it means."""
    return [json.loads(line) for line in (DATA / "wire" / f"{release}.jsonl").read_text().splitlines()]


@cache
def capture(name: str) -> dict[str, Any]:
    """Return one recorded server run."""
    data: dict[str, Any] = json.loads((DATA / "captures" / f"{name}.json").read_bytes())
    return data


def frames(name: str) -> list[list[bytes]]:
    """Return the published messages of a capture, as frames."""
    return [[bytes.fromhex(frame) for frame in message] for message in capture(name)["frames"]]


def plain(value: Any) -> Any:
    """Return a recorded value as the decoder gives it."""
    if isinstance(value, dict):
        return int(value["int"]) if "int" in value else bytes.fromhex(value["bytes"])
    return tuple(plain(item) for item in value) if isinstance(value, list) else value
