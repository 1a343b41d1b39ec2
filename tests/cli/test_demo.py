"""The demo works as its README says, and fails when a hash differs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from kvhash import BlockHasher

DEMO = Path(__file__).parents[2] / "examples" / "demo"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the demo's main module, with its live part as ``live``."""
    monkeypatch.syspath_prepend(str(DEMO))
    module = importlib.import_module("demo")
    yield module
    for name in ("demo", "live"):
        sys.modules.pop(name, None)


def test_demo_says_what_it_checked_and_ends_well(demo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Three parts, every hash reproduced, exit code 0."""
    assert demo.main() == 0
    shown = capsys.readouterr().out
    for part in ("1. Hashing", "2. Hashing", "3. Starting", "from the chats' own text", "every hash agrees"):
        assert part in shown
    pairs = [line.split() for line in shown.splitlines() if "published hashes reproduced" in line]
    counts = [(words[words.index("of") - 1], words[words.index("of") + 1]) for words in pairs]
    assert len(counts) == 6
    assert all(found == total != "0" for found, total in counts)


def test_demo_fails_on_a_mismatch(
    demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An SDK that hashed with another seed than the engine would be found out."""
    monkeypatch.setattr(
        demo.live, "BlockHasher", lambda **settings: BlockHasher(**{**settings, "hash_seed": "1"})
    )
    assert demo.main() == 1
    assert "hashes differ" in capsys.readouterr().out


def test_demo_fails_when_the_engine_does(
    demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that does not start is a failed demo, in one line."""
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "often")
    assert demo.main() == 1
    assert "the engine did not start" in capsys.readouterr().out
