"""Attention over pages as Triton kernels for CUDA; answers the calls of `PlainAttention`, against which it is tested.

One kernel does prefill and decode: a program computes a tile of queries of one sequence for one key-value head (the
heads that share it are further rows of the tile) and walks over the keys through the block table. Where there are too
few programs to fill the device, the walk is split and a second kernel combines the parts.
"""

# Triton has no types, and its users write a kernel's constants in capitals.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803, N806

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from .graphs import DecodeBuffers
from .layout import BatchLayout
from .pages import KVPages

__all__ = [
    "TritonAttention",
    "attention_kernel",
    "combine_kernel",
    "launch_options",
    "tile_sizes",
    "write_kernel",
]

_MOST_SPLITS = 16


@triton.jit
def write_kernel(new, pages, slots, row_size, row_stride, BLOCK: tl.constexpr):
    """Copy one token's row, (KV heads x head size), to its slot."""
    token = tl.program_id(0)
    slot = tl.load(slots + token).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < row_size
    row = tl.load(new + token.to(tl.int64) * row_stride + columns, mask=inside)
    tl.store(pages + slot * row_size + columns, row, mask=inside)


@triton.jit
def attention_kernel(
    queries,
    key_pages,
    value_pages,
    output,
    part_output,
    part_max,
    part_sum,
    tables,
    tile_sequences,
    tile_firsts,
    offsets,
    starts,
    counts,
    table_width,
    num_tokens,
    scale,
    softcap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Attend for one tile of queries, one key-value head and one split of the keys.

    Tokens are rows of (heads, SIZE). WINDOW 0: none. ROWS: queries of a tile times heads that share a key, rounded up
    to a power of two; KEYS: keys of one step; WIDTH: SIZE rounded up to a power of two.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    SHARED: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = ROWS // SHARED

    sequence = tl.load(tile_sequences + tile)
    first = tl.load(tile_firsts + tile)
    start = tl.load(starts + sequence)
    count = tl.load(counts + sequence)
    offset = tl.load(offsets + sequence)

    rows = tl.arange(0, ROWS)
    query = first + rows // SHARED
    head = kv_head * SHARED + rows % SHARED
    row_ok = (rows < QUERIES * SHARED) & (query < count)
    position = start + query
    columns = tl.arange(0, WIDTH)
    column_ok = columns < SIZE
    place = ((offset + query).to(tl.int64) * HEADS + head) * SIZE
    q = tl.load(
        queries + place[:, None] + columns[None, :], mask=row_ok[:, None] & column_ok[None, :], other=0.0
    )

    last = start + tl.minimum(count, first + QUERIES)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(0, start + first - WINDOW + 1) // KEYS * KEYS
    steps = tl.cdiv(tl.cdiv(last - low, KEYS), SPLITS)
    begin = low + split * steps * KEYS
    end = tl.minimum(last, begin + steps * KEYS)

    most = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    found = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for step in range(begin, end, KEYS):
        keys = step + tl.arange(0, KEYS)
        key_ok = keys < end
        page = tl.load(tables + sequence * table_width + keys // PAGE, mask=key_ok, other=0).to(tl.int64)
        slot = ((page * PAGE + keys % PAGE) * KV_HEADS + kv_head) * SIZE
        k = tl.load(
            key_pages + slot[None, :] + columns[:, None], mask=key_ok[None, :] & column_ok[:, None], other=0.0
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if SOFTCAP:
            # tanh by exp: the part that can overflow goes to infinity, and the quotient to 1 or -1.
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        visible = key_ok[None, :] & (keys[None, :] <= position[:, None])
        if WINDOW > 0:
            visible = visible & (keys[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        shift = tl.where(larger == float("-inf"), 0.0, larger)  # a row that has seen no key yet
        weights = tl.exp(scores - shift[:, None])
        decay = tl.exp(most - shift)
        v = tl.load(
            value_pages + slot[:, None] + columns[None, :],
            mask=key_ok[:, None] & column_ok[None, :],
            other=0.0,
        )
        total = total * decay + tl.sum(weights, 1)
        found = found * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        most = larger

    inside = row_ok[:, None] & column_ok[None, :]
    if SPLITS == 1:
        tl.store(
            output + place[:, None] + columns[None, :],
            (found / tl.where(total > 0.0, total, 1.0)[:, None]).to(output.dtype.element_ty),
            mask=inside,
        )
    else:
        number = (split.to(tl.int64) * num_tokens + offset + query) * HEADS + head
        tl.store(part_output + number[:, None] * SIZE + columns[None, :], found, mask=inside)
        tl.store(part_max + number, most, mask=row_ok)
        tl.store(part_sum + number, total, mask=row_ok)


@triton.jit
def combine_kernel(
    part_output,
    part_max,
    part_sum,
    output,
    num_rows,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Combine the splits of one token's head."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    columns = tl.arange(0, WIDTH)
    column_ok = columns < SIZE
    number = splits.to(tl.int64) * num_rows + row
    most = tl.load(part_max + number)
    weights = tl.exp(most - tl.max(most, 0))  # a split without keys has -inf, so 0
    total = tl.sum(weights * tl.load(part_sum + number), 0)
    parts = tl.load(
        part_output + number[:, None] * SIZE + columns[None, :], mask=column_ok[None, :], other=0.0
    )
    found = tl.sum(weights[:, None] * parts, 0) / total
    tl.store(output + row * SIZE + columns, found.to(output.dtype.element_ty), mask=column_ok)


def tile_sizes(
    *, heads: int, kv_heads: int, size: int, longest: int, element_size: int = 2
) -> tuple[int, int, int]:
    """Return ROWS, KEYS and WIDTH for steps in which a sequence has at most `longest` new tokens.

    `element_size`: bytes of a key's element; with 4 the products are exact ones, for which smaller tiles do.
    """
    shared = heads // kv_heads
    width = max(16, triton.next_power_of_2(size))
    rows = max(16, triton.next_power_of_2(shared * min(longest, 64)))
    rows = max(min(rows, 128 // element_size), triton.next_power_of_2(shared))
    return rows, 32, width


def launch_options(rows: int, *, element_size: int = 2) -> dict[str, int]:
    """Return how a tile of `rows` is launched: with these no register spills on sm_80 and sm_90 (tested)."""
    small = rows <= 16 and element_size < 4
    return {"num_warps": 4, "num_stages": 3} if small else {"num_warps": 8, "num_stages": 2}


@dataclass(slots=True)
class _Plan:
    slots: torch.Tensor
    tables: torch.Tensor
    offsets: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    sequence_counts: list[int]
    longest_key: int
    page: int
    window: int
    tiles: dict[int, tuple[torch.Tensor, torch.Tensor]]

    def tiles_of(self, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each tile's sequence and first query, for tiles of that many queries."""
        if queries not in self.tiles:
            pairs = [(i, q) for i, count in enumerate(self.sequence_counts) for q in range(0, count, queries)]
            both = torch.tensor(pairs, dtype=torch.int32).T.contiguous().to(self.offsets.device)
            self.tiles[queries] = (both[0], both[1])
        return self.tiles[queries]


class _OneTileEach(dict[int, tuple[torch.Tensor, torch.Tensor]]):
    """The tiles of a step of decodes: one a sequence, however many queries a tile may have."""

    def __init__(self, sequences: torch.Tensor, firsts: torch.Tensor) -> None:
        super().__init__()
        self._tiles = (sequences, firsts)

    def __contains__(self, queries: object) -> bool:
        return True

    def __missing__(self, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._tiles


class TritonAttention:
    """The kernels behind the calls of `AttentionBackend`. `splits`: force that many, a power of two (for tests)."""

    def __init__(self, *, splits: int | None = None) -> None:
        self._splits = splits

    def plan(self, layout: BatchLayout, group: int, *, block_size: int, window: int | None) -> _Plan:
        """Move what the kernels read to the device."""
        device = layout.positions.device

        def integers(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32).to(device)

        counts = [sequence.count for sequence in layout.sequences]
        return _Plan(
            slots=layout.slots[group],
            tables=layout.tables[group].to(torch.int32),
            offsets=integers(layout.offsets[:-1]),
            starts=integers([sequence.start for sequence in layout.sequences]),
            counts=integers(counts),
            sequence_counts=counts,
            longest_key=max(sequence.end for sequence in layout.sequences),
            page=block_size,
            window=window or 0,
            tiles={},
        )

    def plan_decodes(
        self, buffers: DecodeBuffers, group: int, *, block_size: int, window: int | None
    ) -> _Plan:
        """Plan a tile a sequence; splits are as many as the longest possible sequence asks for."""
        size, tables = buffers.size, buffers.tables[group]
        every = buffers.every.to(torch.int32)
        zeros = torch.zeros_like(every)
        return _Plan(
            slots=buffers.slots(group),
            tables=tables,
            offsets=every,
            starts=buffers.positions.to(torch.int32),
            counts=torch.ones_like(every),
            sequence_counts=[1] * size,
            longest_key=tables.shape[1] * block_size,
            page=block_size,
            window=window or 0,
            tiles=_OneTileEach(every, zeros),
        )

    def write(self, keys: torch.Tensor, values: torch.Tensor, pages: KVPages, plan: _Plan) -> None:
        """Write by slot."""
        row = keys.shape[1] * keys.shape[2]
        for new, paged in ((keys, pages.keys), (values, pages.values)):
            flat = new.reshape(new.shape[0], row)
            write_kernel[(new.shape[0],)](
                flat, paged, plan.slots, row, flat.stride(0), BLOCK=triton.next_power_of_2(row)
            )

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
        """Attend; with splits where the device would not be filled."""
        queries = queries.contiguous()
        tokens, heads, size = queries.shape
        kv_heads = keys.shape[1]
        rows, step, width = tile_sizes(
            heads=heads,
            kv_heads=kv_heads,
            size=size,
            longest=max(plan.sequence_counts),
            element_size=queries.element_size(),
        )
        sequences, firsts = plan.tiles_of(rows // (heads // kv_heads))
        splits = self._splits or _splits(len(sequences) * kv_heads, plan, step, queries.device)
        output = torch.empty_like(queries)
        part, most, total = output, output, output  # not touched when there is one split
        if splits > 1:
            part = torch.empty((splits, tokens, heads, size), dtype=torch.float32, device=queries.device)
            most = torch.empty((splits, tokens, heads), dtype=torch.float32, device=queries.device)
            total = torch.empty_like(most)
        attention_kernel[(len(sequences), kv_heads, splits)](
            queries,
            pages.keys,
            pages.values,
            output,
            part,
            most,
            total,
            plan.tables,
            sequences,
            firsts,
            plan.offsets,
            plan.starts,
            plan.counts,
            plan.tables.stride(0),
            tokens,
            scale,
            softcap or 0.0,
            HEADS=heads,
            KV_HEADS=kv_heads,
            SIZE=size,
            PAGE=plan.page,
            WINDOW=plan.window,
            SOFTCAP=softcap is not None,
            SPLITS=splits,
            ROWS=rows,
            KEYS=step,
            WIDTH=width,
            **launch_options(rows, element_size=queries.element_size()),
        )
        if splits > 1:
            combine_kernel[(tokens * heads,)](
                part, most, total, output, tokens * heads, SIZE=size, SPLITS=splits, WIDTH=width
            )
        return output


def _splits(programs: int, plan: _Plan, step: int, device: Any) -> int:
    """Return a power of two of splits that gives each multiprocessor two programs, of two steps at least."""
    wanted = 2 * int(torch.cuda.get_device_properties(device).multi_processor_count)
    keys = min(plan.longest_key, plan.window or plan.longest_key)
    most = min(_MOST_SPLITS, max(1, keys // (2 * step)))
    splits = 1
    while splits * 2 <= most and splits * programs < wanted:
        splits *= 2
    return splits
