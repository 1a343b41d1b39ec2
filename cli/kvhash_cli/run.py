"""How a command ends: errors as one line on stderr, quiet on a broken pipe, and the exit codes."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from typing import TextIO

import click

from kvhash import KvHashError

__all__ = ["EXIT_CONNECT", "EXIT_DECODE", "EXIT_MISMATCH", "EXIT_USAGE", "run"]

EXIT_MISMATCH = 1
EXIT_USAGE = 2
EXIT_CONNECT = 3
EXIT_DECODE = 4
_EXIT_INTERRUPTED = 130


def _say_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    click.echo(f"warning: {message}", err=True)


def run(command: click.Command, program: str) -> None:
    """Run a click command as the program's whole life; always raises SystemExit."""
    warnings.showwarning = _say_warning
    if not isinstance(sys.stdout, io.TextIOWrapper):
        click.echo(f"{program}: error [io]: stdout is closed", err=True)
        sys.exit(EXIT_USAGE)
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if f"_{program.upper()}_COMPLETE" in os.environ:
            command.main(prog_name=program)  # shell completion
        # Not command.main(): that answers a broken pipe with exit status 1, and `| head` is no fault.
        with command.make_context(program, sys.argv[1:]) as context:
            status = command.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        status = error.exit_code
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        status = _EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone, as with `| head`: that is its right. Python must not complain at exit either.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except KvHashError as error:
        click.echo(f"{program}: error [{error.code}]: {error}", err=True)
        status = EXIT_USAGE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        with contextlib.suppress(OSError):  # what could not be written is not tried again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        click.echo(f"{program}: error [io]: {where}{error.strerror or error}", err=True)
        status = EXIT_USAGE
    sys.exit(status if isinstance(status, int) else 0)
