"""``kvevents publish``: events from JSON lines in any release's wire shape, to test consumers."""

from __future__ import annotations

import time

import click

from kvhash import KvHashError
from kvhash.events.encode import encode_batch
from kvhash.events.export import batch_from_json
from kvhash.events.publisher import Publisher
from kvhash.request import parse_json

from .options import open_lines
from .run import EXIT_USAGE
from .stream import serve_options

__all__ = ["publish"]


@click.command()
@click.argument("file", default="-")
@click.option(
    "--endpoint", default="tcp://127.0.0.1:5557", show_default=True, help="Where to publish; it is bound."
)
@click.option("--replay-endpoint", default=None, help="Where to answer replay requests. [default: no replay]")
@click.option("--vllm", "release", default="latest", show_default=True, metavar="RELEASE", help="Wire shape.")
@click.option("--topic", default="", help="Topic of the messages.")
@click.option(
    "--rank", type=int, default=0, show_default=True, help="Data parallel rank; added to the ports."
)
@click.option(
    "--drop-fields",
    is_flag=True,
    help="Leave out fields that the release does not have, instead of refusing.",
)
@serve_options
def publish(
    file: str,
    endpoint: str,
    replay_endpoint: str | None,
    release: str,
    topic: str,
    rank: int,
    drop_fields: bool,
    delay: float,
    linger: float,
) -> None:
    """Publish batches given as JSON lines: {"ts":..., "data_parallel_rank":..., "events":[{"type":"BlockStored",...}]}.

    A line that cannot be published is reported, and the others go out; the exit status is then 2.

    \b
    Example:
      echo '{"ts":1.0,"events":[{"type":"AllBlocksCleared"}]}' | kvevents publish - --vllm 0.20.0
    """
    refused = sent = 0
    with (
        Publisher(
            endpoint, replay_endpoint, release=release, topic=topic, data_parallel_rank=rank, bind=True
        ) as publisher,
        open_lines(file) as lines,
    ):
        click.echo(f"publishing on {publisher.endpoint}", err=True)
        time.sleep(delay)
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                batch = batch_from_json(parse_json(line))
                publisher.publish_payload(
                    encode_batch(publisher.with_rank(batch), release, drop_fields=drop_fields)
                )
                sent += 1
            except KvHashError as error:
                refused += 1
                click.echo(f"line {number}: error [{error.code}]: {error}", err=True)
        time.sleep(linger)
    click.echo(f"{sent} batches published, {refused} refused", err=True)
    if refused:
        raise click.exceptions.Exit(EXIT_USAGE)
