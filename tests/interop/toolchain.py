"""Programs that only some machines have: a test that needs one fails without it when everything is required."""

from __future__ import annotations

import os
import shutil

import pytest

__all__ = ["need"]


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
