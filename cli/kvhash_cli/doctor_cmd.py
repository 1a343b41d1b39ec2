"""``kvevents doctor``: what is wrong with a stream, and what to do."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import click

from kvhash.events.doctor import Doctor, Expectation, Finding
from kvhash.events.http_probe import probe_http
from kvhash.events.records import BadMessage, Batch
from kvhash.identify import DEFAULT_SEEDS, seeds_from
from kvhash.request import parse_json

from .options import output_option, read_value
from .run import EXIT_CONNECT, EXIT_MISMATCH
from .stats_cmd import count_record
from .stream import follow_options, lora_path_option, lora_paths, quiet_interrupt, read, subscriber

__all__ = ["doctor"]


@click.command()
@follow_options
@click.option("--http", default=None, metavar="URL", help="The engine's HTTP address, to ask it too.")
@click.option(
    "--expect",
    default=None,
    metavar="JSON",
    help="A router's settings to hold the stream against: JSON or @FILE.",
)
@click.option(
    "--hash-seed",
    "seeds",
    multiple=True,
    metavar="TEXT",
    help="Candidate PYTHONHASHSEED, 'unset' for none; repeat.",
)
@lora_path_option("paths")
@output_option("text", "jsonl")
def doctor(
    output: str,
    http: str | None,
    expect: str | None,
    seeds: tuple[str, ...],
    paths: tuple[str, ...],
    **options: Any,
) -> None:
    """Say in order what was found in an engine's stream, and what to do about it.

    Listens for --duration seconds (default 10). Expected settings are any of vllm, algorithm, hash_seed, block_size,
    hash_form (int or bytes), ranks and lora_paths. Exit status 1 when a problem was found or a setting differs, 3 when
    nothing came.

    \b
    Examples:
      kvevents doctor tcp://127.0.0.1:5557 --http http://127.0.0.1:8000
      kvevents doctor tcp://engine:5557 --expect '{"algorithm":"sha256_cbor","hash_seed":"0","block_size":16}'
    """
    expectation = None
    if expect is not None:
        expectation = Expectation.of(parse_json(read_value(expect, "--expect"), what="--expect"))
    physician = Doctor(
        hash_seeds=[*seeds_from(seeds), *DEFAULT_SEEDS], lora_paths=lora_paths(paths), expect=expectation
    )
    if options["duration"] is None:
        options["duration"] = 10.0
    probe = None if http is None else probe_http(http)
    begun = time.monotonic()
    with subscriber(options) as stream, quiet_interrupt():
        for record in read(stream, options, needs_batch=False, tick=_progress(begun, options["duration"])):
            if isinstance(record, Batch):
                publisher = physician.stats.publisher(record.endpoint, record.rank)
                publisher.last_seq = record.seq
                physician.see_batch(
                    publisher, record.batch, record.payload, received=record.received_ns / 1e9
                )
            elif isinstance(record, BadMessage):
                physician.see_bad_message()
            else:
                count_record(physician.stats, record)
    findings = physician.findings(probe, waited_s=round(time.monotonic() - begun, 1))
    for finding in findings:
        click.echo(
            json.dumps({"v": 1, "record": "finding", **finding.to_json()})
            if output == "jsonl"
            else _text(finding)
        )
    if any(finding.code in ("silence", "no-batches") for finding in findings):
        raise click.exceptions.Exit(EXIT_CONNECT)
    if any(finding.level == "problem" for finding in findings):
        raise click.exceptions.Exit(EXIT_MISMATCH)


def _progress(begun: float, duration: float) -> Any:
    if not sys.stderr.isatty():
        return None

    def show() -> None:
        left = max(0.0, begun + duration - time.monotonic())
        click.echo(f"\rlistening, {left:.0f} s left " if left else "\r" + " " * 30 + "\r", err=True, nl=False)

    return show


def _text(finding: Finding) -> str:
    advice = f"\n         {finding.advice}" if finding.advice else ""
    return f"{finding.level:<8} {finding.code}: {finding.seen}{advice}"
