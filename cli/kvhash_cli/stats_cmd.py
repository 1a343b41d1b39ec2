"""``kvevents stats``: counts of a stream, live in a terminal, as a summary elsewhere."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import click

from kvhash.events.records import BadMessage, Batch, Gap, Lost, Record, Recovered, Restart
from kvhash.events.stats import PublisherStats, StreamStats

from .options import output_option
from .stream import follow_options, quiet_interrupt, read, subscriber

__all__ = ["count_record", "stats"]


def count_record(counts: StreamStats, record: Record) -> PublisherStats:
    """Count one record; return its publisher's counts."""
    publisher = counts.publisher(record.endpoint, record.rank)
    if isinstance(record, Batch):
        publisher.last_seq = record.seq
        publisher.see(record.batch, received=record.received_ns / 1e9)
    elif isinstance(record, Gap):
        publisher.gaps += 1
    elif isinstance(record, Recovered):
        publisher.recovered += record.last - record.first + 1
    elif isinstance(record, Lost):
        publisher.lost += record.last - record.first + 1
    elif isinstance(record, Restart):
        publisher.restart()
    elif isinstance(record, BadMessage):
        publisher.undecodable += 1
    return publisher


@click.command()
@follow_options
@output_option("text", "jsonl")
def stats(output: str, **options: Any) -> None:
    """Count what engines store, remove, clear and hold, with rate, lag, gaps and restarts, by engine and rank.

    In a terminal the table is live; elsewhere one summary is printed at the end (--duration, --idle-timeout, Ctrl-C).

    \b
    Example:
      kvevents stats tcp://127.0.0.1:5557 --duration 10
    """
    counts = StreamStats()
    if output == "text" and sys.stdout.isatty():
        _live(counts, options)
    else:
        with subscriber(options) as stream, quiet_interrupt():
            for record in read(stream, options):
                count_record(counts, record)
    if output == "jsonl":
        for publisher in counts:
            click.echo(json.dumps({"v": 1, "record": "stats", **publisher.to_json()}))
    elif not sys.stdout.isatty():
        for line in _lines(counts):
            click.echo(line)


_COLUMNS = (
    "engine",
    "rank",
    "stored",
    "removed",
    "clears",
    "held",
    "ops/s",
    "lag s",
    "gaps",
    "lost",
    "restarts",
    "bad",
)


def _row(p: PublisherStats) -> list[str]:
    rank = "-" if p.rank is None else str(p.rank)
    lag = "-" if p.lag_s is None else f"{p.lag_s:.3f}"
    counted = [p.stored, p.removed, p.clears, p.held]
    rest = [p.gaps, p.lost, p.restarts, p.undecodable]
    return [p.endpoint, rank, *map(str, counted), f"{p.rate(time.time()):.1f}", lag, *map(str, rest)]


def _lines(counts: StreamStats) -> list[str]:
    rows = [list(_COLUMNS), *map(_row, counts)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _live(counts: StreamStats, options: dict[str, Any]) -> None:
    from rich.live import Live
    from rich.table import Table

    def table() -> Table:
        shown = Table(*_COLUMNS)
        for publisher in counts:
            shown.add_row(*_row(publisher))
        return shown

    with subscriber(options) as stream, Live(table(), refresh_per_second=4) as live, quiet_interrupt():
        shown_at = 0.0

        def refresh() -> None:
            nonlocal shown_at
            if time.monotonic() - shown_at > 0.25:
                shown_at = time.monotonic()
                live.update(table())

        for record in read(stream, options, tick=refresh):
            count_record(counts, record)
        live.update(table())
