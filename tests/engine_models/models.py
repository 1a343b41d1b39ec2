"""Tiny random models of each family, and what transformers itself makes of prompts with them."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

VOCAB = 101
MAX_LEN = 192

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_LEN,
    "tie_word_embeddings": False,
}
_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}

#: Spread of the weights: wide enough that what a token is depends on all tokens before it.
WIDE = 0.35

#: By name: family and what its configuration has beyond the common fields.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 20}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"sliding_window": 20, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0}),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": 20,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3_5": ("qwen3_5_text", _DELTA_NET),
    "qwen3_next": (
        "qwen3_next",
        {
            **_DELTA_NET,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
}
#: For text: as many tokens as the tests' tokenizer has.
TEXT_MODEL = "llama-text"
_BY_NAME = {**MODELS, TEXT_MODEL: ("llama", {"vocab_size": 400})}

#: Those whose caches can take back rejected drafts.
ATTENTION_ONLY = tuple(name for name in MODELS if name not in ("qwen3_5", "qwen3_next"))


class ModelShelf:
    """Makes each model once, into a folder as transformers saves it."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @cache  # noqa: B019  (one shelf a session)
    def folder(self, name: str, width: float = WIDE) -> Path:
        """Return the folder of a model."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        family, options = _BY_NAME[name]
        config = AutoConfig.for_model(family, **{**_COMMON, **options, "initializer_range": width})
        torch.manual_seed(0)
        folder = self._root / f"{name}-{width}"
        AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)
        return folder

    @cache  # noqa: B019
    def reference(self, name: str, width: float = WIDE, dtype: str = "float32") -> Any:
        """Return the model as transformers itself runs it."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(
            self.folder(name, width), attn_implementation="eager", dtype=dtype
        ).eval()

    @cache  # noqa: B019
    def generated(self, name: str, prompt: tuple[int, ...], count: int) -> list[int]:
        """Return what `generate` says, greedily."""
        import torch

        output = self.reference(name).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return [int(token) for token in output[0, len(prompt) :]]


def prompts(count: int = 32, *, longest: int = 60, seed: int = 0) -> list[tuple[int, ...]]:
    """Return prompts of 1 to `longest` tokens; many begin alike, some repeat an n-gram."""
    rng = random.Random(seed)
    stems = [[rng.randrange(VOCAB) for _ in range(longest)] for _ in range(3)]
    made = []
    for index in range(count):
        stem = stems[index % 3][: rng.randrange(longest)]
        tail = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
        made.append(tuple((stem + tail * (1 + index % 2))[-longest:]))
    return made
