"""``kvevents export``: a recording as JSON lines or Parquet."""

from __future__ import annotations

import click

from kvhash import UsageError
from kvhash.events.export import export_jsonl, export_parquet

from .decode_cmd import open_source
from .options import SEQUENCE

__all__ = ["export"]


@click.command()
@click.argument("file")
@click.argument("target")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["jsonl", "parquet"]),
    default=None,
    help="[default: by TARGET's name]",
)
@click.option("--from-seq", type=SEQUENCE, default=None, metavar="N", help="Begin at this sequence number.")
def export(file: str, target: str, kind: str | None, from_seq: int | None) -> None:
    """Write a recording as JSON lines (one message a line) or Parquet (one event a row); the file appears whole.

    \b
    Examples:
      kvevents export engine.kvrec events.jsonl
      kvevents export engine.kvrec events.parquet
    """
    if kind is None:
        kind = {"jsonl": "jsonl", "parquet": "parquet"}.get(target.rpartition(".")[2])
    if kind is None:
        raise UsageError(
            "say the format: a TARGET that ends in .jsonl or .parquet, or --format", code="invalid-format"
        )
    source = open_source(file)
    write = export_jsonl if kind == "jsonl" else export_parquet
    count = write(source.records(from_seq), target)
    for damage in source.damage:
        click.echo(f"{file}: {damage}", err=True)
    click.echo(f"{count} {'messages' if kind == 'jsonl' else 'events'} written to {target}", err=True)
