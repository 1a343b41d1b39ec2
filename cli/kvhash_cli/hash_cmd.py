"""``kvhash hash``: block hashes of a prompt, or of request lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

import click

from kvhash import InvalidRequestError
from kvhash.block_hash import hash_text, json_hash, low64
from kvhash.request import MAX_LINE_BYTES, HashRequest, answer

from .options import (
    open_lines,
    output_option,
    prompt_options,
    read_prompts,
    refuse_prompt,
    request_options,
    settings_of,
    settings_options,
)
from .run import EXIT_USAGE

__all__ = ["hash_"]

SCHEMA_VERSION = 1


@click.command("hash")
@prompt_options
@settings_options
@request_options
@click.option(
    "--jsonl",
    default=None,
    metavar="FILE",
    help="Answer request lines (one JSON object a line); - for stdin.",
)
@click.option(
    "--max-line-bytes",
    type=click.IntRange(min=1),
    default=MAX_LINE_BYTES,
    show_default=True,
    help="With --jsonl: refuse longer lines.",
)
@output_option("text", "jsonl", "hex", "int", "check")
def hash_(output: str, jsonl: str | None, max_line_bytes: int, **options: Any) -> None:
    """Hash a prompt: one line per full block, with its tokens, digest and published 64-bit value.

    Settings left out are vLLM's defaults (latest release, sha256, 16 tokens a block, no PYTHONHASHSEED); with
    --jsonl they fill what a line leaves out. `-o check` writes lines that `kvhash check` reads. Exit status 2 when
    a request was refused; with --jsonl the other lines are answered all the same.

    \b
    Examples:
      kvhash hash --tokens '[1,2,3,4]' --block-size 4 --algorithm sha256_cbor --hash-seed 0
      kvhash hash --chat '[{"role":"user","content":"Hi"}]' --model ./my-model -o int
      kvhash hash --jsonl - < requests.jsonl
    """
    if jsonl is not None:
        if output not in ("text", "jsonl"):
            raise InvalidRequestError("--jsonl answers in request-line form; leave out -o")
        refuse_prompt(options, "--jsonl")
        _answer_lines(jsonl, settings_of(options), max_line_bytes)
        return
    prompts = read_prompts(options)
    settings = settings_of(options)
    requests = [HashRequest.of({**prompt, **settings}) for prompt in prompts]
    for number, request in enumerate(requests):
        if number and output in ("text", "hex", "int"):
            click.echo()
        _print(request, output, str(number))


def _answer_lines(name: str, defaults: dict[str, Any], max_line_bytes: int) -> None:
    from kvhash.events.lines import answer_all_lines  # only here: hashing one prompt needs no events

    refused = answered = 0
    with open_lines(name) as lines:
        for result in answer_all_lines(
            _bounded_lines(lines, max_line_bytes), defaults, max_line_bytes=max_line_bytes
        ):
            click.echo(json.dumps(result, separators=(",", ":")))
            refused += "error" in result
            answered += "error" not in result
    if not answered and not refused:
        raise InvalidRequestError("no request line to answer: the input is empty", code="empty-input")
    if refused:
        click.echo(f"kvhash: {refused} of {refused + answered} request lines refused", err=True)
        raise click.exceptions.Exit(EXIT_USAGE)


def _bounded_lines(lines: BinaryIO, limit: int) -> Iterator[bytes]:
    """Yield lines, of a longer one only the first `limit` + 2 bytes; the rest of it is read past, not kept."""
    most = limit + len(b"\r\n")
    while line := lines.readline(most):
        yield line
        while len(line) == most and not line.endswith(b"\n"):
            line = lines.readline(most)


def _print(request: HashRequest, output: str, identity: str) -> None:
    if output == "jsonl":
        click.echo(json.dumps({"v": SCHEMA_VERSION, **answer(request)}))
        return
    if output == "check":
        release = str(request.hasher().contract.release)  # "latest" would mean another release some day
        click.echo(
            json.dumps(
                {"id": identity, **request.to_json(), "vllm": release, "expect": _expectation(request)}
            )
        )
        return
    chain = request.chain()
    span = chain.hasher.span
    for index, value in enumerate(chain.block_hashes):
        if output == "hex":
            click.echo(f"{value:x}" if isinstance(value, int) else value.hex())
        elif output == "int":
            click.echo(value if isinstance(value, int) else low64(value))
        else:
            shown = hash_text(value)
            click.echo(f"{index:>5}  [{index * span}, {(index + 1) * span})  {shown}")
    left = chain.num_tokens - len(chain) * span
    if output == "text" and (left or not len(chain)):
        click.echo(f"{left} more tokens fill no block", err=True)


def _expectation(request: HashRequest) -> dict[str, Any]:
    chain = request.chain()
    return {
        "none_hash": json_hash(chain.none_hash),
        "block_hashes": [json_hash(value) for value in chain.block_hashes],
    }
