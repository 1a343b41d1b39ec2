"""Attention over pages in plain PyTorch: the definition, on every device.

Keys and values are gathered from the pages of a sequence and given to `scaled_dot_product_attention`. The Triton
kernels (attention_triton.py) answer the same calls and are held against this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn import functional

from ..block import cdiv
from .graphs import DecodeBuffers
from .layout import BatchLayout
from .pages import KVPages

__all__ = ["AttentionBackend", "PlainAttention"]

#: Elements of a mask at most, unless one sequence alone needs more.
_MASK_LIMIT = 1 << 23


class AttentionBackend(Protocol):
    """Writes keys and values into pages and attends over them."""

    def plan(self, layout: BatchLayout, group: int, *, block_size: int, window: int | None) -> Any:
        """Prepare a step for the layers of one group; `window`: tokens that a token sees, itself included."""
        ...

    def plan_decodes(self, buffers: DecodeBuffers, group: int, *, block_size: int, window: int | None) -> Any:
        """Prepare a step of one token a sequence from buffers, with operations that a CUDA graph can record."""
        ...

    def write(self, keys: torch.Tensor, values: torch.Tensor, pages: KVPages, plan: Any) -> None:
        """Write the new tokens' keys and values, (T, KV heads, head size)."""
        ...

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        pages: KVPages,
        plan: Any,
        *,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Return (T, heads, head size): each token's attention over its sequence up to itself.

        `queries`: (T, heads, head size). `keys`, `values`: of the new tokens, which are written already. `softcap`:
        scores are squeezed into plus and minus that.
        """
        ...


@dataclass(slots=True)
class _Part:
    """Neighbouring sequences with equally many new tokens, computed as one batch.

    ``table``: (sequences, pages), None where nothing was computed before, so that the step has all keys itself.
    ``mask``: (sequences, 1, new tokens, keys), what is added to the scores; None with ``table``.
    """

    first: int
    end: int
    sequences: int
    count: int
    table: torch.Tensor | None
    mask: torch.Tensor | None
    folded: dict[int, torch.Tensor] = field(default_factory=dict)

    def mask_for(self, queries_per_key: int) -> torch.Tensor:
        """Return the mask for queries of which that many heads share a key, (.., heads sharing x new tokens, keys)."""
        assert self.mask is not None
        if queries_per_key not in self.folded:
            self.folded[queries_per_key] = self.mask.repeat(1, 1, queries_per_key, 1)
        return self.folded[queries_per_key]


@dataclass(slots=True)
class _Plan:
    slots: torch.Tensor
    parts: list[_Part]


class PlainAttention:
    """Gather and scaled_dot_product_attention."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._gathered: dict[str, torch.Tensor] = {}

    def plan(self, layout: BatchLayout, group: int, *, block_size: int, window: int | None) -> _Plan:
        """Divide the step into parts and make their masks."""
        parts = [
            self._part(layout, group, first, end, block_size=block_size, window=window)
            for first, end in _runs(layout, block_size, window)
        ]
        return _Plan(layout.slots[group], parts)

    def plan_decodes(
        self, buffers: DecodeBuffers, group: int, *, block_size: int, window: int | None
    ) -> _Plan:
        """Plan one part that gathers every page of the tables, since a graph's shapes cannot follow the sequences."""
        table = buffers.tables[group]
        places = torch.arange(table.shape[1] * block_size, device=table.device)
        visible = places <= buffers.positions[:, None]
        if window is not None:
            visible &= places > buffers.positions[:, None] - window
        mask = torch.zeros(visible.shape, dtype=self._dtype, device=table.device)
        mask.masked_fill_(~visible, float("-inf"))
        part = _Part(0, buffers.size, buffers.size, 1, table, mask[:, None, None])
        return _Plan(buffers.slots(group), [part])

    def write(self, keys: torch.Tensor, values: torch.Tensor, pages: KVPages, plan: _Plan) -> None:
        """Write by slot."""
        for new, paged in ((keys, pages.keys), (values, pages.values)):
            paged.view(-1, *paged.shape[2:]).index_copy_(0, plan.slots, new)

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        pages: KVPages,
        plan: _Plan,
        *,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Attend part by part."""
        heads, size, kv_heads = queries.shape[1], queries.shape[2], keys.shape[1]
        outputs = []
        for part in plan.parts:
            span = slice(part.first, part.end)
            shape = (part.sequences, part.count)
            q = queries[span].view(*shape, heads, size)
            if part.table is None:
                k = keys[span].view(*shape, kv_heads, size)
                v = values[span].view(*shape, kv_heads, size)
            else:
                k = self._gather("keys", pages.keys, part.table)
                v = self._gather("values", pages.values, part.table)
            output = _attend_part(q, k, v, part, scale=scale, softcap=softcap)
            outputs.append(output.reshape(part.end - part.first, heads, size))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _gather(self, kind: str, pages: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Return (sequences, keys, KV heads, head size), in memory that the next layer uses again."""
        rows = pages.view(pages.shape[0], -1)
        count = table.numel() * rows.shape[1]
        memory = self._gathered.get(kind)
        if memory is None or memory.numel() < count or memory.dtype != rows.dtype:
            memory = self._gathered[kind] = torch.empty(count, dtype=rows.dtype, device=rows.device)
        found = memory[:count].view(table.numel(), rows.shape[1])
        torch.index_select(rows, 0, table.flatten(), out=found)
        return found.view(table.shape[0], -1, *pages.shape[2:])

    def _part(
        self, layout: BatchLayout, group: int, first: int, end: int, *, block_size: int, window: int | None
    ) -> _Part:
        sequences = layout.sequences[first:end]
        count = sequences[0].count
        span = (layout.offsets[first], layout.offsets[end])
        if all(s.start == 0 for s in sequences) and (window is None or count <= window):
            return _Part(*span, len(sequences), count, None, None)
        # The first page that any of the new tokens sees, and how many from there.
        skipped = [_skipped_blocks(s.start, block_size, window) for s in sequences]
        width = max(cdiv(s.end, block_size) - skip for s, skip in zip(sequences, skipped, strict=True))
        device = layout.positions.device
        first_block = torch.tensor(skipped, device=device)[:, None]
        index = first_block + torch.arange(width, device=device)
        table = layout.tables[group][first:end]
        beyond = index >= table.shape[1]
        pages = table.gather(1, index.clamp(max=table.shape[1] - 1)).masked_fill(beyond, 0)
        places = first_block * block_size + torch.arange(width * block_size, device=device)
        positions = layout.positions[slice(*span)].view(len(sequences), count, 1)
        visible = places[:, None, :] <= positions
        if window is not None:
            visible &= places[:, None, :] > positions - window
        mask = torch.zeros(visible.shape, dtype=self._dtype, device=device)
        mask.masked_fill_(~visible, float("-inf"))
        return _Part(*span, len(sequences), count, pages, mask[:, None])


def _runs(layout: BatchLayout, block_size: int, window: int | None) -> Iterator[tuple[int, int]]:
    """Yield runs of sequences with equally many new tokens and not too different numbers of pages."""
    first, shortest = 0, 0
    for index, sequence in enumerate(layout.sequences):
        pages = cdiv(sequence.end, block_size) - _skipped_blocks(sequence.start, block_size, window)
        if index > first:
            elements = (index - first + 1) * sequence.count * pages * block_size
            same = (
                sequence.count == layout.sequences[first].count
                and (sequence.start == 0) == (layout.sequences[first].start == 0)
                and pages <= 2 * shortest + 4
                and elements <= _MASK_LIMIT
            )
            if not same:
                yield first, index
                first = index
        if index == first:
            shortest = pages
    yield first, len(layout.sequences)


def _skipped_blocks(start: int, block_size: int, window: int | None) -> int:
    return 0 if window is None else max(0, start - window + 1) // block_size


def _attend_part(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    part: _Part,
    *,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Return (sequences, new tokens, heads, head size); q, k, v: (sequences, tokens, heads, head size)."""
    sequences, count, heads, size = q.shape
    kv_heads = k.shape[2]
    shared = heads // kv_heads
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if part.mask is not None and shared * part.mask.numel() <= _MASK_LIMIT:
        # Heads that share a key become further queries of it; nothing is repeated.
        folded = q.view(sequences, count, kv_heads, shared, size).permute(0, 2, 3, 1, 4)
        folded = folded.reshape(sequences, kv_heads, shared * count, size)
        out = _dot_product(folded, k, v, part.mask_for(shared), scale=scale, softcap=softcap)
        return out.view(sequences, kv_heads, shared, count, size).permute(0, 3, 1, 2, 4)
    if shared > 1:
        k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
    return _dot_product(q.transpose(1, 2), k, v, part.mask, scale=scale, softcap=softcap).transpose(1, 2)


def _dot_product(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attend with `mask` added to the scores; None: causally, queries and keys being the same tokens."""
    if softcap is None:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale
        )
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    if scores.dtype != torch.float64:
        scores = scores.float()
    scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.full(scores.shape[-2:], float("-inf"), device=q.device).triu(1)
    return torch.matmul((scores + mask).softmax(dim=-1).to(v.dtype), v)
