"""``kvevents decode``: read messages from files."""

from __future__ import annotations

import json
from typing import Any

import click

from kvhash import DecodeError, KvHashError
from kvhash.events.decode import decode_batch
from kvhash.events.filters import TokenView, show_event
from kvhash.events.message import parse_message
from kvhash.events.records import BadMessage, Batch
from kvhash.events.schema import UndecodableEvent
from kvhash.events.sources import FileSource

from .options import SEQUENCE, output_option, read_file
from .run import EXIT_DECODE, EXIT_USAGE
from .stream import event_record
from .tail_cmd import event_text, filter_options, make_filter

__all__ = ["decode", "open_source"]


def open_source(name: str) -> FileSource:
    """Return the messages of a file, or of stdin for ``-``."""
    return FileSource("stdin", read_file("-")) if name == "-" else FileSource(name)


@click.command()
@click.argument("files", nargs=-1, required=True)
@filter_options
@click.option("--from-seq", type=SEQUENCE, default=None, metavar="N", help="Begin at this sequence number.")
@click.option("--strict", is_flag=True, help="Exit with status 4 when anything could not be decoded.")
@output_option("text", "jsonl", "raw")
def decode(
    files: tuple[str, ...],
    from_seq: int | None,
    strict: bool,
    output: str,
    tokens: TokenView,
    redact: bool,
    **options: Any,
) -> None:
    """Decode recordings, lines of hex, a raw payload, or stdin (-), of any release's shape.

    What cannot be decoded is reported on stderr and counted; the rest is printed.

    \b
    Examples:
      kvevents decode engine.kvrec -o jsonl
      kvevents tail tcp://127.0.0.1:5557 -o raw | kvevents decode -
    """
    wanted = make_filter(options)
    faults = unreadable = 0
    for name in files:
        try:
            source = open_source(name)
            for record in source.records(from_seq):
                message = parse_message(list(record.frames), record.endpoint, record.received_ns)
                if isinstance(message, BadMessage):
                    faults += 1
                    click.echo(f"{name}: message at {record.offset}: {message.reason}", err=True)
                    continue
                try:
                    batch = decode_batch(message.payload)
                except KvHashError as error:
                    faults += 1
                    click.echo(f"{name}: message {message.seq}: [{error.code}] {error}", err=True)
                    continue
                item = Batch(
                    record.endpoint, batch.data_parallel_rank, message.seq, message.topic, record.received_ns, batch,
                    message.payload,
                )  # fmt: skip
                faults += sum(isinstance(event, UndecodableEvent) for event in batch.events)
                kept = [event for event in batch.events if wanted.keeps(event)]
                if output == "raw" and kept:
                    click.echo(message.payload.hex())
                for event in kept if output != "raw" else []:
                    shown, num_tokens = show_event(event, tokens=tokens, redact=redact)
                    if output == "jsonl":
                        click.echo(json.dumps(event_record(item, shown, num_tokens)))
                    else:
                        click.echo(f"#{item.seq} {event_text(shown, num_tokens)}")
            for damage in source.damage:
                faults += 1
                click.echo(f"{name}: {damage}", err=True)
        except BrokenPipeError:
            raise  # our reader has gone; that is no fault of the file
        except (DecodeError, OSError) as error:
            unreadable += 1
            shown_error = f"[{error.code}] {error}" if isinstance(error, DecodeError) else str(error.strerror)
            click.echo(f"kvevents: {name}: {shown_error}", err=True)
    if faults:
        click.echo(f"{faults} messages or events could not be decoded", err=True)
    if unreadable:
        raise click.exceptions.Exit(EXIT_USAGE)
    if strict and faults:
        raise click.exceptions.Exit(EXIT_DECODE)
