"""kvhash: the KV-cache block hashes that vLLM computes, computed outside vLLM.

>>> import kvhash
>>> hasher = kvhash.BlockHasher(vllm="0.33.0", algorithm="sha256_cbor", block_size=4, hash_seed="0")
>>> [h.hex() for h in hasher.hash_tokens([1, 2, 3, 4])]
['c9d58ba695280d69b243e1e0df813136ca9196b286fb1a021e0b2e028ef071cb']
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__, backend

if TYPE_CHECKING:
    from ._errors import (
        AlgorithmError,
        DecodeError,
        FeatureNotInReleaseError,
        InvalidBlockSizeError,
        InvalidEncodingError,
        InvalidHashError,
        InvalidJsonError,
        InvalidLoraError,
        InvalidMultimodalError,
        InvalidPromptEmbedsError,
        InvalidRequestError,
        InvalidSaltError,
        InvalidSeedError,
        InvalidTokenError,
        KvHashError,
        LineTooLongError,
        MissingDependencyError,
        TokenizerError,
        UnknownReleaseError,
        UnknownRootError,
        UsageError,
    )
    from .block_hash import (
        BlockHash,
        BlockHashView,
        BlockHashWithGroupId,
        external_hash,
        get_block_hash,
        get_group_id,
        make_block_hash_with_group_id,
        parse_hash,
    )
    from .block_size import (
        BlockSizes,
        resolve_block_sizes,
    )
    from .contract import (
        Contract,
        NewerReleaseWarning,
        Release,
        changes_between,
    )
    from .extra_keys import (
        Lora,
        MultimodalItem,
        PromptEmbeds,
    )
    from .hasher import (
        BlockHasher,
        Chain,
        none_hash,
    )
    from .request import (
        HashRequest,
        answer,
        answer_lines,
        parse_request,
    )

__all__ = [
    "AlgorithmError",
    "BlockHash",
    "BlockHashView",
    "BlockHashWithGroupId",
    "BlockHasher",
    "BlockSizes",
    "Chain",
    "Contract",
    "DecodeError",
    "FeatureNotInReleaseError",
    "HashRequest",
    "InvalidBlockSizeError",
    "InvalidEncodingError",
    "InvalidHashError",
    "InvalidJsonError",
    "InvalidLoraError",
    "InvalidMultimodalError",
    "InvalidPromptEmbedsError",
    "InvalidRequestError",
    "InvalidSaltError",
    "InvalidSeedError",
    "InvalidTokenError",
    "KvHashError",
    "LineTooLongError",
    "Lora",
    "MissingDependencyError",
    "MultimodalItem",
    "NewerReleaseWarning",
    "PromptEmbeds",
    "Release",
    "TokenizerError",
    "UnknownReleaseError",
    "UnknownRootError",
    "UsageError",
    "__version__",
    "answer",
    "answer_lines",
    "backend",
    "changes_between",
    "external_hash",
    "get_block_hash",
    "get_group_id",
    "make_block_hash_with_group_id",
    "none_hash",
    "parse_hash",
    "parse_request",
    "resolve_block_sizes",
]

# Where each public name lives. They are imported when first used, so that a command which needs few starts fast.
_HOMES = {
    "._errors": (
        "AlgorithmError",
        "DecodeError",
        "FeatureNotInReleaseError",
        "InvalidBlockSizeError",
        "InvalidEncodingError",
        "InvalidHashError",
        "InvalidJsonError",
        "InvalidLoraError",
        "InvalidMultimodalError",
        "InvalidPromptEmbedsError",
        "InvalidRequestError",
        "InvalidSaltError",
        "InvalidSeedError",
        "InvalidTokenError",
        "KvHashError",
        "LineTooLongError",
        "MissingDependencyError",
        "TokenizerError",
        "UnknownReleaseError",
        "UnknownRootError",
        "UsageError",
    ),
    ".block_hash": (
        "BlockHash",
        "BlockHashView",
        "BlockHashWithGroupId",
        "external_hash",
        "get_block_hash",
        "get_group_id",
        "make_block_hash_with_group_id",
        "parse_hash",
    ),
    ".block_size": (
        "BlockSizes",
        "resolve_block_sizes",
    ),
    ".contract": (
        "Contract",
        "NewerReleaseWarning",
        "Release",
        "changes_between",
    ),
    ".extra_keys": (
        "Lora",
        "MultimodalItem",
        "PromptEmbeds",
    ),
    ".hasher": (
        "BlockHasher",
        "Chain",
        "none_hash",
    ),
    ".request": (
        "HashRequest",
        "answer",
        "answer_lines",
        "parse_request",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(module, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
