"""Writes the contract table for the TypeScript and Java hashers from the Python one; ``--check`` only compares.

Each row holds all fields of the contract from that release on, so that a reader needs no rule for applying changes.

    python tools/gen_contract_ts_java.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "sdk" / "python"))

from kvhash.contract import ALGORITHMS, CHANGES, NEWEST, OLDEST, Contract, EventContract  # noqa: E402

TYPESCRIPT = ROOT / "sdk" / "typescript" / "src" / "contract-table.ts"
JAVA = ROOT / "examples" / "hasher-java" / "src" / "main" / "resources" / "kvhash" / "contract.json"


def _events(events: EventContract) -> dict[str, Any]:
    def described(fields: Any) -> list[dict[str, Any]]:
        return [{"name": field.name, "optional": field.optional} for field in fields]

    return {
        "layout": events.layout,
        "block_stored": described(events.block_stored),
        "block_removed": described(events.block_removed),
        "hash_bytes": events.hash_bytes,
        "replay_topic_frame": events.replay_topic_frame,
    }


def table(*, with_events: bool) -> dict[str, Any]:
    """Return the whole table as plain values."""
    rows = []
    for change in CHANGES:
        contract = Contract.for_vllm(change.since)
        row: dict[str, Any] = {"since": str(change.since), **contract.hash_fields()}
        row["algorithms"] = list(row["algorithms"])
        if with_events:
            row["events"] = _events(contract.events)
        rows.append(row)
    return {
        "oldest": str(OLDEST),
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
        "rows": rows,
    }


def outputs() -> dict[Path, str]:
    """Return the text of each generated file."""
    typescript = (
        "// Made by tools/gen_contract_ts_java.py from the Python contract table; do not edit.\n\n"
        f"export const CONTRACT_TABLE = {json.dumps(table(with_events=True), indent=2)} as const;\n"
    )
    return {TYPESCRIPT: typescript, JAVA: json.dumps(table(with_events=False), indent=2) + "\n"}


def main() -> int:
    """Write the files, or with ``--check`` return 1 when one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when a file is out of date"
    )
    check = parser.parse_args().check
    stale = 0
    for path, text in outputs().items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        sys.stderr.write(f"{path.relative_to(ROOT)}: {'out of date' if check else 'written'}\n")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
