"""What can be wrong with a model: each with a stable code, said before the engine starts."""

from __future__ import annotations

from kvhash._errors import KvHashError, UsageError

__all__ = [
    "CorruptWeightsError",
    "MissingWeightsError",
    "ModelError",
    "UnknownAdapterError",
    "UnknownFamilyError",
    "UnsupportedInputError",
    "UnsupportedModelError",
]


class ModelError(KvHashError):
    """A model cannot be loaded or run."""

    code = "model-error"


class UnknownFamilyError(ModelError):
    """The model's family is not one that the engine runs."""

    code = "unknown-model-family"


class UnsupportedModelError(ModelError):
    """The family is known, but this model or setting uses something that the engine does not do."""

    code = "unsupported-model"


class MissingWeightsError(ModelError):
    """A file or a tensor is not there."""

    code = "missing-weights"


class CorruptWeightsError(ModelError):
    """A file is there and cannot be read."""

    code = "corrupt-weights"


class UnknownAdapterError(UsageError):
    """A request names an adapter that is not loaded."""

    code = "unknown-adapter"


class UnsupportedInputError(UsageError):
    """A request brings what the model cannot take."""

    code = "unsupported-input"
