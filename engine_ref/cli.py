"""The engine's command line: `serve` and `record` run it, `trace` plays recorded operations."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from kvhash._errors import InvalidJsonError, InvalidRequestError, KvHashError, MissingDependencyError

from .record_cmd import record
from .trace import play_trace
from .trace_scheduler import play_run

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """A reference engine that behaves as vLLM's KV cache manager and scheduler do, without a GPU."""


@cli.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
def trace(file: Path) -> None:
    """Play the recorded operations in FILE (- is stdin) and write what was observed, in the same form, to stdout.

    \b
    Example:
      python -m engine_ref trace tests/data/engine/cache_traces.json > observed.json
    """
    record = _read(file)
    for name, play in (("traces", play_trace), ("runs", play_run)):
        items = record.get(name)
        if isinstance(items, list):
            observed = [play(item, at=f"$.{name}[{i}]") for i, item in enumerate(items)]
            break
    else:
        raise InvalidRequestError('expected an object with a list "traces" or "runs"', at="$")
    json.dump({"engine": "engine_ref", name: observed}, sys.stdout, separators=(",", ":"))
    sys.stdout.write("\n")


def _read(file: Path) -> dict[str, Any]:
    data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidJsonError(f"{file} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise InvalidRequestError(f"expected an object, got {type(record).__name__}", at="$")
    return record


def _add_commands() -> None:
    """Add the other commands; where the ``serve`` extra is missing, serving says so."""
    cli.add_command(record)
    try:
        from .serve import serve
    except ImportError as error:
        if error.name not in ("prometheus_client", "starlette", "uvicorn"):
            raise
        missing = error.name

        @cli.command("serve", context_settings={"ignore_unknown_options": True}, add_help_option=False)
        @click.argument("arguments", nargs=-1)
        def unavailable(arguments: tuple[str, ...]) -> None:
            """Serve MODEL over HTTP; needs the serve extra."""
            raise MissingDependencyError(
                f"serving needs {missing}; install it with: pip install 'kvhash[serve]'"
            )
    else:
        cli.add_command(serve)


def main() -> int:
    """Run the command line; returns the exit code."""
    _add_commands()
    try:
        cli(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        click.echo(f"error: {where}{error.strerror or error}", err=True)
        return 2
    except click.exceptions.Exit as done:
        return int(done.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return 130
    except KvHashError as error:
        click.echo(f"error: {error}", err=True)
        return 4 if error.code.startswith("invalid-json") else 2
    return 0
