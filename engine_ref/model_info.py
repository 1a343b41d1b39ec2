"""What the engine wants to know of a model before it is loaded, from its ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from kvhash._errors import InvalidRequestError

from .spec import FullAttentionSpec, GroupSpec, SlidingWindowSpec

__all__ = ["ModelInfo"]


@dataclass(frozen=True)
class ModelInfo:
    """What the engine wants to know of a model; read from its ``config.json`` where the model is a folder.

    ``layers``: the kinds of its attention layers with their windows (None: full attention).
    """

    vocab_size: int = 32000
    max_model_len: int = 4096
    eos_token_id: int | None = None
    layers: tuple[int | None, ...] = (None,)

    @classmethod
    def read(cls, model: str) -> ModelInfo:
        """Return what is known of `model`: defaults where it is only a name. Raises InvalidRequestError."""
        path = Path(model).expanduser() / "config.json"
        if not path.is_file():
            return cls()
        try:
            config = json.loads(path.read_bytes())
            config = {**config, **config.get("text_config", {})}
            eos: Any = config.get("eos_token_id")
            info = cls(
                vocab_size=int(config.get("vocab_size", cls.vocab_size)),
                max_model_len=int(config.get("max_position_embeddings", cls.max_model_len)),
                eos_token_id=(eos[0] if eos else None) if isinstance(eos, list) else eos,
                layers=_layers(config),
            )
            info._check()
            return info
        except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise InvalidRequestError(f"{path} is no model configuration: {error}") from None

    def _check(self) -> None:
        """Raise ValueError for numbers that no model has."""
        for name, value, least in (
            ("vocab_size", self.vocab_size, 1),
            ("max_position_embeddings", self.max_model_len, 2),
            ("num_hidden_layers", len(self.layers), 1),
            ("sliding_window", min((w for w in self.layers if w is not None), default=1), 1),
        ):
            if value < least:
                raise ValueError(f"expected a {name} of at least {least}, got {value}")
        if self.eos_token_id is not None and type(self.eos_token_id) is not int:
            raise ValueError(f"expected token ids as eos_token_id, got {self.eos_token_id!r}")

    def groups(self, block_size: int) -> tuple[GroupSpec, ...]:
        """Return the KV cache groups: as many layers in each, of one kind, as vLLM packs them."""
        counts = {kind: self.layers.count(kind) for kind in dict.fromkeys(self.layers)}
        least, most = min(counts.values()), max(counts.values())
        size = most if most < 1.25 * least else least
        return tuple(
            FullAttentionSpec(block_size=block_size)
            if window is None
            else SlidingWindowSpec(block_size=block_size, sliding_window=window)
            for window, count in counts.items()
            for _ in range(ceil(count / size))
        )


def _layers(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    count = min(int(config.get("num_hidden_layers", 1)), 10_000)
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if not isinstance(window, int):
        return (None,) * count
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        return (window,) * count
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
