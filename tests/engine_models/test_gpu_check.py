"""The GPU check says when there is no GPU, and checks nothing then."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch


def load_check() -> Any:
    """Return tools/gpu_check.py as a module."""
    file = Path(__file__).parents[2] / "tools" / "gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_nothing_is_claimed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 3, a sentence on stderr, and no line for the page."""
    import torch

    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert load_check().main() == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert "no CUDA device" in said.err


def test_the_engine_of_the_check_runs(tmp_path: Path) -> None:
    """Its model and its loop work, here on the CPU, so that a GPU's minutes are not spent on finding out."""
    check = load_check()
    check.make_model(tmp_path, hidden=64, layers=2, heads=8, kv_heads=2, inner=64)
    core, _ = check.engine(tmp_path, num_blocks=64)
    _, outputs = check.run(core, check.random_prompts(3, 40, seed=1), 3)
    assert [len(tokens) for tokens in outputs] == [3, 3, 3]
