"""``kvevents record``: keep a stream in a file."""

from __future__ import annotations

import sys
from typing import Any

import click

from kvhash.events.recording import RecordingWriter
from kvhash.events.records import BadMessage, Batch

from .stream import follow_options, notice_text, quiet_interrupt, read, subscriber

__all__ = ["record"]


@click.command()
@click.option(
    "-w",
    "--write",
    "path",
    required=True,
    metavar="FILE",
    help="The recording; appended to when it is there.",
)
@click.option("--zstd", is_flag=True, help="Compress payloads (needs kvhash[zstd]).")
@click.option("--count", type=click.IntRange(min=1), default=None, metavar="N", help="End after N batches.")
@follow_options
def record(path: str, zstd: bool, count: int | None, **options: Any) -> None:
    """Record the raw messages of engines, with their receive times, until Ctrl-C.

    The file can be read while it grows and after any crash; see `kvevents decode`, `replay`, `verify` and `export`.

    \b
    Example:
      kvevents record -w engine.kvrec tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558 --from-seq start
    """
    written = 0
    with RecordingWriter(path, compress=zstd) as writer, subscriber(options) as stream, quiet_interrupt():
        if writer.dropped_tail is not None:
            click.echo(f"{path}: a cut record at its end was dropped: {writer.dropped_tail}", err=True)
        for item in read(stream, options):
            if isinstance(item, Batch):
                frames = (item.topic, item.seq.to_bytes(8, "big"), item.payload)
            elif isinstance(item, BadMessage):
                frames = item.frames  # type: ignore[assignment]
            else:
                click.echo(notice_text(item), err=True)
                continue
            writer.write(frames, endpoint=item.endpoint, rank=item.rank, received_ns=item.received_ns)
            written += 1
            if sys.stderr.isatty():
                click.echo(f"\r{written} messages", err=True, nl=False)
            if written == count:
                break
    click.echo(f"{written} messages recorded in {path}", err=True)
