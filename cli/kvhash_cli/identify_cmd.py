"""``kvhash identify``: which settings observed hashes came from."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from kvhash import InvalidRequestError
from kvhash.block_hash import parse_hash
from kvhash.identify import Identification, request_from_event, seeds_from
from kvhash.identify import identify as search
from kvhash.request import HashRequest, parse_json

from .options import (
    output_option,
    prompt_options,
    read_prompts,
    read_value,
    refuse_prompt,
    request_options,
    settings_of,
)
from .run import EXIT_MISMATCH

__all__ = ["identify"]


@click.command()
@prompt_options
@request_options
@click.option(
    "--hashes", default=None, metavar="LIST", help="Observed hashes: JSON list, comma list, @FILE or -."
)
@click.option(
    "--event", default=None, metavar="JSON", help="A BlockStored event instead of --tokens and --hashes."
)
@click.option(
    "--parent", default=None, metavar="HASH", help="Published parent, when the tokens start inside a prompt."
)
@click.option(
    "--vllm", "releases", multiple=True, metavar="RELEASE", help="Candidate release; repeat. [default: all]"
)
@click.option(
    "--algorithm", "algorithms", multiple=True, metavar="NAME", help="Candidate; repeat. [default: all]"
)
@click.option(
    "--hash-seed",
    "--seed",
    "seeds",
    multiple=True,
    metavar="TEXT",
    help="Candidate PYTHONHASHSEED, 'unset' for none; repeat. [default: common ones]",
)
@click.option(
    "--block-size", "block_sizes", multiple=True, type=int, metavar="TOKENS", help="Candidate; repeat."
)
@click.option("--lookahead", type=int, default=0, metavar="N", help="Look-ahead of the engine's drafter.")
@output_option("text", "jsonl")
def identify(
    hashes: str | None,
    event: str | None,
    parent: str | None,
    releases: tuple[str, ...],
    algorithms: tuple[str, ...],
    seeds: tuple[str, ...],
    block_sizes: tuple[int, ...],
    lookahead: int,
    output: str,
    **options: Any,
) -> None:
    """Find the releases, algorithm, seed and block size (or the known mistake) that give observed hashes.

    Give the prompt's tokens and the hashes seen, or one BlockStored event as JSON. Exit status 1 when nothing matches;
    what was tried is said.

    \b
    Examples:
      kvhash identify --tokens @prompt.json --hashes 12391562873482907348 --seed 0 --seed unset
      kvhash identify --event @stored.json
    """
    fields: dict[str, Any] = {}
    observed: list[Any]
    seen_parent: Any = parent
    if event is not None:
        refuse_prompt(options, "--event")
        if hashes is not None:
            raise InvalidRequestError("--hashes and --event exclude each other", code="no-hashes")
        value = parse_json(read_value(event, "--event"), what="--event")
        if not isinstance(value, dict):
            raise InvalidRequestError("expected a BlockStored event, a JSON object", at="$")
        fields, observed, event_parent = request_from_event(value)
        seen_parent = event_parent if parent is None else parent
        if not block_sizes and type(value.get("block_size")) is int and value["block_size"] > 0:
            block_sizes = (value["block_size"],)
    else:
        if hashes is None:
            raise InvalidRequestError("give the observed hashes: --hashes, or --event", code="no-hashes")
        observed = _hash_list(hashes)
        prompts = read_prompts(options)
        if len(prompts) != 1:
            raise InvalidRequestError(f"expected one prompt, got {len(prompts)}", at="$.prompt")
        fields = prompts[0]
    given = settings_of(options)
    if "lora" in fields and "lora" in given:
        given["lora"] = {**fields["lora"], **given["lora"]}
    request = HashRequest.of({**fields, **given, "lookahead": lookahead})
    with _progress() as progress:
        result = search(
            request,
            [parse_hash(value, at=f"$.block_hashes[{i}]") for i, value in enumerate(observed)],
            releases=releases or None,
            algorithms=algorithms or None,
            hash_seeds=seeds_from(seeds) if seeds else None,
            block_sizes=block_sizes or None,
            parent=None if seen_parent is None else parse_hash(seen_parent, at="$.parent_block_hash"),
            progress=progress,
        )
    _print(result, output)
    if not result.matches:
        raise click.exceptions.Exit(EXIT_MISMATCH)


def _hash_list(text: str) -> list[Any]:
    data = read_value(text, "--hashes")
    stripped = data.decode("utf-8", "replace").strip() if isinstance(data, bytes) else data.strip()
    if stripped.startswith("["):
        value = parse_json(stripped, what="--hashes")
        if isinstance(value, list):
            return value
        raise InvalidRequestError(f"expected a list of hashes, got {type(value).__name__}", at="$")
    return stripped.replace(",", " ").split()


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """Show progress on stderr while it is a terminal; clear it afterwards."""
    if not sys.stderr.isatty():
        yield None
        return

    def show(done: int, total: int) -> None:
        click.echo(f"\rtrying {done + 1} of {total} recipes ", err=True, nl=False)

    yield show
    click.echo("\r" + " " * 40 + "\r", err=True, nl=False)


def _print(result: Identification, output: str) -> None:
    if output == "jsonl":
        click.echo(
            json.dumps(
                {
                    "v": 1,
                    "matches": [match.to_json() for match in result.matches],
                    "tried": result.tried_text,
                },
                ensure_ascii=False,
            )
        )
        return
    for note in result.notes:
        click.echo(note, err=True)
    if not result.matches:
        click.echo("no match")
        click.echo(f"tried {result.tried_text}", err=True)
        return
    for match in result.matches:
        seed = "not used"
        if match.seed_known:
            seed = "unset" if match.hash_seed is None else repr(match.hash_seed)
        click.echo(f"match: {match.matched} of {match.observed} observed hashes")
        click.echo(f"  release:    {match.release_text}")
        click.echo(f"  algorithm:  {match.algorithm}")
        click.echo(f"  hash seed:  {seed}")
        click.echo(f"  block size: {match.block_size}")
        click.echo(f"  published:  {match.form}")
        if match.mistake is not None:
            click.echo(f"  mistake:    {match.mistake[0]}: {match.mistake[1]}")
