"""Which code hashes: the native module where it is built, the pure Python definition everywhere else.

``KVHASH_BACKEND=python`` and ``KVHASH_BACKEND=native`` force one; without it the native module is used where it can
be imported. Both give the same values, the same errors and the same messages: what the native module does not take
in as it is (and whatever is wrong) goes through the pure Python checks.
"""

from __future__ import annotations

import importlib
import os
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ._checks import TokenIds, normalize_tokens
from ._errors import MissingDependencyError, UsageError

if TYPE_CHECKING:
    from . import _native
    from .block_hash import ChainValue
    from .contract import Algorithm, Contract
    from .extra_keys import RequestKeys

__all__ = ["backend_name", "make_engine", "native_hint", "native_module", "start_chain", "take_tokens"]

VARIABLE = "KVHASH_BACKEND"


@lru_cache(maxsize=1)
def _import() -> tuple[ModuleType | None, str]:
    """Return the native module, or None and why it cannot be imported."""
    try:
        return importlib.import_module("kvhash._native"), ""
    except ImportError as error:
        return None, str(error)


def native_module() -> Any:
    """Return the native module or None, as the environment says.

    Raises MissingDependencyError where it is forced and not there, UsageError for another value.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted == "python":
        return None
    if wanted not in ("", "native"):
        raise UsageError(f"{VARIABLE} is {wanted!r}; expected 'python' or 'native'")
    module, why = _import()
    if wanted == "native" and module is None:
        raise MissingDependencyError(
            f"{VARIABLE} is 'native', but the native module is not built ({why}); "
            "install Rust and reinstall kvhash, or unset it"
        )
    return module


def backend_name() -> str:
    """Return what computes the hashes in this process: ``"native"`` or ``"python"``."""
    return "python" if native_module() is None else "native"


def native_hint() -> str | None:
    """Return how to get the native module where it is missing and nobody asked for Python; None elsewhere."""
    if native_module() is not None or os.environ.get(VARIABLE):
        return None
    return (
        "the native backend is not built, and pure Python gives the same answers slower; to get it install Rust 1.89 "
        "or newer and run: pip install --force-reinstall --no-deps --no-binary kvhash kvhash"
    )


def make_engine(
    contract: Contract, algorithm: Algorithm, none_hash: ChainValue, span: int, lookahead: int
) -> _native.Engine | None:
    """Return the native engine of a hasher's settings; None where pure Python hashes."""
    module = native_module()
    if module is None:
        return None
    root = none_hash.to_bytes(32, "big") if isinstance(none_hash, int) else bytes(none_hash)
    engine: _native.Engine = module.Engine(
        serialization=algorithm.serialization,
        digest=algorithm.digest,
        low64=algorithm.keeps == "low64",
        chain_values=contract.chain_values,
        none_hash=root,
        span=span,
        lookahead=lookahead,
        lora_key=contract.lora_key,
        multimodal_key=contract.multimodal_key,
        prompt_embeds_key=contract.prompt_embeds_key,
        tagged_keys=contract.tagged_keys,
    )
    return engine


def take_tokens(engine: _native.Engine | None, tokens: TokenIds, *, at: str) -> Any:
    """Return checked token ids in the form that the backend hashes; it has a length.

    Raises InvalidTokenError as `normalize_tokens` does.
    """
    if engine is None:
        return normalize_tokens(tokens, at=at)
    module: Any = _import()[0]  # there, since the engine is its
    taken = module.take_tokens(tokens) if is_plain(tokens) else None
    if taken is None:
        array = as_array(tokens)
        taken = None if array is None else module.take_tokens(array)
    return module.take_tokens(normalize_tokens(tokens, at=at)) if taken is None else taken


def is_plain(tokens: Any) -> bool:
    """Return whether an array's memory is its values: not where some are masked, or are dates."""
    return type(tokens) is list or (
        not hasattr(tokens, "mask") and getattr(getattr(tokens, "dtype", None), "kind", "i") in "iu"
    )


def as_array(tokens: Any) -> Any:
    """Return the NumPy view of a torch tensor on the CPU, which has no buffer of its own; None for anything else."""
    if not (hasattr(tokens, "detach") and hasattr(tokens, "numpy")):
        return None
    try:
        return tokens.detach().numpy()
    except (RuntimeError, TypeError):  # on another device, or of a type that NumPy lacks
        return None


def start_chain(engine: _native.Engine, keys: RequestKeys) -> _native.Chain:
    """Return a native chain with the request's keys."""
    if keys.empty:
        return engine.chain()
    lora, embeds = keys.lora, keys.prompt_embeds
    return engine.chain(
        lora=None if lora is None else (lora.name, lora.path, lora.id),
        cache_salt=keys.cache_salt,
        multimodal=[(item.identifier, item.offset, item.length) for item in keys.multimodal],
        # A row that no machine holds belongs to a matrix without rows.
        prompt_embeds=None if embeds is None else (min(embeds.row_size, (1 << 63) - 1), embeds.data),
    )
