"""Fixtures that several layers share."""

from __future__ import annotations

from pathlib import Path

import pytest

from .tokenizer_files import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a real tokenizer with a BOS and a chat template."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
