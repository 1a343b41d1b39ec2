"""How a step's sequences lie in one row of tokens, and where each token's key and value go.

The tokens of all sequences follow each other in one dimension; no token is padding. Sequences are ordered by their
number of new tokens and then by what they have computed before, so that alike ones are neighbours and can be computed
as one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["BatchLayout", "StepSequence", "lay_out"]


@dataclass(slots=True)
class StepSequence:
    """What one request computes in a step.

    ``start``: tokens computed before. ``token_ids``: the new ones, drafts last. ``tables``: block ids by group.
    ``logit_rows``: how many of the last tokens need logits.
    """

    request_id: str
    start: int
    token_ids: list[int]
    tables: list[list[int]]
    logit_rows: int

    @property
    def count(self) -> int:
        """Number of new tokens."""
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Tokens computed after the step."""
        return self.start + len(self.token_ids)


@dataclass(slots=True)
class BatchLayout:
    """All sequences of a step, B of them with T new tokens in all.

    ``offsets``: index of each sequence's first token, and T at the end. ``token_ids``, ``positions``: (T,).
    ``sequence_of``: (T,), which sequence a token is of. ``logit_index``: tokens whose logits are needed.
    ``tables``: of each group (B, longest table), padded with the null block. ``slots``: of each group (T,), page times
    block size plus place in the page.
    """

    sequences: list[StepSequence]
    offsets: list[int]
    token_ids: torch.Tensor
    positions: torch.Tensor
    sequence_of: torch.Tensor
    logit_index: torch.Tensor
    tables: list[torch.Tensor] = field(default_factory=list)
    slots: list[torch.Tensor] = field(default_factory=list)


def lay_out(
    sequences: Sequence[StepSequence], *, block_sizes: Sequence[int], device: torch.device
) -> BatchLayout:
    """Return the layout of a step; `block_sizes`: of each group."""
    ordered = sorted(sequences, key=lambda sequence: (sequence.count, sequence.start))
    offsets, tokens, logit_index = [0], list[int](), list[int]()
    for sequence in ordered:
        tokens += sequence.token_ids
        offsets.append(len(tokens))
        logit_index += range(len(tokens) - sequence.logit_rows, len(tokens))
    counts = torch.tensor([sequence.count for sequence in ordered])
    starts = torch.tensor([sequence.start for sequence in ordered])
    sequence_of = torch.repeat_interleave(torch.arange(len(ordered)), counts)
    first = torch.tensor(offsets[:-1])
    positions = torch.arange(len(tokens)) + (starts - first)[sequence_of]
    layout = BatchLayout(
        sequences=ordered,
        offsets=offsets,
        token_ids=torch.tensor(tokens).to(device),
        positions=positions.to(device),
        sequence_of=sequence_of.to(device),
        logit_index=torch.tensor(logit_index, dtype=torch.long).to(device),
    )
    for group, block_size in enumerate(block_sizes):
        width = max(len(sequence.tables[group]) for sequence in ordered)
        table = torch.tensor([s.tables[group] + [0] * (width - len(s.tables[group])) for s in ordered])
        slots = table[sequence_of, positions // block_size] * block_size + positions % block_size
        layout.tables.append(table.to(device))
        layout.slots.append(slots.to(device))
    return layout
