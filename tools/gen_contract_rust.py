"""Writes the Rust crate's contract table from the Python SDK's, or checks (``--check``) that it is up to date."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "sdk" / "python"))

from kvhash.contract import (  # noqa: E402 - the SDK of this checkout, not an installed one
    ALGORITHMS,
    CHANGES,
    NEWEST,
    OLDEST,
    Algorithm,
    Contract,
    EventField,
    Release,
)

TARGET = ROOT / "sdk" / "rust" / "kvhash" / "src" / "contract_table.rs"
_NAMES = {
    "int": "Int",
    "bytes": "Bytes",
    "id": "Id",
    "name": "Name",
    "name_and_path": "NameAndPath",
    "identifier": "Identifier",
    "identifier_and_offset": "IdentifierAndOffset",
    "absent": "Absent",
    "sha256": "Sha256",
    "xxh3_128": "Xxh3",
    "pickle5": "Pickle5",
    "cbor": "Cbor",
    "array": "Array",
    "map": "Map",
}


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _text(value: str | None) -> str:
    return "None" if value is None else f"Some({json.dumps(value)})"


def _release(value: Release) -> str:
    return f"Release::new({value.major}, {value.minor}, {value.patch})"


def _fields(values: tuple[EventField, ...]) -> str:
    items = "".join(f"field({json.dumps(value.name)}, {_bool(value.optional)}), " for value in values)
    return f"&[{items.removesuffix(', ')}]"


def _algorithm(value: Algorithm) -> str:
    return (
        f"    Algorithm {{ name: {json.dumps(value.name)}, "
        f"serialization: Serialization::{_NAMES[value.serialization]}, "
        f"digest: Digest::{_NAMES[value.digest]}, low64: {_bool(value.keeps == 'low64')} }},\n"
    )


def _row(contract: Contract) -> str:
    names = ", ".join(json.dumps(name) for name in contract.algorithms)
    events = contract.events
    return f"""    Contract {{
        release: {_release(contract.release)},
        algorithms: &[{names}],
        chain_values: ChainValues::{_NAMES[contract.chain_values]},
        default_seed: {_text(contract.default_seed)},
        lora_key: LoraKey::{_NAMES[contract.lora_key]},
        multimodal_key: MultimodalKey::{_NAMES[contract.multimodal_key]},
        prompt_embeds_key: PromptEmbedsKey::{_NAMES[contract.prompt_embeds_key]},
        tagged_keys: {_bool(contract.tagged_keys)},
        lookahead: {_bool(contract.lookahead)},
        events: EventContract {{
            layout: Layout::{_NAMES[events.layout]},
            block_stored: {_fields(events.block_stored)},
            block_removed: {_fields(events.block_removed)},
            hash_bytes: {_bool(events.hash_bytes)},
            replay_topic_frame: {_bool(events.replay_topic_frame)},
        }},
    }},
"""


def table() -> str:
    """Return the text of ``contract_table.rs``: one row a change, each with every value in force from it on."""
    rows = "".join(_row(Contract.for_vllm(change.since)) for change in CHANGES)
    algorithms = "".join(map(_algorithm, ALGORITHMS.values()))
    return f"""// Made by tools/gen_contract_rust.py from sdk/python/kvhash/contract.py; do not edit.
//! The table of changes: one row a release that changed something, with every value in force from it on.

use crate::contract::{{
    Algorithm, ChainValues, Contract, Digest, EventContract, EventField, Layout, LoraKey, MultimodalKey,
    PromptEmbedsKey, Release, Serialization,
}};

pub(crate) const OLDEST: Release = {_release(OLDEST)};
pub(crate) const NEWEST: Release = {_release(NEWEST)};

pub(crate) const ALGORITHMS: [Algorithm; {len(ALGORITHMS)}] = [
{algorithms}];

const fn field(name: &'static str, optional: bool) -> EventField {{
    EventField {{ name, optional }}
}}

pub(crate) const ROWS: [Contract; {len(CHANGES)}] = [
{rows}];
"""


def main() -> int:
    """Write or check the table; returns 1 when it is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the table is up to date")
    check = parser.parse_args().check
    text = table()
    if check:
        if not TARGET.exists() or TARGET.read_text() != text:
            print(
                f"{TARGET.relative_to(ROOT)} is stale; run: python tools/gen_contract_rust.py",
                file=sys.stderr,
            )
            return 1
        return 0
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
