"""``kvhash contract``: the table of changes, one release's contract, or what changes between two releases."""

from __future__ import annotations

import json
from typing import Any

import click

from kvhash.contract import CHANGES, Change, Contract, changes_between

from .options import output_option

__all__ = ["contract"]


@click.command()
@click.argument("release", required=False)
@click.argument("other", required=False)
@output_option("text", "jsonl")
def contract(release: str | None, other: str | None, output: str) -> None:
    """Show the table of changes; with one RELEASE its contract, with two what changes from one to the other.

    \b
    Examples:
      kvhash contract
      kvhash contract 0.31.0
      kvhash contract 0.17.0 0.33.0
    """
    if release is None or other is not None:
        rows = CHANGES if release is None else changes_between(release, other or "latest")
        _print_changes(rows, output)
        return
    value = Contract.for_vllm(release)
    described = _describe(value)
    if output == "jsonl":
        click.echo(json.dumps({"v": 1, **described}))
        return
    for name, shown in described.items():
        click.echo(f"{name + ':':<22} {', '.join(shown) if isinstance(shown, list) else shown}")


def _print_changes(rows: tuple[Change, ...], output: str) -> None:
    for row in rows:
        if output == "jsonl":
            click.echo(json.dumps({"v": 1, "since": str(row.since), "summary": row.summary}))
        else:
            click.echo(f"{row.since!s:<8} {row.summary}")
    if not rows and output == "text":
        click.echo("nothing changes between these releases")


def _describe(value: Contract) -> dict[str, Any]:
    events = value.events
    return {
        "vllm": str(value.release),
        "algorithms": list(value.algorithms),
        "chain_values": value.chain_values,
        "root_without_seed": "random"
        if value.default_seed is None
        else f"H({value.default_seed!r}) for sha256*, random for xxhash*",
        "lora_key": value.lora_key,
        "multimodal_key": value.multimodal_key,
        "prompt_embeds_key": value.prompt_embeds_key,
        "tagged_keys": "yes" if value.tagged_keys else "no",
        "lookahead": "yes" if value.lookahead else "no",
        "event_layout": events.layout,
        "event_hashes": "unsigned 64-bit or bytes" if events.hash_bytes else "integers",
        "block_stored": [field.name for field in events.block_stored],
        "block_removed": [field.name for field in events.block_removed],
        "replay_topic_frame": "yes" if events.replay_topic_frame else "no",
    }
