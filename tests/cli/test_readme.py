"""The README says what the programs print."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^\$ (kv(?:hash|events) .*)\n((?:(?!\$ |```).*\n)+)", README, re.M)


def test_the_python_example_prints_what_the_readme_shows() -> None:
    """The ten lines work and their output is the one shown."""
    code, shown = re.findall(r"```python\n(.*?)```\s*```\n(.*?)```", README, re.S)[0]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {})
    assert out.getvalue() == shown


@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_the_commands_print_what_the_readme_shows(command: str, shown: str) -> None:
    """Each command that the README shows with its output prints just that."""
    program, *arguments = shlex.split(command)
    done = subprocess.run(
        [str(Path(sys.executable).with_name(program)), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == shown


def test_the_readme_starts_with_the_two_commands_and_is_short() -> None:
    """`make demo` and `make test` come first; the rest of the pages are in docs."""
    assert README.index("make demo") < README.index("make test") < README.index("## ")
    assert len(README.splitlines()) < 200
    assert len(COMMANDS) >= 4
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
