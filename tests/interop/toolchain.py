"""Programs that only some machines have: a test that needs one fails without it when everything is required."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["cargo", "need"]


def need(*names: str) -> str:
    """Return the path of the first of these programs that is installed.

    Without any the test is skipped, saying so; with ``KVHASH_REQUIRE_ALL=1`` it fails.
    """
    for name in names:
        found = shutil.which(name)
        if found:
            return found
    missing = f"{' or '.join(names)} is not installed"
    if os.environ.get("KVHASH_REQUIRE_ALL") == "1":
        pytest.fail(missing)
    pytest.skip(missing)


def cargo(folder: Path, *arguments: str, timeout: float = 800) -> None:
    """Run cargo in a crate's folder; fails with the end of what it said where it does not end well."""
    done = subprocess.run(
        [need("cargo"), *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
