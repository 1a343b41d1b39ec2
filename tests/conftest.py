"""Fixtures that several layers share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from .tokenizer_files import make_tokenizer

# How long a machine takes is no fault of what is tested.
settings.register_profile("kvhash", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvhash")


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a real tokenizer with a BOS and a chat template."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
