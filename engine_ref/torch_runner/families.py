"""Which model families run, and what each layer of one keeps of the past."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..spec import FullAttentionSpec, GroupSpec, MambaSpec, SlidingWindowSpec
from .errors import UnknownFamilyError, UnsupportedModelError

__all__ = ["FAMILIES", "VISION_FAMILIES", "LayerGroup", "check_config", "group_layers"]

#: ``model_type`` of config.json. The last two are hybrids of linear attention and full attention.
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "qwen3_5_text",
    "qwen3_next",
)

#: Families whose language model is one of these; images come as embeddings of their placeholders.
VISION_FAMILIES = ("llava",)

#: Rotary embeddings whose angles depend on a token's position alone. Others look at the length of the batch's longest
#: sequence, so a cached key would be wrong for the next request.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")

_LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention")


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers that share one KV cache group."""

    spec: GroupSpec
    layers: tuple[int, ...]


def check_config(config: Any) -> None:
    """Raise UnknownFamilyError or UnsupportedModelError for a model that cannot run."""
    family = getattr(config, "model_type", None)
    if family in VISION_FAMILIES:
        if getattr(config, "text_config", None) is not None:
            check_config(config.text_config)
        return
    if family not in FAMILIES:
        raise UnknownFamilyError(
            f"the model family {family!r} is not supported; expected one of: "
            f"{', '.join((*FAMILIES, *VISION_FAMILIES))}",
            at="$.model_type",
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for part in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        kind = part.get("rope_type", "default")
        if kind not in _ROPE_TYPES:
            raise UnsupportedModelError(
                f"rotary embeddings of type {kind!r} depend on the longest sequence of a batch, so their keys cannot "
                f"be cached; expected one of: {', '.join(_ROPE_TYPES)}",
                at="$.rope_parameters.rope_type",
            )
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModelError(
            "bidirectional attention has no prefix to cache", at="$.use_bidirectional_attention"
        )


def group_layers(config: Any, *, block_size: int) -> tuple[LayerGroup, ...]:
    """Return the model's KV cache groups, in the order of their first layers.

    Layers with full attention make one group, those with a sliding window another, those with a recurrent state a
    third.
    """
    groups: dict[GroupSpec, list[int]] = {}
    for layer, kind in enumerate(_layer_types(config)):
        spec: GroupSpec
        if kind == "full_attention":
            spec = FullAttentionSpec(block_size=block_size)
        elif kind == "sliding_attention":
            spec = SlidingWindowSpec(block_size=block_size, sliding_window=int(config.sliding_window))
        else:
            spec = MambaSpec(block_size=block_size)
        groups.setdefault(spec, []).append(layer)
    return tuple(LayerGroup(spec, tuple(layers)) for spec, layers in groups.items())


def _layer_types(config: Any) -> list[str]:
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # one kind for all: Llama, and Mistral, whose early releases have a window
        windowed = config.model_type == "mistral" and getattr(config, "sliding_window", None) is not None
        kinds = ["sliding_attention" if windowed else "full_attention"] * config.num_hidden_layers
    for index, kind in enumerate(kinds):
        if kind not in _LAYER_TYPES:
            raise UnsupportedModelError(f"unknown kind of layer {kind!r}", at=f"$.layer_types[{index}]")
    return list(kinds)
