"""Write docs/cli.md from the commands' own help, so that page and program cannot differ (a test compares them)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from kvhash_cli.kvevents import kvevents
from kvhash_cli.main import kvhash

PROGRAMS = {"kvhash": kvhash, "kvevents": kvevents}


def _walk(group: click.Group, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    context = click.Context(group)
    found = [path]
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        found += _walk(command, (*path, name)) if isinstance(command, click.Group) else [(*path, name)]
    return found


def main() -> None:
    """Write the page."""
    parts = ["# Command reference\n\nWritten by `python docs/make_cli_reference.py`.\n"]
    for program, group in PROGRAMS.items():
        for path in _walk(group, (program,)):
            script = str(Path(sys.executable).with_name(path[0]))
            text = subprocess.run(
                [script, *path[1:], "--help"], capture_output=True, text=True, check=True
            ).stdout
            parts.append(f"## {' '.join(path)}\n\n```\n{text.strip()}\n```\n")
    Path(__file__).with_name("cli.md").write_text("\n".join(parts))


if __name__ == "__main__":
    main()
