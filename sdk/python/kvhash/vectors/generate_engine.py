"""Makes the engine vectors from sequences that the reference engine played (``tests/data/engine/sequences.json``).

The engine is not imported: what it published is confirmed here by what follows from the requests alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvhash.contract import CHANGES, Release

from .engine_model import check_engine, resident_after
from .record import vector

__all__ = ["make_engine"]


def make_engine(data: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the vectors; raises ValueError when a sequence contradicts its own requests."""
    made = []
    for played in json.loads((data / "engine" / "sequences.json").read_text()):
        release = played["settings"]["vllm"]
        later = [change.since for change in CHANGES if change.since > Release.parse(release)]
        steps, seen = [], []
        for step in played["steps"]:
            observed = step["observed"]
            sent = dict(step["sent"])
            if "requests" in sent:
                sent["requests"] = [
                    {**request, "output": answer["output"]}
                    for request, answer in zip(sent["requests"], observed["requests"], strict=True)
                ]
            steps.append(sent)
            hits = [{"cached_tokens": answer["cached_tokens"]} for answer in observed["requests"]]
            seen.append({"payloads": observed["payloads"], "requests": hits})
        item = vector(
            f"engine/{played['name']}/{release}",
            f"an engine's life: {played['name'].replace('-', ' ')}, as {release} publishes it",
            flags=played["flags"],
            since=release,
            until=str(later[0]) if later else None,
            input={"engine": played["settings"], "steps": steps},
            expected={"steps": seen, "resident": resident_after(seen)},
        )
        faults = list(check_engine(item))
        if faults:
            raise ValueError(f"{item['id']}: {'; '.join(faults)}")
        made.append(item)
    return {"engine": made}
