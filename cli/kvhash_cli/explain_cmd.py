"""``kvhash explain``: one block's preimage, byte by byte."""

from __future__ import annotations

import json
from typing import Any

import click

from kvhash.block_hash import hash_text
from kvhash.explain import Explanation, explain_block
from kvhash.extra_keys import json_keys

from .options import (
    output_option,
    prompt_options,
    read_request,
    refuse_prompt,
    request_from_line,
    request_options,
    settings_of,
    settings_options,
)

__all__ = ["explain"]


@click.command()
@prompt_options
@settings_options
@request_options
@click.option("--line", default=None, metavar="JSON", help="A request line instead: JSON, @FILE or -.")
@click.option(
    "--block", default=0, show_default=True, type=int, help="Which block; negative counts from the last."
)
@output_option("text", "jsonl")
def explain(block: int, line: str | None, output: str, **options: Any) -> None:
    """Show what is hashed for one block: parent, tokens and extra keys as bytes, each with its meaning.

    \b
    Example:
      kvhash explain --tokens '[1,2,3,4]' --block-size 4 --algorithm sha256_cbor --hash-seed 0
    """
    if line is not None:
        refuse_prompt(options, "--line")
    request = read_request(options) if line is None else request_from_line(line, settings_of(options))
    explanation = explain_block(request, block)
    if output == "jsonl":
        click.echo(json.dumps({"v": 1, **explanation.to_json()}))
    else:
        _print(explanation)


def _print(e: Explanation) -> None:
    value = e.block_hash
    parent = str(e.parent) if isinstance(e.parent, int) else e.parent.hex()
    click.echo(f"block {e.index}: tokens [{e.start}, {e.end})")
    click.echo(f"parent: {parent}")
    click.echo(f"extra keys: {json.dumps(json_keys(e.extra_keys))}")
    click.echo(f"preimage: {len(e.preimage)} bytes of {e.serialization}")
    for segment in e.segments:
        data = segment.data.hex(" ")
        shown = data if len(data) <= 47 else f"{data[:35]} .. ({len(segment.data)} bytes)"
        click.echo(f"  {segment.offset:>6}  {shown:<48}  {segment.encoding:<36}  {segment.meaning}".rstrip())
    hashed = hash_text(value)
    click.echo(f"{e.digest_name}: {hashed}")
