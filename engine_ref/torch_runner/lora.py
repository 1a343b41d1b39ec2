"""LoRA adapters in PEFT's format, several in one step: each adds its product to the rows of its own requests."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from .errors import CorruptWeightsError, MissingWeightsError, UnknownAdapterError, UnsupportedModelError

__all__ = ["LoraAdapters"]

_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class _Weights:
    """One module's adapter: (rank, inputs), (outputs, rank)."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float


class LoraAdapters:
    """The adapters of one model. `use` says which rows of the next forward belong to which."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._names: set[str] = set()
        self._weights: dict[str, dict[str, _Weights]] = {}  # by module, then by adapter
        self._rows: list[tuple[str, torch.Tensor]] = []

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def check(self, name: str) -> None:
        """Raise UnknownAdapterError unless the adapter is loaded."""
        if name not in self._names:
            known = ", ".join(sorted(self._names)) or "none is loaded"
            raise UnknownAdapterError(f"there is no adapter {name!r}; loaded: {known}", at="$.lora")

    def load(self, name: str, folder: str | Path) -> None:
        """Load a PEFT folder (adapter_config.json, adapter_model.safetensors) under a name, replacing one of that name.

        Raises MissingWeightsError, CorruptWeightsError or UnsupportedModelError; then nothing has changed.
        """
        config = _read_config(Path(folder))
        file = Path(folder) / "adapter_model.safetensors"
        if not file.is_file():
            raise MissingWeightsError(f"{file} is not there")
        try:
            tensors = load_file(file)
        except (SafetensorError, OSError) as error:
            raise CorruptWeightsError(f"{file} cannot be read: {error}") from None
        scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
        found = {path: self._module_weights(tensors, path, scale, file) for path in _paths(tensors, file)}
        if not found:
            raise MissingWeightsError(f"{file} holds no lora_A and lora_B")
        for weights in self._weights.values():
            weights.pop(name, None)
        for path, module_weights in found.items():
            if path not in self._weights:
                self._weights[path] = {}
                self._add_hook(path)
            self._weights[path][name] = module_weights
        self._names.add(name)

    def use(self, rows: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Say which rows of the next forward each adapter is for."""
        device = next(self._model.parameters()).device
        self._rows = [(name, torch.tensor(index, device=device)) for name, index in rows]

    def _module_weights(self, tensors: dict[str, Any], path: str, scale: float, file: Path) -> _Weights:
        try:
            module = self._model.get_submodule(path)
        except AttributeError:
            raise UnsupportedModelError(f"{file} adapts {path}, which the model does not have") from None
        dense = isinstance(module, torch.nn.Linear) and (".self_attn." in path or ".mlp." in path)
        if not dense or ".experts." in path:
            raise UnsupportedModelError(
                f"{file} adapts {path}; expected linear layers of attention and dense MLP"
            )
        pair = []
        for part, side in (("lora_A", 1), ("lora_B", 0)):
            tensor = tensors.get(f"{_PREFIX}{path}.{part}.weight")
            if tensor is None:
                raise MissingWeightsError(f"{file} has no {part} for {path}")
            if tensor.ndim != 2 or tensor.shape[side] != module.weight.shape[side]:
                raise UnsupportedModelError(
                    f"{file}: {part} of {path} is {tuple(tensor.shape)}, the layer {tuple(module.weight.shape)}"
                )
            pair.append(tensor.to(module.weight.device, module.weight.dtype))
        return _Weights(pair[0], pair[1], scale)

    def _add_hook(self, path: str) -> None:
        weights = self._weights[path]

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def add(_: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            for name, index in self._rows:
                adapter = weights.get(name)
                if adapter is not None:
                    rows = inputs[0][0].index_select(0, index)
                    output[0].index_add_(0, index, (rows @ adapter.down.T) @ adapter.up.T * adapter.scale)
            return output

        self._model.get_submodule(path).register_forward_hook(add)


def _paths(tensors: dict[str, Any], file: Path) -> list[str]:
    paths: dict[str, None] = {}
    for key in tensors:
        path, _, kind = key.removeprefix(_PREFIX).rpartition(".lora_")
        if not key.startswith(_PREFIX) or kind not in ("A.weight", "B.weight"):
            raise UnsupportedModelError(
                f"{file} holds {key}; expected lora_A and lora_B of linear layers only"
            )
        paths[path] = None
    return list(paths)


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "adapter_config.json"
    if not file.is_file():
        raise MissingWeightsError(f"{file} is not there; expected a folder as PEFT saves it")
    try:
        config = json.loads(file.read_bytes())
        kind, rank, alpha = config["peft_type"], config["r"], config["lora_alpha"]
        usable = kind == "LORA" and type(rank) is int and rank > 0 and alpha > 0
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptWeightsError(f"{file} is not an adapter's configuration: {error}") from None
    if not usable:
        raise UnsupportedModelError(
            f"{file}: expected a LORA adapter with r and lora_alpha, got {kind}, {rank}, {alpha}"
        )
    for name, plain in (("use_dora", False), ("bias", "none")):
        if config.get(name) not in (plain, None):
            raise UnsupportedModelError(
                f"{file}: {name} is {config[name]!r}; expected {plain!r}", at=f"$.{name}"
            )
    for name in ("rank_pattern", "alpha_pattern", "modules_to_save"):
        if config.get(name):
            raise UnsupportedModelError(f"{file}: {name} is not supported", at=f"$.{name}")
    return dict(config)
