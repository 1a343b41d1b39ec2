"""Every error that kvhash raises, as one tree with stable codes.

::

    KvHashError
    ├── UsageError                        a value that the caller gave cannot be used
    │   ├── UnknownReleaseError           unknown-release
    │   ├── AlgorithmError                unknown-algorithm, algorithm-not-in-release, algorithm-not-reproducible
    │   ├── UnknownRootError              unknown-root
    │   ├── FeatureNotInReleaseError      feature-not-in-release
    │   ├── InvalidRequestError           invalid-request
    │   │   ├── InvalidBlockSizeError     invalid-block-size
    │   │   ├── InvalidTokenError         invalid-token
    │   │   ├── InvalidSeedError          invalid-seed
    │   │   ├── InvalidSaltError          invalid-salt
    │   │   ├── InvalidLoraError          invalid-lora
    │   │   ├── InvalidMultimodalError    invalid-multimodal
    │   │   ├── InvalidPromptEmbedsError  invalid-prompt-embeds
    │   │   └── InvalidHashError          invalid-hash
    │   └── MissingDependencyError        missing-dependency
    ├── TokenizerError                    tokenizer-error
    └── DecodeError                       bytes or text that cannot be read
        ├── InvalidJsonError              invalid-json
        ├── InvalidEncodingError          invalid-utf8
        └── LineTooLongError              line-too-long

A message says what was wrong, where (``at $.multimodal[1].offset``) and what would be right. ``code`` never
changes once released; messages may.
"""

from __future__ import annotations

__all__ = [
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
]


class KvHashError(Exception):
    """Base of every error that kvhash raises on purpose.

    ``code`` is the stable name of the fault; ``at`` is the path of the offending value in the request
    (``$.multimodal[1].offset``) where there is one, else None.
    """

    code: str = "error"

    def __init__(self, message: str, *, at: str | None = None, code: str | None = None) -> None:
        self.message = message
        self.at = at
        if code is not None:
            self.code = code
        super().__init__(str(self))

    def __str__(self) -> str:
        return f"{self.message} - at {self.at}" if self.at else self.message


class UsageError(KvHashError):
    """A value that the caller gave cannot be used."""

    code = "usage"


class UnknownReleaseError(UsageError):
    """The vLLM release is not a version, or is older than the oldest that can be reproduced."""

    code = "unknown-release"


class AlgorithmError(UsageError):
    """The hash algorithm is unknown, not in that release, or cannot be reproduced outside its process."""

    code = "unknown-algorithm"


class UnknownRootError(UsageError):
    """NONE_HASH is random in that release for these settings, so no block hash can be reproduced."""

    code = "unknown-root"


class FeatureNotInReleaseError(UsageError):
    """The request uses something that the release does not have."""

    code = "feature-not-in-release"


class InvalidRequestError(UsageError):
    """A field of a hash request is missing, unknown, or of the wrong type or range."""

    code = "invalid-request"


class InvalidBlockSizeError(InvalidRequestError):
    """A block size, context-parallel size or hash block size is not usable."""

    code = "invalid-block-size"


class InvalidTokenError(InvalidRequestError):
    """A token id is not an integer from 0 to 2^64 - 1."""

    code = "invalid-token"


class InvalidSeedError(InvalidRequestError):
    """The hash seed is not text."""

    code = "invalid-seed"


class InvalidSaltError(InvalidRequestError):
    """The cache salt is not text."""

    code = "invalid-salt"


class InvalidLoraError(InvalidRequestError):
    """The LoRA adapter lacks what the release puts into the key, or has it in the wrong type."""

    code = "invalid-lora"


class InvalidMultimodalError(InvalidRequestError):
    """A multimodal item overlaps another, is out of order, or reaches past the end."""

    code = "invalid-multimodal"


class InvalidPromptEmbedsError(InvalidRequestError):
    """The embedding matrix has too few rows, an unknown dtype, or data of the wrong length."""

    code = "invalid-prompt-embeds"


class InvalidHashError(InvalidRequestError):
    """A text does not read as a block hash."""

    code = "invalid-hash"


class MissingDependencyError(UsageError):
    """An optional package is not installed; the message names the command that installs it."""

    code = "missing-dependency"


class TokenizerError(KvHashError):
    """The tokenizer could not be loaded or could not render the chat."""

    code = "tokenizer-error"


class DecodeError(KvHashError):
    """Bytes or text that cannot be read."""

    code = "decode-error"


class InvalidJsonError(DecodeError):
    """The text is not JSON."""

    code = "invalid-json"


class InvalidEncodingError(DecodeError):
    """The text is not UTF-8."""

    code = "invalid-utf8"


class LineTooLongError(DecodeError):
    """A request line is longer than the limit."""

    code = "line-too-long"
