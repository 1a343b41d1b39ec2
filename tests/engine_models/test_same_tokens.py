"""Greedy tokens are those of transformers' `generate`, however the engine comes by them."""

from __future__ import annotations

from typing import Any

import pytest

from .engine import make_engine
from .models import ATTENTION_ONLY, MODELS, ModelShelf, prompts

pytestmark = pytest.mark.torch

COUNT = 12
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-cache": {"enable_caching": False},
    "chunked": {"budget": 19},
    "few-at-once": {"max_num_seqs": 3},
    "preempted": {"num_blocks": 40, "watermark": 0.0},
    "async": {"async_scheduling": True},
    "async-chunked-preempted": {"async_scheduling": True, "budget": 23, "num_blocks": 44},
}
DRAFT_MODES: dict[str, dict[str, Any]] = {
    "drafts": {"drafts": 3},
    "drafts-chunked-preempted": {"drafts": 3, "budget": 21, "num_blocks": 44},
    "drafts-async": {"drafts": 3, "async_scheduling": True},
    "drafts-async-chunked-preempted": {
        "drafts": 2,
        "async_scheduling": True,
        "budget": 25,
        "num_blocks": 46,
    },
}


def check(shelf: ModelShelf, name: str, options: dict[str, Any]) -> Any:
    """Compare 32 prompts and return the engine."""
    if name == "mistral" and "num_blocks" in options:
        options = {**options, "num_blocks": 22}  # a window needs fewer blocks
    engine = make_engine(shelf.folder(name), **options)
    asked = prompts()
    got = engine.outputs(asked, max_tokens=COUNT)
    wanted = [shelf.generated(name, prompt, COUNT) for prompt in asked]
    assert got == wanted
    assert engine.core.scheduler.cache.pool.usage == 0.0
    return engine


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_generate(shelf: ModelShelf, name: str, mode: str) -> None:
    """32 prompts give generate's tokens in every mode, and the mode really happened."""
    engine = check(shelf, name, MODES[mode])
    stats = engine.core.scheduler.cache.stats
    assert (stats.hits + stats.preempted_hits > 0) == (mode != "no-cache")
    preempted = sum(request.num_preemptions for request in engine.requests)
    assert (preempted > 0) == ("preempted" in mode)


@pytest.mark.parametrize("mode", DRAFT_MODES)
@pytest.mark.parametrize("name", ATTENTION_ONLY)
def test_tokens_equal_generate_with_drafts(shelf: ModelShelf, name: str, mode: str) -> None:
    """Drafts change how many tokens a step gives, never which."""
    engine = check(shelf, name, DRAFT_MODES[mode])
    assert engine.longest_result > 1, "no draft was ever accepted"
    preempted = sum(request.num_preemptions for request in engine.requests)
    assert (preempted > 0) == ("preempted" in mode)
