"""From a model folder or hub id to a model whose attention is ours: every fault is said here, none while serving."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from .attention_interface import ATTENTION_NAME
from .errors import CorruptWeightsError, MissingWeightsError, ModelError, UnsupportedModelError
from .families import VISION_FAMILIES, check_config
from .packing import pack_linears

__all__ = ["DTYPES", "LoadedModel", "load_model", "weight_files"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. ``fingerprint``: names the weights and the dtype, so that pages of another differ.

    ``config``: of the language model. ``image_token_id``: stands for an image in a prompt; None: there are no images.
    """

    model: Any
    config: Any
    folder: Path
    dtype: torch.dtype
    device: torch.device
    fingerprint: str
    image_token_id: int | None = None

    @property
    def layers(self) -> Any:
        """The layers of the language model."""
        return getattr(self.model.model, "language_model", self.model.model).layers

    def load_tokenizer(self) -> Any:
        """Return the folder's tokenizer; raises ModelError."""
        try:
            return AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        except Exception as error:
            raise ModelError(f"the tokenizer in {self.folder} cannot be loaded: {error}") from error


def load_model(source: str | Path, *, dtype: str = "float32", device: str = "cpu") -> LoadedModel:
    """Load a model from a folder or a hub id.

    The folder holds config.json and safetensors files; pickled weights are not read. Raises ModelError or one of its
    kinds.
    """
    if dtype not in DTYPES:
        raise UnsupportedModelError(f"unknown dtype {dtype!r}; expected one of: {', '.join(DTYPES)}")
    folder = _folder(source)
    config = _load_config(folder)
    check_config(config)
    files = weight_files(folder)
    where = torch.device(device)
    vision = config.model_type in VISION_FAMILIES
    attention: Any = {"text_config": ATTENTION_NAME, "vision_config": "sdpa"} if vision else ATTENTION_NAME
    try:
        model, info = (AutoModelForImageTextToText if vision else AutoModelForCausalLM).from_pretrained(
            folder,
            config=config,
            dtype=DTYPES[dtype],
            attn_implementation=attention,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"the model in {folder} cannot be loaded: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise MissingWeightsError(
            f"{len(missing)} tensors are in no file of {folder}, the first is {missing[0]}"
        )
    model.eval().requires_grad_(False).to(where)
    if where.type == "cpu":
        pack_linears(model)
    return LoadedModel(
        model,
        config.get_text_config(),
        folder,
        DTYPES[dtype],
        where,
        _fingerprint(config, files, dtype),
        int(config.image_token_id) if vision else None,
    )


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder, each readable.

    Raises MissingWeightsError or CorruptWeightsError.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CorruptWeightsError(f"{index} is not an index of weights: {error}") from None
        files = [folder / name for name in names]
    else:
        files = [folder / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise MissingWeightsError(f"{file} is not there; weights are read from safetensors files only")
        try:
            with safe_open(file, framework="pt") as tensors:
                tensors.keys()
        except (SafetensorError, OSError) as error:
            raise CorruptWeightsError(f"{file} cannot be read: {error}") from None
    return files


def _folder(source: str | Path) -> Path:
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError(f"{source} is a file; expected a folder with config.json and safetensors files")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                str(source), allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
            )
        )
    except (
        Exception
    ) as error:  # no such folder, no such name, or no network: the client has many ways to say so
        raise ModelError(f"there is no folder {source} and it could not be fetched: {error}") from None


def _load_config(folder: Path) -> Any:
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{file} is not there")
    try:
        raw = json.loads(file.read_bytes())
        kind = raw.get("model_type")
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{file} is not a model's configuration: {error}") from None
    check_config(_Raw(kind))
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers validates fields with many kinds of error
        raise ModelError(f"{file} is not a valid configuration of {kind}: {error}") from None


@dataclass(frozen=True, slots=True)
class _Raw:
    model_type: Any


def _fingerprint(config: Any, files: list[Path], dtype: str) -> str:
    """Digest the configuration and, of each weight file, its header, its size and the ends of its data."""
    digest = hashlib.sha256(dtype.encode())
    fields = {key: value for key, value in config.to_dict().items() if not key.startswith("_")}
    fields.pop("transformers_version", None)
    digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as data:
            header = int.from_bytes(data.read(8), "little")
            digest.update(size.to_bytes(8, "little") + data.read(header) + data.read(1 << 20))
            data.seek(max(0, size - (1 << 20)))
            digest.update(data.read())
    return digest.hexdigest()[:32]
