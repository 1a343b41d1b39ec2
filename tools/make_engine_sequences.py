"""Plays the sequences of the corpus's engine vectors and writes them to tests/data/engine/sequences.json.

python tools/make_engine_sequences.py [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine_ref.sequences import play_sequence
from kvhash.vectors.inputs import tokens

TARGET = Path(__file__).parent.parent / "tests" / "data" / "engine" / "sequences.json"

#: One release of every shape that events and hashes had.
RELEASES = ("0.10.2", "0.11.1", "0.14.0", "0.17.0", "0.20.0", "0.24.0", "0.29.0", "0.31.0", "0.33.0")
SYSTEM = tokens("engine-system", 21, 150000)
LORA = {"id": 3, "name": "sql", "path": "adapters/sql"}


def prompt(name: str, count: int) -> list[int]:
    """Return token ids of their own for a name."""
    return tokens(f"engine-{name}", count, 150000)


def ask(ids: list[int], max_tokens: int = 5, **more: Any) -> dict[str, Any]:
    """Return one request."""
    return {"tokens": ids, "max_tokens": max_tokens, **more}


def alone(*requests: dict[str, Any]) -> list[dict[str, Any]]:
    """Return steps that send the requests one after the other."""
    return [{"requests": [request]} for request in requests]


RESET: dict[str, Any] = {"reset_prefix_cache": True}
USERS = [SYSTEM + prompt(f"user-{i}", 9 + i) for i in range(4)]
FLAGS_STEPS: dict[str, tuple[list[str], dict[str, Any], list[dict[str, Any]]]] = {
    "twice": (["engine-hit"], {}, alone(ask(prompt("a", 32)), ask(prompt("a", 32)), ask(prompt("a", 33)))),
    "shared-prefix": (["engine-hit"], {}, alone(*(ask(ids) for ids in (*USERS, *USERS)))),
    "conversation": (["engine-hit"], {}, alone(ask(USERS[0], 12), ask(USERS[0] + prompt("turn", 11), 3))),
    "eviction": (["engine-evict"], {"num_blocks": 16}, alone(*(ask(ids, 8) for ids in (*USERS, *USERS)))),
    "gone": (
        ["engine-evict"],
        {"num_blocks": 16},
        alone(*(ask(prompt(name, 40), 3) for name in ("x", "y", "x", "y", "y"))),
    ),
    "at-once": (["engine-evict"], {"num_blocks": 32}, [{"requests": [ask(ids, 9) for ids in USERS]}] * 2),
    "reset": (["engine-reset"], {}, [*alone(ask(USERS[0])), RESET, *alone(ask(USERS[0]), ask(USERS[0]))]),
    "prompt-logprobs": (
        ["engine-skip"],
        {},
        alone(ask(USERS[0]), ask(USERS[0], skip_reading_prefix_cache=True), ask(USERS[0])),
    ),
    "salts": (
        ["engine-hit", "salt"],
        {},
        alone(*(ask(USERS[0], **({"cache_salt": salt} if salt else {})) for salt in ("a", "b", None, "a"))),
    ),
    "adapter": (
        ["engine-hit", "lora"],
        {},
        alone(ask(USERS[0]), *[ask(USERS[0], lora=LORA)] * 2, ask(USERS[0])),
    ),
}
IMAGES = [{"identifier": f"image-{i}", "offset": 6, "length": 13} for i in range(2)]
#: What the newest release has beside that.
NEWEST: dict[str, tuple[list[str], dict[str, Any], list[dict[str, Any]]]] = {
    "bytes": (
        ["engine-hit", "event-hash-forms"],
        {"event_hash_form": "bytes"},
        FLAGS_STEPS["shared-prefix"][2],
    ),
    "images": (
        ["engine-hit", "multimodal", "continuation"],
        {},
        alone(*(ask(USERS[0], multimodal=[IMAGES[i]]) for i in (0, 1, 0))),
    ),
    "look-ahead": (["engine-hit", "lookahead"], {"lookahead": 1}, FLAGS_STEPS["twice"][2]),
    "context-parallel": (
        ["engine-hit", "context-parallel"],
        {"decode_context_parallel_size": 2},
        FLAGS_STEPS["shared-prefix"][2],
    ),
    "sliding-window": (
        ["engine-groups"],
        {
            "groups": [
                {"kind": "full_attention", "block_size": 4},
                {"kind": "sliding_window", "block_size": 4, "sliding_window": 8},
            ]
        },
        FLAGS_STEPS["shared-prefix"][2],
    ),
    "sliding-window-evicts": (
        ["engine-groups", "engine-evict"],
        {
            "num_blocks": 40,
            "groups": [
                {"kind": "full_attention", "block_size": 4},
                {"kind": "sliding_window", "block_size": 4, "sliding_window": 8},
            ],
        },
        FLAGS_STEPS["eviction"][2],
    ),
    "two-sizes": (
        ["engine-groups", "block-size"],
        {
            "groups": [
                {"kind": "full_attention", "block_size": 4},
                {"kind": "full_attention", "block_size": 8},
            ]
        },
        FLAGS_STEPS["shared-prefix"][2],
    ),
}


def sequences() -> Iterator[dict[str, Any]]:
    """Yield every sequence, played."""
    for release in RELEASES:
        chosen = {**FLAGS_STEPS, **(NEWEST if release == RELEASES[-1] else {})}
        for number, (name, (flags, changes, steps)) in enumerate(chosen.items()):
            algorithm = ("sha256_cbor", "sha256")[number % 2]
            base = {
                "vllm": release,
                "algorithm": algorithm,
                "hash_seed": "0",
                "block_size": 4,
                "num_blocks": 200,
            }
            settings = {**base, **changes}
            played = zip(steps, play_sequence(settings, steps), strict=True)
            yield {
                "name": name,
                "flags": flags,
                "settings": settings,
                "steps": [{"sent": step, "observed": observed} for step, observed in played],
            }


def main() -> int:
    """Write the file, or with --check say whether it is up to date."""
    lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in sequences())
    text = f"[\n{lines}\n]\n"
    if sys.argv[1:] == ["--check"]:
        if TARGET.read_text() != text:
            print(f"{TARGET.name} is not what the engine gives; run python tools/make_engine_sequences.py")
            return 1
        return 0
    TARGET.write_text(text)
    print(f"wrote {TARGET.name}: {len(text)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
