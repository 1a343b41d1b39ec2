"""Draws docs/speed.svg and docs/speed.png from the rows that ``bench_native.py --json`` wrote (needs matplotlib)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

DOCS = Path(__file__).resolve().parents[1] / "docs"
BLOCKS = 65_536 // 16
#: What is drawn, from slow to fast: label, what the row compares with, from what, whose time, colour.
BARS = (
    ("pure Python path", "pure", "list", "theirs", "#9aa5b1"),
    ("vLLM, all that it does for a request", "vLLM hasher", "list", "theirs", "#9aa5b1"),
    ("vLLM, serialization and digest alone", "vLLM hash call", "list", "theirs", "#9aa5b1"),
    ("Dynamo's own hashes, from a list", "Dynamo", "list", "theirs", "#9aa5b1"),
    ("kvhash, from a list", "vLLM hasher", "list", "ours", "#1f6feb"),
    ("kvhash, from a uint32 buffer", "bare chain", "buffer", "ours", "#1f6feb"),
    ("SHA-256 alone, padded beforehand", "bare chain, padded", "buffer", "theirs", "#d0d7de"),
)


def _nanoseconds(
    rows: list[dict[str, Any]], algorithm: str, peer: str, given: str, whose: str
) -> float | None:
    for row in rows:
        place = (row["algorithm"], row["block"], row["vocabulary"], row["peer"], row["given"], row["prompts"])
        if place == (algorithm, 16, 152_000, peer, given, 1):
            return float(row[whose]) / BLOCKS * 1e9
    return None


def draw(measured: dict[str, Any], folder: Path) -> None:
    """Draw nanoseconds a block for both SHA-256 algorithms, one above the other."""
    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "kvhash", "svg.fonttype": "none", "font.size": 10, "axes.titlesize": 11}
    )
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(9, 6.4), sharex=True, layout="constrained")
    for axis, algorithm in zip(axes, ("sha256_cbor", "sha256"), strict=True):
        bars = [
            (label, value, colour)
            for label, peer, given, whose, colour in BARS
            if (value := _nanoseconds(measured["rows"], algorithm, peer, given, whose)) is not None
        ]
        drawn = axis.barh([bar[0] for bar in bars], [bar[1] for bar in bars], color=[bar[2] for bar in bars])
        axis.bar_label(drawn, [f"{bar[1]:,.0f} ns" for bar in bars], padding=4)
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.set_xlim(30, 30_000)
        axis.set_title(f"{algorithm}: time for a block of 16 tokens, vocabulary of 152,000", loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_xlabel("nanoseconds, logarithmic; shorter is faster")
    figure.text(0.01, -0.03, measured["about"].replace("\n", "; "), fontsize=6.5, color="#57606a", wrap=True)
    figure.savefig(folder / "speed.svg", bbox_inches="tight", metadata={"Date": None})
    figure.savefig(folder / "speed.png", bbox_inches="tight", dpi=150, metadata={"Software": None})


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path, help="what bench_native.py --json wrote")
    parser.add_argument("--folder", type=Path, default=DOCS, help="where the pictures go; default docs/")
    arguments = parser.parse_args()
    draw(json.loads(arguments.json.read_text()), arguments.folder)


if __name__ == "__main__":
    main()
