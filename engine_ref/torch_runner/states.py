"""Recurrent layers over pages: transformers' own module, given its states from pages and its results put back there.

A page holds the state after some number of tokens. A sequence goes on from the page of the last token computed before
the step and leaves the new state in the page of its last new token, which is the same one inside a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from ..block import cdiv
from .layout import BatchLayout
from .pages import StatePages, StateShape

__all__ = ["plan_states", "state_shape", "use_paged_states"]


@dataclass(frozen=True, slots=True)
class _StatePart:
    """Neighbouring sequences with equally many new tokens; ``sources`` None: they start from nothing."""

    first: int
    end: int
    sequences: int
    sources: torch.Tensor | None
    targets: torch.Tensor


def state_shape(module: Any) -> StateShape:
    """Return the shape of a gated delta net's state."""
    return StateShape(
        conv=(module.conv_dim, module.conv_kernel_size),
        recurrent=(module.num_v_heads, module.head_k_dim, module.head_v_dim),
    )


def plan_states(layout: BatchLayout, group: int, *, block_size: int) -> list[_StatePart]:
    """Divide a step into parts that one call of the module can compute."""
    device = layout.positions.device

    def page(index: int, tokens: int) -> int:
        return layout.sequences[index].tables[group][cdiv(tokens, block_size) - 1]

    parts = []
    for first, end in _runs(layout):
        indexes, fresh = range(first, end), layout.sequences[first].start == 0
        sources = [page(i, layout.sequences[i].start) for i in indexes if not fresh]
        targets = [page(i, layout.sequences[i].end) for i in indexes]
        parts.append(
            _StatePart(
                layout.offsets[first],
                layout.offsets[end],
                end - first,
                None if fresh else torch.tensor(sources, device=device),
                torch.tensor(targets, device=device),
            )
        )
    return parts


def _runs(layout: BatchLayout) -> Iterator[tuple[int, int]]:
    def kind(index: int) -> tuple[int, bool]:
        return layout.sequences[index].count, layout.sequences[index].start == 0

    first = 0
    for index in range(1, len(layout.sequences) + 1):
        if index == len(layout.sequences) or kind(index) != kind(first):
            yield first, index
            first = index


def use_paged_states(module: Any) -> None:
    """Make a gated delta net take its states from the step's pages."""
    forward: Callable[..., torch.Tensor] = module.forward

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def paged_forward(hidden_states: torch.Tensor, *, paged_step: Any, **options: Any) -> torch.Tensor:
        options.pop("cache", None)
        options.pop("attention_mask", None)
        layer = module.layer_idx
        pages = paged_step.cache.layers[layer]
        outputs = []
        for part in paged_step.plans[layer]:
            hidden = hidden_states[0, part.first : part.end].view(part.sequences, -1, hidden_states.shape[-1])
            states = _BatchStates(pages, part)
            output = forward(hidden, cache=states, attention_mask=None)
            states.store()
            outputs.append(output.reshape(part.end - part.first, -1))
        return torch.cat(outputs)[None]

    module.forward = paged_forward


class _BatchStates:
    """The states of one call, as transformers' modules ask their cache for them."""

    def __init__(self, pages: StatePages, part: _StatePart) -> None:
        self._pages = pages
        self._part = part
        self._conv: torch.Tensor | None = None
        self._recurrent: torch.Tensor | None = None
        if part.sources is not None:
            self._conv = pages.conv.index_select(0, part.sources)
            self._recurrent = pages.recurrent.index_select(0, part.sources)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the last inputs; the module may write into them."""
        return self._conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the matrix."""
        return self._recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        """No: a state cannot go back, which is why drafts are refused."""
        return False

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, *, conv_kernel_size: int, **_: Any
    ) -> torch.Tensor:
        """Return the new inputs with those before them, and keep the last."""
        if self._conv is None:
            full = functional.pad(conv_states, (max(0, conv_kernel_size - conv_states.shape[-1]), 0))
        else:
            full = torch.cat([self._conv, conv_states], dim=-1)
        self._conv = full[..., -conv_kernel_size:]
        return full

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, **_: Any
    ) -> torch.Tensor:
        """Keep the new matrix."""
        self._recurrent = recurrent_states
        return recurrent_states

    def store(self) -> None:
        """Write the states into their pages."""
        for pages, state in ((self._pages.conv, self._conv), (self._pages.recurrent, self._recurrent)):
            assert state is not None
            pages.index_copy_(0, self._part.targets, state.to(pages.dtype))
