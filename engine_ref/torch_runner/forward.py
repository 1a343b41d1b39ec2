"""One forward of the model over a step's tokens: as it is, compiled, or, for decodes, replayed from a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..block import cdiv
from ..spec import MambaSpec
from .attention import AttentionBackend
from .attention_interface import PagedStep
from .errors import UnsupportedModelError
from .families import LayerGroup
from .graphs import DecodeBuffers, DecodeGraphs, record_cuda_graph, record_repeat
from .layout import BatchLayout
from .loading import LoadedModel
from .pages import PagedCache
from .states import plan_states

__all__ = ["Forward", "choose_graphs"]


class Forward:
    """Computes logits. `compile_backend`: of torch.compile, None: not compiled.

    `graphs`: ``"cuda"``: decodes are replayed from CUDA graphs; ``"repeat"``: the same padding and buffers without
    graphs, on any device; ``"off"``. The cache needs a page for padding unless they are off.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        groups: Sequence[LayerGroup],
        backend: AttentionBackend,
        cache: PagedCache,
        *,
        compile_backend: str | None = None,
        graphs: str = "off",
    ) -> None:
        self._groups = tuple(groups)
        self._backend = backend
        self._cache = cache
        self._model: Any = loaded.model
        if compile_backend is not None:
            self._model = torch.compile(loaded.model, backend=compile_backend, dynamic=True)
        self.graphs: DecodeGraphs | None = None
        if graphs != "off":
            sizes = [group.spec.block_size for group in groups]
            longest = int(loaded.config.max_position_embeddings)
            self.graphs = DecodeGraphs(
                self._decode_logits,
                record_repeat if graphs == "repeat" else record_cuda_graph(),
                block_sizes=sizes,
                pages=[cdiv(longest, size) for size in sizes],
                padding=cache.num_blocks - 1,
                device=loaded.device,
            )

    def logits(self, layout: BatchLayout, embeds: torch.Tensor | None, *, plain: bool) -> torch.Tensor:
        """Return the logits of the layout's `logit_index`, (rows, vocabulary), valid until the next call.

        `embeds`: (1, T, hidden) in place of the tokens' own. `plain`: nothing but tokens; no adapter, no embeddings.
        """
        if self.graphs is not None and plain:
            found = self.graphs.run(layout)
            if found is not None:
                return found
        plans: dict[int, Any] = {}
        for number, group in enumerate(self._groups):
            spec = group.spec
            plan: Any
            if isinstance(spec, MambaSpec):
                plan = plan_states(layout, number, block_size=spec.block_size)
            else:
                plan = self._backend.plan(
                    layout, number, block_size=spec.block_size, window=spec.sliding_window
                )
            plans.update(dict.fromkeys(group.layers, plan))
        return self._call(layout.token_ids, layout.positions, layout.logit_index, plans, embeds)

    def _decode_logits(self, buffers: DecodeBuffers) -> torch.Tensor:
        plans: dict[int, Any] = {}
        for number, group in enumerate(self._groups):
            plan = self._backend.plan_decodes(
                buffers, number, block_size=group.spec.block_size, window=group.spec.sliding_window
            )
            plans.update(dict.fromkeys(group.layers, plan))
        return self._call(buffers.token_ids, buffers.positions, buffers.every, plans, None)

    def _call(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_index: torch.Tensor,
        plans: dict[int, Any],
        embeds: torch.Tensor | None,
    ) -> torch.Tensor:
        output = self._model(
            input_ids=token_ids[None] if embeds is None else None,
            inputs_embeds=embeds,
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logit_index,
            paged_step=PagedStep(self._backend, self._cache, plans),
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def choose_graphs(wanted: str | None, *, attention: str, groups: Sequence[LayerGroup]) -> str:
    """Return what `graphs` is where it was left open: CUDA graphs with the Triton kernels, else none.

    Raises UnsupportedModelError for what cannot be.
    """
    has_states = any(isinstance(group.spec, MambaSpec) for group in groups)
    if wanted is None:
        return "cuda" if attention == "triton" and not has_states else "off"
    if wanted not in ("cuda", "repeat", "off"):
        raise UnsupportedModelError(f"unknown graphs {wanted!r}; expected cuda, repeat or off")
    if wanted != "off" and has_states:
        raise UnsupportedModelError("recurrent states are not computed in graphs; use graphs='off'")
    if wanted == "cuda" and attention != "triton":
        raise UnsupportedModelError("CUDA graphs need the Triton kernels; use attention='triton'")
    return wanted
