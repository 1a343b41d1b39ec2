"""Linear layers on the CPU with their weights in the order in which oneDNN reads them.

A step of decodes multiplies a few rows with every weight of the model. PyTorch's own product brings the weight into
its order anew in each call; here that is done once, when the model is loaded. The result is the same but for rounding.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["pack_linears"]


class _PackedLinear(torch.nn.Linear):  # type: ignore[misc]
    """A linear layer whose `weight` only says shape and type, unless it is also the embedding's."""

    packed: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  (PyTorch's name)
        """Return the product, as the layer that this was."""
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            input, self.packed, self.bias, "none", [], ""
        )
        return output


def pack_linears(model: Any) -> int:
    """Pack the weights of a float32 model on the CPU; returns how many: 0 where PyTorch has no oneDNN."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return 0
    embedding = model.get_input_embeddings().weight
    packed = 0
    for module in list(model.modules()):
        if type(module) is not torch.nn.Linear or module.weight.dtype != torch.float32:
            continue
        weight = module.weight
        module.packed = torch.ops.mkldnn._reorder_linear_weight(weight.data, None)
        module.__class__ = _PackedLinear
        if weight is not embedding:
            said = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
            module.weight = torch.nn.Parameter(said, requires_grad=False)
        packed += 1
    return packed
