"""The line programs of every language, each built once from its checked-in sources and lock file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from .lines_program import ROOT
from .toolchain import need

__all__ = ["PROGRAMS", "go", "java", "python", "rust", "typescript"]


def _built(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=800, check=False
    )
    if done.returncode:
        pytest.fail((done.stdout + done.stderr).decode(errors="replace")[-5000:])


@cache
def python() -> list[str]:
    """Return the command-line program, as users run it."""
    return [str(Path(sys.executable).with_name("kvhash")), "hash", "--jsonl", "-"]


@cache
def rust() -> list[str]:
    """Return the crate's program."""
    folder = ROOT / "sdk" / "rust"
    _built([need("cargo"), "build", "--release", "--locked", "--package", "kvhash", "--quiet"], folder)
    return [str(folder / "target" / "release" / "kvhash-lines")]


@cache
def go() -> list[str]:
    """Return the Go module's program."""
    target = ROOT / ".cache" / "go" / "kvhash-lines"
    _built([need("go"), "build", "-o", str(target), "./cmd/kvhash-lines"], ROOT / "sdk" / "go")
    return [str(target)]


@cache
def typescript() -> list[str]:
    """Return the npm package's program."""
    node, npm = need("node"), need("npm")
    folder = ROOT / "sdk" / "typescript"
    _built([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], folder)
    _built([npm, "run", "build"], folder)
    return [node, "sdk/typescript/dist/lines.js"]


@cache
def java() -> list[str]:
    """Return the Java example's program; its unit tests run with the build."""
    java, maven = need("java"), need("mvn")
    folder = ROOT / "examples" / "hasher-java"
    build = [maven, "-q", "-B", "package"]
    # From Maven's local store where that suffices.
    offline = subprocess.run(
        [*build, "-o"], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=800, check=False
    )
    if offline.returncode:
        _built(build, folder)
    return [java, "-jar", "examples/hasher-java/target/hasher.jar"]


#: By the names that the corpus's manifest has.
PROGRAMS: dict[str, Callable[[], list[str]]] = {
    "python": python,
    "rust": rust,
    "go": go,
    "typescript": typescript,
    "java": java,
}
