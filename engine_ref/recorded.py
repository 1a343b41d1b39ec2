"""Reading a recording's parts: fields of the type they must have, and every error with the place of what is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, overload

from kvhash import KvHashError
from kvhash._errors import InvalidRequestError

__all__ = ["field", "located", "objects"]

_T = TypeVar("_T")
_REQUIRED: Any = object()
_NAMES = {int: "an integer", str: "text", bool: "true or false", list: "a list", dict: "an object"}


@overload
def field(record: Any, name: str, kind: type[_T], *, at: str) -> _T: ...
@overload
def field(record: Any, name: str, kind: type[_T], *, at: str, default: _T) -> _T: ...
def field(record: Any, name: str, kind: type[_T], *, at: str, default: Any = _REQUIRED) -> _T:
    """Return a field of the object at `at`; integers are not negative. Raises InvalidRequestError."""
    if not isinstance(record, Mapping):
        raise InvalidRequestError(f"expected an object, got {type(record).__name__}", at=at)
    value: Any = record.get(name, default)
    if value is _REQUIRED:
        raise InvalidRequestError(f"the recording lacks {name!r}", at=at)
    # bool is an int to Python, and no number here.
    good = value >= 0 if kind is int and type(value) is int else kind is not int and isinstance(value, kind)
    if not good:
        shown = value if kind is int and type(value) is int else type(value).__name__
        expected = _NAMES[kind] + (" of at least 0" if kind is int else "")
        raise InvalidRequestError(f"expected {expected}, got {shown}", at=f"{at}.{name}")
    result: _T = value
    return result


def objects(record: Any, name: str, *, at: str) -> list[tuple[str, dict[str, Any]]]:
    """Return a field that is a list of objects, each with its place."""
    items = [(f"{at}.{name}[{i}]", item) for i, item in enumerate(field(record, name, list, at=at))]
    for place, item in items:
        if not isinstance(item, dict):
            raise InvalidRequestError(f"expected an object, got {type(item).__name__}", at=place)
    return items


@contextlib.contextmanager
def located(at: str, *, root: str) -> Iterator[None]:
    """Give what is raised over the part at `at` that place, unless it has one within the recording at `root`."""
    try:
        yield
    except KvHashError as error:
        if error.at is not None and error.at.startswith(root):
            raise
        place = at + (error.at or "").removeprefix("$")
        raise InvalidRequestError(error.message, at=place, code=error.code) from None
    except KeyError as error:
        raise InvalidRequestError(f"the recording knows no {error}", at=at) from None
    except (TypeError, AttributeError, ValueError, IndexError, AssertionError, ArithmeticError) as error:
        why = str(error) or type(error).__name__
        raise InvalidRequestError(f"the recording cannot be played: {why}", at=at) from error
