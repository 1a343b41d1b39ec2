"""``kvevents tail``: print events as they come."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

import click

from kvhash import UsageError
from kvhash.events.filters import EventFilter, TokenView, show_event
from kvhash.events.records import Batch
from kvhash.events.schema import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    UndecodableEvent,
    hash_key,
)

from .options import output_option
from .stream import event_record, follow_options, notice_record, notice_text, read, subscriber

__all__ = ["event_text", "filter_options", "make_filter", "tail"]

_TYPES = ["stored", "removed", "cleared", "unknown", "undecodable"]


def filter_options(function: Any) -> Any:
    """Add the conditions on events and what of them is shown."""
    for decorator in reversed(
        [
            click.option("--type", "types", multiple=True, type=click.Choice(_TYPES), help="Event type; repeat."),
            click.option("--medium", "mediums", multiple=True, metavar="TIER", help="GPU, CPU, ...; repeat."),
            click.option("--group", "groups", multiple=True, type=click.IntRange(min=0), metavar="N",
                help="KV cache group; repeat.",
            ),
            click.option("--hash", "hash_prefix", default=None, metavar="PREFIX", help="Hash by prefix."),
            click.option("--lora", default=None, metavar="NAME", help="Adapter name; '' for the base model."),
            click.option(
                "--tokens", type=click.Choice(["none", "head", "all"]), default="head", show_default=True,
                help="Token ids shown.",
            ),
            click.option("--redact", is_flag=True, help="Hide token ids, extra keys, salts and session ids."),
        ]
    ):  # fmt: skip
        function = decorator(function)
    return function


def make_filter(options: dict[str, Any]) -> EventFilter:
    """Return the filter of the options."""
    prefix = options["hash_prefix"]
    return EventFilter(
        types=frozenset(options["types"]),
        mediums=frozenset(medium.upper() for medium in options["mediums"]),
        groups=frozenset(options["groups"]),
        hash_prefix=None if prefix is None else prefix.lower().removeprefix("0x"),
        lora=options["lora"],
    )


@click.command()
@follow_options
@filter_options
@click.option("--count", type=int, default=None, metavar="N", help="End after N events.")
@output_option("text", "jsonl", "raw")
def tail(output: str, tokens: TokenView, redact: bool, count: int | None, **options: Any) -> None:
    """Print the events of engines as they come; gaps, losses and restarts stand among them.

    Text and jsonl have one line an event (jsonl holds notices in band, text has them on stderr); raw has one line of
    hex a batch, for `kvevents decode`. Exit status 3 when nothing came in time.

    \b
    Examples:
      kvevents tail tcp://127.0.0.1:5557
      kvevents tail tcp://engine:5557 --replay tcp://engine:5558 --from-seq start --dp-ranks 0-7 -o jsonl
    """
    if count is not None and count < 1:
        raise UsageError(f"--count is at least 1, got {count}", code="invalid-count")
    if redact and output == "raw":
        raise UsageError("raw output cannot be redacted; use -o text or -o jsonl", code="invalid-output")
    wanted = make_filter(options)
    printed = 0
    with subscriber(options) as stream:
        for record in read(stream, options):
            if not isinstance(record, Batch):
                if output == "jsonl":
                    click.echo(json.dumps(notice_record(record)))
                else:
                    click.echo(notice_text(record), err=True)
                continue
            kept = [event for event in record.batch.events if wanted.keeps(event)]
            if output == "raw" and kept:
                click.echo(record.payload.hex())
            for event in kept:
                shown, num_tokens = show_event(event, tokens=tokens, redact=redact)
                if output == "jsonl":
                    click.echo(json.dumps(event_record(record, shown, num_tokens)))
                elif output == "text":
                    click.echo(f"{_when(record)} {event_text(shown, num_tokens)}")
                printed += 1
                if printed == count:
                    return


def _when(record: Batch) -> str:
    try:
        at = datetime.fromtimestamp(record.batch.ts, timezone.utc).strftime("%H:%M:%S.%f")[:-3]
    except (OverflowError, ValueError, OSError):
        at = str(record.batch.ts)
    rank = "" if record.rank is None else f" rank {record.rank}"
    return f"{at} #{record.seq}{rank}"


def event_text(event: Event, num_tokens: int | None) -> str:
    """Return an event in one line of text."""
    if isinstance(event, BlockStored):
        parent = "root" if event.parent_block_hash is None else _hash(event.parent_block_hash)
        parts = [f"stored   {_hashes(event.block_hashes)} after {parent}", f"{num_tokens or 0} tokens"]
        if event.token_ids:
            shown = " ".join(map(str, event.token_ids))
            parts.append(f"[{shown}{' ...' if num_tokens and num_tokens > len(event.token_ids) else ''}]")
        parts.append(_place(event.medium, event.group_idx))
        if event.lora_name:
            parts.append(f"lora {event.lora_name}")
        if event.extra_keys and any(event.extra_keys):
            parts.append(f"keys {json.dumps(event.extra_keys, default=repr)}")
        return ", ".join(part for part in parts if part)
    if isinstance(event, BlockRemoved):
        return f"removed  {_hashes(event.block_hashes)}, {_place(event.medium, event.group_idx)}"
    if isinstance(event, AllBlocksCleared):
        return "cleared  all blocks"
    if isinstance(event, UndecodableEvent):
        return f"undecodable event: {event}"
    return f"unknown event {event.tag!r}"


def _place(medium: str | None, group: int | None) -> str:
    return (medium or "GPU") + ("" if group is None else f" group {group}")


def _hash(value: int | bytes) -> str:
    return f"{hash_key(value):016x}"


def _hashes(values: tuple[int | bytes, ...]) -> str:
    shown = " ".join(map(_hash, values[:4]))
    return shown if len(values) <= 4 else f"{shown} ... ({len(values)} blocks)"
