"""The one place where tokens, text and integers from outside are checked and normalised.

Token ids: an ``int`` from 0 to 2^64 - 1. NumPy integers (and anything else with ``__index__``) become ``int``,
because pickle writes a NumPy integer quite differently and vLLM never hashes one. ``bool`` is refused although
Python calls it an integer: ``True`` among token ids is a mistake, and pickle would write it as another opcode.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, TypeAlias

from ._errors import InvalidRequestError, InvalidTokenError

__all__ = ["MAX_TOKEN", "TokenIds", "check_fields", "check_int", "check_text", "normalize_tokens"]

#: Token ids as a caller may give them: a sequence of ints, an ``array``, a 1-D NumPy array or torch tensor.
TokenIds: TypeAlias = "Sequence[int] | Iterable[SupportsIndex] | Any"

MAX_TOKEN = (1 << 64) - 1


def _token_fault(value: object, at: str) -> InvalidTokenError:
    shown = repr(value)
    if len(shown) > 40:
        shown = shown[:37] + "..."
    return InvalidTokenError(
        f"expected a token id, an integer from 0 to 2^64 - 1, got {shown} ({type(value).__name__})", at=at
    )


def normalize_tokens(tokens: TokenIds, *, at: str = "$.tokens") -> list[int]:
    """Return the token ids as a list of plain ints.

    `tokens` is a list, tuple, ``array.array``, 1-D integer NumPy array or torch tensor, or any iterable of
    integers. Raises InvalidTokenError naming the first bad one.
    """
    if isinstance(tokens, (str, bytes, bytearray, Mapping)):
        raise InvalidTokenError(f"expected a list of token ids, got {type(tokens).__name__}", at=at)
    values: Any = tokens
    if not isinstance(values, (list, tuple)):
        dimensions = getattr(values, "ndim", 1)
        if dimensions != 1:
            raise InvalidTokenError(f"expected one dimension of token ids, got {dimensions}", at=at)
        to_list = getattr(values, "tolist", None)
        try:
            values = to_list() if callable(to_list) else list(values)
        except TypeError:
            raise InvalidTokenError(
                f"expected a list of token ids, got {type(tokens).__name__}", at=at
            ) from None
    kinds = set(map(type, values))
    if kinds - {int}:
        values = [_index(value, f"{at}[{i}]") for i, value in enumerate(values)]
    if values and (min(values) < 0 or max(values) > MAX_TOKEN):
        i, bad = next((i, value) for i, value in enumerate(values) if not 0 <= value <= MAX_TOKEN)
        raise _token_fault(bad, f"{at}[{i}]")
    return list(values)


def _index(value: object, at: str) -> int:
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        raise _token_fault(value, at)
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise _token_fault(value, at) from None


def check_text(
    value: object, *, at: str, what: str, error: type[InvalidRequestError] = InvalidRequestError
) -> str:
    """Return `value` if it is text that UTF-8 can carry; raises `error` otherwise."""
    if not isinstance(value, str):
        raise error(f"expected {what} as text, got {type(value).__name__}", at=at)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise error(f"{what} holds a lone surrogate, which UTF-8 cannot carry", at=at) from None
    return value


def check_int(
    value: object,
    *,
    at: str,
    what: str,
    minimum: int,
    maximum: int = (1 << 63) - 1,
    error: type[InvalidRequestError] = InvalidRequestError,
) -> int:
    """Return `value` as an int if it is an integer from `minimum` to `maximum`, not a bool; else raise `error`."""
    try:
        boolean = type(value).__name__ in ("bool_", "bool")
        number = operator.index(None if boolean else value)  # type: ignore[arg-type]
    except TypeError:  # a NumPy array has `__index__` too
        raise error(f"expected {what} as an integer, got {type(value).__name__}", at=at) from None
    if not minimum <= number <= maximum:
        shown = "a smaller one" if number < minimum else "a larger one"
        if abs(number) < 1 << 70:
            shown = str(number)
        limit = f"from {minimum} to {maximum}"
        if maximum == (1 << 63) - 1:
            limit = f"of at least {minimum}" if number < minimum else "of at most 2^63 - 1"
        raise error(f"expected {what}, an integer {limit}, got {shown}", at=at)
    return number


def check_fields(
    value: object,
    *,
    at: str,
    allowed: Iterable[str],
    error: type[InvalidRequestError] = InvalidRequestError,
) -> Mapping[str, Any]:
    """Return `value` if it is a mapping with no key outside `allowed`; raises `error` naming the first other one."""
    if not isinstance(value, Mapping):
        raise error(f"expected an object, got {type(value).__name__}", at=at)
    names = tuple(allowed)
    for key in value:
        if key not in names:
            raise error(f"unknown field {key!r}; expected one of: {', '.join(names)}", at=at)
    return value
