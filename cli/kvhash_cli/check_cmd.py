"""``kvhash check``: expected hashes, checked as ``sha256sum -c`` checks files."""

from __future__ import annotations

import json
from typing import Any

import click

from kvhash import InvalidRequestError
from kvhash.check import check_lines

from .options import open_lines, output_option, settings_of, settings_options
from .run import EXIT_MISMATCH, EXIT_USAGE

__all__ = ["check"]


@click.command()
@click.argument("files", nargs=-1, required=True)
@settings_options
@click.option("--quiet", is_flag=True, help="Say nothing of lines that are right.")
@output_option("text", "jsonl")
def check(files: tuple[str, ...], quiet: bool, output: str, **options: Any) -> None:
    """Check files of expected hashes: request lines with an "expect" object, as `kvhash hash -o check` writes them.

    Each line gives OK or FAILED; one bad line does not stop the rest. Exit status 1 when a hash differs, 2 when a line
    or file could not be read.

    \b
    Example:
      kvhash hash --tokens '[1,2,3,4]' --block-size 4 -o check > expected.jsonl && kvhash check expected.jsonl
    """
    failed = unreadable = total = 0
    defaults = settings_of(options)
    for name in files:
        try:
            lines = open_lines(name)
        except OSError as error:
            click.echo(f"kvhash: {name}: {error.strerror}", err=True)
            unreadable += 1
            continue
        with lines:
            for result in check_lines(lines, defaults):
                total += 1
                failed += not result.ok and result.error is None
                unreadable += result.error is not None
                if quiet and result.ok:
                    continue
                detail = result.detail if result.error is None else f"[{result.error.code}] {result.error}"
                if output == "jsonl":
                    record = {"v": 1, "file": name, "id": result.id, "ok": result.ok, "detail": detail}
                    click.echo(json.dumps(record))
                else:
                    state = "OK" if result.ok else "FAILED" if result.error is None else "UNREADABLE"
                    click.echo(f"{name}: {result.id}: {state}" + (f" ({detail})" if detail else ""))
    if not total and not unreadable:
        raise InvalidRequestError("no line to check: the input is empty", code="empty-input")
    if failed or unreadable:
        click.echo(f"kvhash: {failed} failed, {unreadable} unreadable, of {total} lines", err=True)
        raise click.exceptions.Exit(EXIT_USAGE if unreadable else EXIT_MISMATCH)
