"""Decode steps replayed as recorded graphs: padded to one of a few batch sizes, in buffers that stay where they are.

A CUDA graph repeats the launches it recorded on the memory they used, so a step of decodes is copied into buffers that
never move and computed with the graph of the next larger batch size. Rows of padding are a sequence of one token in a
page of their own, which nobody reads; the null block stays unwritten.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .layout import BatchLayout

__all__ = ["BATCH_SIZES", "DecodeBuffers", "DecodeGraphs", "Recorded", "record_cuda_graph", "record_repeat"]

_log = logging.getLogger(__name__)

#: Batch sizes that have a graph; larger steps are computed without.
BATCH_SIZES = (1, 2, 4, 8, *range(16, 257, 16))


@dataclass(slots=True)
class DecodeBuffers:
    """What a step of `size` decodes reads, in place.

    ``numbers``: (2 + groups, size): token ids, positions, and the slots of each group. ``tables``: of each group
    (size, pages of the longest sequence), int32. ``every``: 0 to size - 1, the tokens whose logits are needed.
    """

    size: int
    numbers: torch.Tensor
    tables: list[torch.Tensor]
    every: torch.Tensor

    @property
    def token_ids(self) -> torch.Tensor:
        """Token ids, (size,)."""
        return self.numbers[0]

    @property
    def positions(self) -> torch.Tensor:
        """Positions, (size,)."""
        return self.numbers[1]

    def slots(self, group: int) -> torch.Tensor:
        """Return where each token's key and value go, (size,)."""
        return self.numbers[2 + group]


class Recorded(Protocol):
    """A recorded step: `replay` computes `output` anew from what the buffers hold."""

    output: torch.Tensor

    def replay(self) -> None:
        """Compute it once more."""
        ...


class _Repeat:
    """Calls the function again: what a graph does, on a device that has none."""

    def __init__(self, function: Callable[[], torch.Tensor]) -> None:
        self._function = function
        self.output = function().clone()

    def replay(self) -> None:
        self.output.copy_(self._function())


class _CudaGraph:
    def __init__(self, function: Callable[[], torch.Tensor], pool: list[object]) -> None:
        # Kernels are compiled and libraries warmed up before anything is recorded, on a stream that is not the default.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool[0] if pool else None):
            self.output = function()
        if not pool:  # all graphs share the memory of the first
            pool.append(self._graph.pool())

    def replay(self) -> None:
        self._graph.replay()


def record_repeat(function: Callable[[], torch.Tensor]) -> Recorded:
    """Record nothing: replaying calls the function."""
    return _Repeat(function)


def record_cuda_graph() -> Callable[[Callable[[], torch.Tensor]], Recorded]:
    """Return a recorder of CUDA graphs that share one pool of memory."""
    pool: list[object] = []
    return lambda function: _CudaGraph(function, pool)


class DecodeGraphs:
    """The graphs of one runner, each recorded when a step first needs its size.

    `compute`: logits (size, vocabulary) of buffers, with tensor operations alone. `pages`: of the longest sequence, by
    group. `padding`: the page that rows of padding write to. `record`: makes graphs. A size that cannot be recorded
    ends the use of graphs, with a warning: steps are then computed as without.
    """

    def __init__(
        self,
        compute: Callable[[DecodeBuffers], torch.Tensor],
        record: Callable[[Callable[[], torch.Tensor]], Recorded],
        *,
        block_sizes: Sequence[int],
        pages: Sequence[int],
        padding: int,
        device: torch.device,
        sizes: Sequence[int] = BATCH_SIZES,
    ) -> None:
        self._compute = compute
        self._record = record
        self._block_sizes = tuple(block_sizes)
        self._pages = tuple(pages)
        self._padding = padding
        self._device = device
        self._sizes = tuple(sorted(sizes))
        self._graphs: dict[int, tuple[DecodeBuffers, Recorded]] = {}
        self.usable = True
        self.replays = 0

    def size_for(self, layout: BatchLayout) -> int | None:
        """Return the batch size that a step is padded to; None where it is not one decode of each sequence."""
        count = len(layout.sequences)
        if not self.usable or len(layout.offsets) != count + 1 or layout.offsets[-1] != count:
            return None
        if any(s.start == 0 or s.logit_rows != 1 for s in layout.sequences):
            return None
        if any(table.shape[1] > pages for table, pages in zip(layout.tables, self._pages, strict=True)):
            return None
        return next((size for size in self._sizes if size >= count), None)

    def run(self, layout: BatchLayout) -> torch.Tensor | None:
        """Return a step's logits, or None if it must be computed without a graph; valid until the next call."""
        size = self.size_for(layout)
        if size is None:
            return None
        if size not in self._graphs:
            buffers = self._make_buffers(size)
            try:
                self._graphs[size] = buffers, self._record(lambda: self._compute(buffers))
            except RuntimeError as error:
                self.usable = False
                _log.warning(
                    "decode steps run without CUDA graphs: one of %d could not be recorded: %s", size, error
                )
                return None
        buffers, graph = self._graphs[size]
        self._fill(buffers, layout)
        graph.replay()
        self.replays += 1
        return graph.output[: len(layout.sequences)]

    def _make_buffers(self, size: int) -> DecodeBuffers:
        """Return buffers in which every row is padding."""
        numbers = torch.zeros((2 + len(self._pages), size), dtype=torch.long)
        for group, block_size in enumerate(self._block_sizes):
            numbers[2 + group] = self._padding * block_size
        tables = []
        for pages in self._pages:
            table = torch.zeros((size, pages), dtype=torch.int32)
            table[:, 0] = self._padding
            tables.append(table.to(self._device))
        return DecodeBuffers(size, numbers.to(self._device), tables, torch.arange(size, device=self._device))

    def _fill(self, buffers: DecodeBuffers, layout: BatchLayout) -> None:
        count = len(layout.sequences)
        numbers = torch.stack([layout.token_ids, layout.positions, *layout.slots])
        if count < buffers.size:
            padding = torch.zeros(
                (len(numbers), buffers.size - count), dtype=torch.long, device=numbers.device
            )
            for group, block_size in enumerate(self._block_sizes):
                padding[2 + group] = self._padding * block_size
            numbers = torch.cat([numbers, padding], dim=1)
        buffers.numbers.copy_(numbers, non_blocking=True)
        for target, table in zip(buffers.tables, layout.tables, strict=True):
            target.zero_()
            target[:count, : table.shape[1]].copy_(table, non_blocking=True)
            target[count:, 0] = self._padding
