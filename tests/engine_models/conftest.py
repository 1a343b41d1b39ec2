"""Tests marked ``torch`` need torch and transformers; without them they are skipped, loudly, and counted.

With ``KVHASH_REQUIRE_TORCH=1`` (``make test-engine``) their absence is a failure.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

from .models import ModelShelf

NEEDED = ("torch", "transformers", "safetensors")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "torch: needs torch and transformers (make test-engine)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let torch, transformers and peft announce what they will change."""
    for item in items:
        if item.get_closest_marker("torch") is not None:
            for kind in ("FutureWarning", "DeprecationWarning", "UserWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip or fail a test that needs what is not installed."""
    if item.get_closest_marker("torch") is None:
        return
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not absent:
        import torch

        torch.set_num_threads(1)
        return
    message = f"{', '.join(absent)} not installed: real models are not tested (make test-engine)"
    if os.environ.get("KVHASH_REQUIRE_TORCH") == "1":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> ModelShelf:
    """Return the tiny random models, made on first use."""
    return ModelShelf(tmp_path_factory.mktemp("models"))
