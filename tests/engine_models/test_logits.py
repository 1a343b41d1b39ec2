"""Logits are those of one plain forward over the whole sequence, on every path."""

from __future__ import annotations

from typing import Any

import pytest

from .engine import make_engine
from .models import ATTENTION_ONLY, MODELS, ModelShelf, prompts

pytestmark = pytest.mark.torch

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked-preempted": {"budget": 21, "num_blocks": 44},
    "async": {"async_scheduling": True},
}


#: Spread of the random weights: logits of a few units, as real models have.
WIDTH = 0.12
#: transformers' default. With more spread its own two attentions differ by some percent in bfloat16.
BFLOAT_WIDTH = 0.02


def watch(runner: Any) -> list[tuple[str, int, Any]]:
    """Return a list that fills with (request, position of the token that has the logits, logits)."""
    seen: list[tuple[str, int, Any]] = []
    forward = runner._forward

    def watched(layout: Any) -> Any:
        logits = forward(layout)
        row = 0
        for sequence in layout.sequences:
            for back in range(sequence.logit_rows, 0, -1):
                seen.append((sequence.request_id, sequence.end - back, logits[row].float().clone()))
                row += 1
        return logits

    runner._forward = watched
    return seen


def whole(model: Any, tokens: list[int]) -> Any:
    """Return the logits of one forward, (tokens, vocabulary)."""
    import torch

    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


def pairs(
    shelf: ModelShelf, name: str, options: dict[str, Any], *, dtype: str = "float32", width: float = WIDTH
) -> list[tuple[Any, Any]]:
    """Return logits of the engine, each with those of the plain forward."""
    engine = make_engine(shelf.folder(name, width), runner_options={"dtype": dtype}, **options)
    seen = watch(engine.runner)
    engine.outputs(prompts(16, seed=1), max_tokens=10)
    model = shelf.reference(name, width, dtype)
    wanted = {request.request_id: whole(model, request.all_token_ids) for request in engine.requests}
    # Of one position the last logits are those that counted: after a refused draft they are computed anew. A
    # request's last token is never computed.
    last = {(i, position): logits for i, position, logits in seen if position < len(wanted[i]) - 1}
    assert len(last) >= 160
    return [(logits, wanted[i][position]) for (i, position), logits in last.items()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_in_float32(shelf: ModelShelf, name: str, mode: str) -> None:
    """Within 1e-4 of the plain forward."""
    found = pairs(shelf, name, MODES[mode])
    assert max(float((logits - right).abs().max()) for logits, right in found) < 1e-4


@pytest.mark.parametrize("name", ATTENTION_ONLY)
def test_logits_with_drafts(shelf: ModelShelf, name: str) -> None:
    """Drafts that are refused leave nothing behind that a later token sees."""
    found = pairs(shelf, name, {"drafts": 3, "budget": 33})
    assert max(float((logits - right).abs().max()) for logits, right in found) < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_logits_in_bfloat16(shelf: ModelShelf, name: str) -> None:
    """Within 1e-2 of the plain forward in bfloat16, relative: the norm of all differences to that of all logits."""
    import torch

    found = pairs(shelf, name, MODES["chunked-preempted"], dtype="bfloat16", width=BFLOAT_WIDTH)
    right = torch.stack([right for _, right in found])
    difference = torch.stack([logits for logits, _ in found]) - right
    assert torch.linalg.norm(difference) < 1e-2 * torch.linalg.norm(right)
