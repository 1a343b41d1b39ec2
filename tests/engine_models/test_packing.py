"""Packed linear layers compute what the plain ones do, keep what others read of them, and cost no second copy."""

from __future__ import annotations

from typing import Any

import pytest

from .models import ModelShelf

pytestmark = pytest.mark.torch


def small_model(*, tied: bool, dtype: str = "float32") -> Any:
    """Return a random Llama."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_bias=True,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).eval().requires_grad_(False)


@pytest.mark.parametrize("tied", [False, True])
def test_packed_layers_give_the_same(tied: bool) -> None:
    """Logits of one and of many rows are within rounding; a tied head packs a copy and leaves the embedding."""
    import torch

    from engine_ref.torch_runner.packing import pack_linears

    model = small_model(tied=tied)
    inputs = [torch.randint(0, 50, (1, length)) for length in (1, 3, 70)]
    with torch.inference_mode():
        right = [model(ids, use_cache=False).logits for ids in inputs]
        embedding = model.get_input_embeddings().weight.clone()
        assert pack_linears(model) == 2 * 7 + 1
        assert pack_linears(model) == 0  # once is enough
        for ids, wanted in zip(inputs, right, strict=True):
            torch.testing.assert_close(model(ids, use_cache=False).logits, wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    held = model.model.layers[0].mlp.up_proj.weight
    assert (held.shape, held.untyped_storage().nbytes()) == ((48, 32), 4)


def test_other_dtypes_are_left_alone() -> None:
    """Only float32 is packed."""
    from engine_ref.torch_runner.packing import pack_linears

    assert pack_linears(small_model(tied=False, dtype="bfloat16")) == 0


def test_two_runners_of_one_loaded_model_agree(shelf: ModelShelf) -> None:
    """A loaded model is packed when it is loaded; who uses it next finds it so."""
    from engine_ref.torch_runner import TorchRunner, load_model

    from .engine import make_engine
    from .models import prompts

    loaded = load_model(shelf.folder("llama"))
    asked = prompts(4)
    for _ in range(2):
        runner = TorchRunner(loaded, num_blocks=80, block_size=4)
        engine = make_engine(shelf.folder("llama"), runner=runner)
        assert engine.outputs(asked) == [shelf.generated("llama", prompt, 12) for prompt in asked]
