"""The KV cache's memory: for each layer one tensor of pages, addressed by block id.

A block id is one page in every layer of the group that holds the block; a page that a group does not hold is unused.
Block 0, the null block, is never written: it reads as zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..spec import MambaSpec
from .families import LayerGroup
from .page_moves import PageMover

__all__ = ["KVPages", "PagedCache", "StatePages", "StateShape"]


@dataclass(frozen=True, slots=True)
class StateShape:
    """One layer's recurrent state: the last inputs of its convolution and its matrix, without the page dimension."""

    conv: tuple[int, ...]
    recurrent: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVPages:
    """Keys and values of one attention layer, each (blocks, tokens of a block, KV heads, head size)."""

    keys: torch.Tensor
    values: torch.Tensor

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Return every tensor whose first dimension is the block id."""
        return (self.keys, self.values)


@dataclass(frozen=True, slots=True)
class StatePages:
    """States of one recurrent layer: (blocks, channels, width) and (blocks, heads, key size, value size)."""

    conv: torch.Tensor
    recurrent: torch.Tensor

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Return every tensor whose first dimension is the block id."""
        return (self.conv, self.recurrent)


class PagedCache:
    """The pages of every layer.

    ``head_shapes``: KV heads and head size of each attention layer; ``state_shapes``: of each recurrent layer.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        *,
        num_blocks: int,
        head_shapes: dict[int, tuple[int, int]],
        state_shapes: dict[int, StateShape],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.groups = tuple(groups)
        self.num_blocks = num_blocks
        self.moves = PageMover(device)
        self.layers: dict[int, KVPages | StatePages] = {}

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros((num_blocks, *shape), dtype=dtype, device=device)

        for group in groups:
            for layer in group.layers:
                if isinstance(group.spec, MambaSpec):
                    shape = state_shapes[layer]
                    # The recurrence accumulates over the whole prompt, so its matrix is kept in float32.
                    self.layers[layer] = StatePages(
                        zeros(*shape.conv), zeros(*shape.recurrent, dtype=torch.float32)
                    )
                else:
                    both = torch.zeros(
                        (2, num_blocks, group.spec.block_size, *head_shapes[layer]),
                        dtype=dtype,
                        device=device,
                    )
                    self.layers[layer] = KVPages(both[0], both[1])

    def page_size(self, group: int) -> int:
        """Return the bytes of one page, all layers of the group together."""
        return sum(part[0].nbytes for part in self._parts(group))

    def read_page(self, group: int, block_id: int) -> bytes:
        """Return a block's content in every layer of the group; the layers follow each other."""
        return self.moves.read(self._parts(group), block_id)

    def write_page(self, group: int, block_id: int, page: bytes) -> None:
        """Put back what `read_page` returned; raises ValueError for a page of another size and writes nothing.

        The write may still be under way: `moves.join` comes before the next step.
        """
        if len(page) != self.page_size(group):
            raise ValueError(f"a page of group {group} has {self.page_size(group)} bytes, got {len(page)}")
        self.moves.write(self._parts(group), block_id, page)

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, copy) by id; no copy is the source of another."""
        pairs = list(pairs)
        if not pairs:
            return
        for layer in self.layers.values():
            for part in layer.parts():
                device = part.device
                sources = torch.tensor([source for source, _ in pairs], device=device)
                copies = torch.tensor([copy for _, copy in pairs], device=device)
                part.index_copy_(0, copies, part.index_select(0, sources))

    def drop_nan(self, block_ids: Sequence[int]) -> None:
        """Replace what is no number in these blocks' keys and values.

        A block's owner masks what it has not written, but 0 * NaN is NaN, and an earlier owner may have left that.
        """
        if not block_ids:
            return
        index: torch.Tensor | None = None
        for layer in self.layers.values():
            if not isinstance(layer, KVPages):
                continue
            for part in layer.parts():
                if index is None:
                    index = torch.tensor(block_ids, device=part.device)
                part.index_copy_(0, index, torch.nan_to_num(part.index_select(0, index)))

    def _parts(self, group: int) -> list[torch.Tensor]:
        return [part for layer in self.groups[group].layers for part in self.layers[layer].parts()]
