"""Where transformers calls us: its attention interface, with the step's pages passed through the model's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from .attention import AttentionBackend
from .errors import ModelError
from .pages import KVPages, PagedCache

__all__ = ["ATTENTION_NAME", "PagedStep"]

ATTENTION_NAME = "kvhash_paged"


@dataclass(slots=True)
class PagedStep:
    """What a layer needs of the step: the backend, the pages, and the plan of each layer's group."""

    backend: AttentionBackend
    cache: PagedCache
    plans: dict[int, Any]

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Write the new keys and values, then attend."""
        pages, plan = self.cache.layers[layer], self.plans[layer]
        assert isinstance(pages, KVPages)
        self.backend.write(keys, values, pages, plan)
        return self.backend.attend(queries, keys, values, pages, plan, scale=scale, softcap=softcap)


# Not compiled: pages are found and written by shapes that change with every step.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    paged_step: PagedStep | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Answer transformers' call: q, k, v are (1, heads, T, head size), the answer is (1, T, heads, head size)."""
    if paged_step is None:
        raise ModelError("this model attends over the engine's pages; it cannot be called without a step")
    output = paged_step.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=module.head_dim**-0.5 if scaling is None else scaling,
        softcap=softcap,
    )
    return output[None], None


AttentionInterface.register(ATTENTION_NAME, _paged_attention)
