"""``kvhash diff``: where two prompts, or two lists of hashes, part, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kvhash import InvalidHashError, InvalidRequestError
from kvhash.block_hash import parse_hash
from kvhash.diff import diff_hashes, diff_requests
from kvhash.request import parse_json, parse_request

from .options import output_option, read_value, settings_of, settings_options
from .run import EXIT_MISMATCH

__all__ = ["diff"]


@click.command()
@click.argument("left")
@click.argument("right")
@settings_options
@output_option("text", "jsonl")
def diff(left: str, right: str, output: str, **options: Any) -> None:
    """Compare two request lines, or two lists of hashes: the first diverging block and the likely reason.

    LEFT and RIGHT are JSON, a file, or - for stdin: a request line (an object with tokens), a JSON list of hashes, or
    hashes one a line. Settings fill what a request leaves out. Exit status 1 when they differ.

    \b
    Examples:
      kvhash diff mine.json theirs.json
      kvhash diff '{"tokens":[1,2,3,4],"block_size":4}' '{"tokens":[0,1,2,3],"block_size":4}'
    """
    a, b = _read(left), _read(right)
    if isinstance(a, dict) and isinstance(b, dict):
        defaults = settings_of(options)
        result = diff_requests(parse_request(a, defaults), parse_request(b, defaults))
    elif isinstance(a, list) and isinstance(b, list):
        result = diff_hashes(
            [parse_hash(value, at=f"$[{i}]") for i, value in enumerate(a)],
            [parse_hash(value, at=f"$[{i}]") for i, value in enumerate(b)],
        )
    else:
        raise InvalidRequestError("compare two request lines, or two lists of hashes, not one of each")
    if output == "jsonl":
        click.echo(json.dumps({"v": 1, **result.to_json()}))
    elif result.equal:
        click.echo(f"equal: {result.common_blocks} blocks" + _notes(result.reasons))
    else:
        where = (
            "" if result.first_block is None else f"; the first that differs is block {result.first_block}"
        )
        click.echo(f"differ: {result.common_blocks} leading blocks in common{where}" + _notes(result.reasons))
    if not result.equal:
        raise click.exceptions.Exit(EXIT_MISMATCH)


def _notes(reasons: tuple[tuple[str, str], ...]) -> str:
    return "".join(f"\n  {code}: {message}" for code, message in reasons)


def _read(argument: str) -> Any:
    text: bytes | str = argument
    if not argument.lstrip().startswith(("{", "[")):
        path = argument.removeprefix("@")
        if argument != "-" and (not Path(path).exists() or Path(path).is_dir()):
            raise InvalidRequestError(f"no such file, and no JSON: {argument[:80]}", code="no-such-file")
        text = read_value("-" if argument == "-" else f"@{path}", argument)
    stripped = text.strip()
    if stripped[:1] in (b"{", b"[", "{", "["):
        value = parse_json(text, what=argument if len(argument) < 60 else "the argument")
        if isinstance(value, dict) and "tokens" in value:
            value.pop("expect", None)  # a line of `kvhash hash -o check` is a request line too
        if isinstance(value, dict) and "block_hashes" in value and "tokens" not in value:
            return value["block_hashes"]
        return value
    lines = stripped.split()
    try:
        return [parse_hash(line if isinstance(line, str) else line.decode()) for line in lines]
    except UnicodeDecodeError:
        raise InvalidHashError(f"{argument} holds neither JSON nor hashes") from None
