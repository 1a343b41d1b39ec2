"""Real Hugging Face models on the engine: their KV in pages, on the CPU or on CUDA. Needs `kvhash[engine]`.

Nothing else in `engine_ref` imports torch. Read in the order of docs/engine.md.
"""

from __future__ import annotations

from kvhash._errors import MissingDependencyError

try:
    import safetensors  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(
        f"running a model needs torch, transformers and safetensors ({error}); pip install 'kvhash[engine]'"
    ) from None

from .errors import (
    CorruptWeightsError,
    MissingWeightsError,
    ModelError,
    UnknownAdapterError,
    UnknownFamilyError,
    UnsupportedModelError,
)
from .families import FAMILIES
from .images import Image
from .loading import LoadedModel, load_model
from .runner import TorchRunner

__all__ = [
    "FAMILIES",
    "CorruptWeightsError",
    "Image",
    "LoadedModel",
    "MissingWeightsError",
    "ModelError",
    "TorchRunner",
    "UnknownAdapterError",
    "UnknownFamilyError",
    "UnsupportedModelError",
    "load_model",
]
