"""The index's tests pass with the pure Python form and with the native one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvhash._backend import native_module

from ..interop.toolchain import need

ROOT = Path(__file__).parents[2]
#: What needs an index and no more; test_native.py compares the two forms itself.
FILES = ["test_rules.py", "test_recorded.py", "test_model.py", "test_threads.py"]


@pytest.mark.timeout(120)
def test_the_other_form_passes_too() -> None:
    """The form that this run does not use passes the rules, the recordings, the model, and the threads."""
    other = "native" if os.environ.get("KVHASH_BACKEND") == "python" else "python"
    if other == "native" and native_module() is None:
        need("a build of kvhash._native")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not long", "-p", "no:cacheprovider", "--deselect"]
        + [
            "tests/index/test_rules.py::test_a_million_stores_and_removals_leave_memory_flat"
        ]  # runs both itself
        + [f"tests/index/{name}" for name in FILES],
        cwd=ROOT,
        env={**os.environ, "KVHASH_BACKEND": other},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
