"""Writes the contract table for the other languages; ``--check`` fails when a written one is stale.

``kvhash.contract`` is the one place where what differs by vLLM release is said. This makes of it:

* ``sdk/contract.json``: the table in no language's form (the rows, and the whole contract at each row), for any
  port to read or to check itself against;
* source of the languages that compile it in.

To add a language, write a function from the table (as `contract_table` returns it) to the text of one file and name
it in `OUTPUTS`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "sdk" / "python"))

from kvhash.contract import (  # noqa: E402 - the path is set above
    ALGORITHMS,
    CHANGES,
    NEWEST,
    OLDEST,
    OLDEST_EVENTS,
    Contract,
    EventField,
)
from kvhash.extra_keys import DTYPE_SIZES  # noqa: E402

__all__ = ["OUTPUTS", "contract_table", "main", "stale_outputs"]

#: The form of ``contract.json``; it grows by fields within one number.
VERSION = 1


def _fields(fields: Sequence[EventField]) -> list[dict[str, Any]]:
    return [{"name": field.name, "optional": field.optional} for field in fields]


def _contract(contract: Contract) -> dict[str, Any]:
    events = contract.events
    hashes = contract.hash_fields()
    return {
        "since": str(contract.release),
        **hashes,
        "algorithms": list(contract.algorithms),
        "events": {
            "layout": events.layout,
            "block_stored": _fields(events.block_stored),
            "block_removed": _fields(events.block_removed),
            "hash_bytes": events.hash_bytes,
            "replay_topic_frame": events.replay_topic_frame,
        },
    }


def contract_table() -> dict[str, Any]:
    """Return the whole table as JSON values.

    ``contracts`` holds, oldest first, the whole contract at each release where something changes; that of any
    release is the last whose ``since`` is not above it. ``changes`` holds the same rows as differences.
    """
    return {
        "v": VERSION,
        "generated_by": "tools/gen_contract.py from sdk/python/kvhash/contract.py; do not edit",
        "oldest": str(OLDEST),
        "oldest_events": str(OLDEST_EVENTS),
        "newest": str(NEWEST),
        "algorithms": [
            {
                "name": algorithm.name,
                "serialization": algorithm.serialization,
                "digest": algorithm.digest,
                "keeps": algorithm.keeps,
                "collision_resistant": algorithm.collision_resistant,
            }
            for algorithm in ALGORITHMS.values()
        ],
        "prompt_embeds_dtypes": dict(DTYPE_SIZES),
        "contracts": [_contract(Contract.for_vllm(change.since)) for change in CHANGES],
        "changes": [
            {
                "since": str(change.since),
                "summary": change.summary,
                "hashes": {k: list(v) if isinstance(v, tuple) else v for k, v in change.hashes.items()},
                "events": dict(change.events),
                "block_stored": _fields(change.stored),
                "block_removed": _fields(change.removed),
            }
            for change in CHANGES
        ],
    }


# --- JSON -----------------------------------------------------------------------------------------------------


def _json(table: dict[str, Any]) -> str:
    return json.dumps(table, indent=2, ensure_ascii=False) + "\n"


# --- Go -------------------------------------------------------------------------------------------------------


def _go_text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _go_release(text: str) -> str:
    return "Release{" + ", ".join(text.split(".")) + "}"


def _go_fields(fields: Sequence[dict[str, Any]]) -> str:
    items = [
        "{" + _go_text(field["name"]) + ", " + ("true" if field["optional"] else "false") + "}"
        for field in fields
    ]
    return "[]EventField{" + ", ".join(items) + "}"


def _go_contract(contract: dict[str, Any]) -> list[str]:
    events = contract["events"]
    seed = contract["default_seed"]
    rows = [
        ("Release", _go_release(contract["since"])),
        ("Algorithms", "[]string{" + ", ".join(map(_go_text, contract["algorithms"])) + "}"),
        ("ChainValues", _go_text(contract["chain_values"])),
        ("HasDefaultSeed", "false" if seed is None else "true"),
        ("DefaultSeed", _go_text(seed or "")),
        ("LoraKey", _go_text(contract["lora_key"])),
        ("MultimodalKey", _go_text(contract["multimodal_key"])),
        ("PromptEmbedsKey", _go_text(contract["prompt_embeds_key"])),
        ("TaggedKeys", str(contract["tagged_keys"]).lower()),
        ("Lookahead", str(contract["lookahead"]).lower()),
    ]
    event_rows = [
        ("Layout", _go_text(events["layout"])),
        ("BlockStored", _go_fields(events["block_stored"])),
        ("BlockRemoved", _go_fields(events["block_removed"])),
        ("HashBytes", str(events["hash_bytes"]).lower()),
        ("ReplayTopicFrame", str(events["replay_topic_frame"]).lower()),
    ]
    lines = ["\t{"]
    lines += _go_aligned(rows, "\t\t")
    lines += ["\t\tEvents: EventContract{", *_go_aligned(event_rows, "\t\t\t"), "\t\t},", "\t},"]
    return lines


def _go_aligned(rows: Sequence[tuple[str, str]], indent: str) -> list[str]:
    """Return the fields of a composite literal as gofmt aligns them."""
    width = max(len(name) for name, _ in rows) + 1
    return [f"{indent}{name + ':':<{width}} {value}," for name, value in rows]


def _go(table: dict[str, Any]) -> str:
    lines = [
        f"// Code generated by {table['generated_by'].replace('; do not edit', '')}. DO NOT EDIT.",
        "",
        "package kvhash",
        "",
        "var (",
        f"\toldestRelease       = {_go_release(table['oldest'])}",
        f"\toldestEventsRelease = {_go_release(table['oldest_events'])}",
        f"\tnewestRelease       = {_go_release(table['newest'])}",
        ")",
        "",
        "var algorithmTable = []Algorithm{",
    ]
    lines += [
        "\t{"
        + ", ".join(_go_text(item[name]) for name in ("name", "serialization", "digest", "keeps"))
        + "},"
        for item in table["algorithms"]
    ]
    lines += ["}", "", "// Bytes per element.", "var promptEmbedsDtypes = map[string]int{"]
    lines += _go_aligned([(_go_text(k), str(v)) for k, v in table["prompt_embeds_dtypes"].items()], "\t")
    lines += ["}", "", "// The whole contract at each release where something changes, oldest first."]
    lines += ["var contractTable = []Contract{"]
    for contract in table["contracts"]:
        lines += _go_contract(contract)
    lines += ["}", "", "// What each of these releases changed.", "var changeTable = []Change{"]
    lines += [
        "\t{" + _go_release(change["since"]) + ", " + _go_text(change["summary"]) + "},"
        for change in table["changes"]
    ]
    return "\n".join([*lines, "}", ""])


# --- what is written ------------------------------------------------------------------------------------------

#: Every file that is made, relative to the repository, and what makes its text from the table.
OUTPUTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "sdk/contract.json": _json,
    "sdk/go/contract_table.go": _go,
}


def stale_outputs(root: Path = ROOT) -> list[str]:
    """Return the outputs that are missing or differ from what the table gives now."""
    table = contract_table()
    stale = []
    for name, render in OUTPUTS.items():
        path = root / name
        if not path.exists() or path.read_text(encoding="utf-8") != render(table):
            stale.append(name)
    return stale


def main(arguments: Sequence[str] | None = None) -> int:
    """Write what is stale, or with ``--check`` only say it (exit status 1)."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when an output is stale")
    options = parser.parse_args(arguments)
    stale = stale_outputs()
    for name in stale:
        if options.check:
            sys.stderr.write(f"{name} is stale; run: python tools/gen_contract.py\n")
            continue
        (ROOT / name).write_text(OUTPUTS[name](contract_table()), encoding="utf-8")
        sys.stderr.write(f"wrote {name}\n")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
