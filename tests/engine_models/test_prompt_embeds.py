"""Prompt embeddings in place of token embeddings: the same rows give the same tokens and share blocks."""

from __future__ import annotations

from typing import Any

import pytest

from kvhash import KvHashError

from .engine import make_engine
from .models import ModelShelf, prompts

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("options", [{}, {"budget": 9}, {"async_scheduling": True}], ids=str)
def test_embeddings_of_tokens_give_their_tokens(
    shelf: ModelShelf, name: str, options: dict[str, Any]
) -> None:
    """A prompt given as the embeddings of its tokens goes on as the tokens do, beside a prompt of tokens."""
    import torch

    engine = make_engine(shelf.folder(name), **options)
    prompt, other = prompts(2, seed=9)
    prompt = prompt * 2
    with torch.inference_mode():
        rows = engine.runner.loaded.model.get_input_embeddings()(torch.tensor(prompt)).clone()
    request = engine.request("e", [0] * len(prompt), prompt_embeds=rows)
    beside = engine.request("t", other)
    engine.run(request, beside)
    assert request.output_token_ids == shelf.generated(name, prompt, 12)
    assert beside.output_token_ids == shelf.generated(name, other, 12)
    again = engine.request("again", [0] * len(prompt), prompt_embeds=rows)
    changed = rows.clone()
    changed[0, 0] += 1.0
    different = engine.request("different", [0] * len(prompt), prompt_embeds=changed)
    engine.run(again, different)
    assert again.num_cached_tokens > 0
    assert again.output_token_ids == request.output_token_ids
    assert different.num_cached_tokens == 0


def test_rows_of_another_width_are_refused(shelf: ModelShelf) -> None:
    """The error says both widths."""
    import torch

    engine = make_engine(shelf.folder("llama"))
    request = engine.request("e", [0] * 3, prompt_embeds=torch.zeros(3, 31))
    with pytest.raises(KvHashError, match=r"31 values.*hidden size is 32"):
        engine.runner.validate(request)
    engine.run(request)
    assert request.error
