"""The recorded vLLM outputs, read for the tests."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
RELEASES = sorted(
    (path.name.removesuffix(".jsonl.gz") for path in (DATA / "oracle" / "hash").glob("0.*.jsonl.gz")),
    key=lambda text: [int(part) for part in text.split(".")],
)
CAPTURES = sorted(path.stem for path in (DATA / "captures").glob("*.json"))


@cache
def hash_cases() -> dict[str, dict[str, Any]]:
    """Return the recorded cases by id."""
    with gzip.open(DATA / "oracle" / "hash" / "cases.json.gz") as file:
        return {case["id"]: case for case in json.load(file)}


def hash_results(release: str) -> list[dict[str, Any]]:
    """Return what a release gave for each case."""
    with gzip.open(DATA / "oracle" / "hash" / f"{release}.jsonl.gz") as file:
        return [json.loads(line) for line in file]


def request_of(case: dict[str, Any], release: str) -> dict[str, Any]:
    """Return a recorded case as a request line's object."""
    names = {"salt": "cache_salt", "mm": "multimodal"}
    extra = {
        names.get(name, name): case[name]
        for name in ("lora", "salt", "mm", "prompt_embeds", "lookahead")
        if case.get(name) is not None
    }
    return {
        "id": case["id"],
        "vllm": release,
        "algorithm": case["algo"],
        "hash_seed": case["seed"],
        "block_size": case["block_size"],
        "tokens": case["tokens"],
        **extra,
    }


@cache
def capture(name: str) -> dict[str, Any]:
    """Return one recorded server run."""
    return json.loads((DATA / "captures" / f"{name}.json").read_bytes())
