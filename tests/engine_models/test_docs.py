"""The page about the engine tells what is there: its example runs, its modules exist, its families are ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .models import ModelShelf

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "engine.md").read_text()


def test_the_example_runs(shelf: ModelShelf, capsys: pytest.CaptureFixture[str]) -> None:
    """With a model's folder for its name it prints eight tokens."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE[PAGE.index("## A few lines") :], flags=re.S)
    exec(code.replace('"my-model"', repr(str(shelf.folder("llama")))), {})
    last = capsys.readouterr().out.splitlines()[-1]
    assert len(re.findall(r"\d+", last)) == 8


def test_what_is_named_is_there() -> None:
    """Every file in the walk exists, and every family of the table is one that loads."""
    from engine_ref.torch_runner import FAMILIES
    from engine_ref.torch_runner.families import VISION_FAMILIES

    for name in re.findall(r"`((?:\w+/)*\w+\.py)`", PAGE):
        folders = (ROOT / "engine_ref", ROOT / "engine_ref" / "torch_runner", ROOT)
        assert any((folder / name).exists() for folder in folders), name
    table = PAGE[PAGE.index("| family") : PAGE.index("float32 and bfloat16. For each")]
    assert set(re.findall(r"`(\w+)`", table)) - {"model_type"} == {*FAMILIES, *VISION_FAMILIES}
