"""Looks at the structure of msgpack without recursion, however deeply it is nested: splits arrays, bounds nesting.

How deep an interpreter can recurse differs from release to release; what is refused must not.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

__all__ = ["bytes_nest_past", "split_array", "split_map", "value_nests_past"]

# Bytes after the first one, for types of fixed size (ext: its type byte included).
_FIXED = {
    **dict.fromkeys((0xC0, 0xC2, 0xC3), 0),
    0xCA: 4,
    0xCB: 8,
    **{0xCC + i: 1 << i for i in range(4)},
    **{0xD0 + i: 1 << i for i in range(4)},
    **{0xD4 + i: (1 << i) + 1 for i in range(5)},
}
# (bytes of the length, what each counted byte adds besides): bin, ext, str.
_SIZED = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_SIZED |= {0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
_CONTAINERS = frozenset((list, dict, tuple))
# (bytes of the length, values per counted item): array, map.
_NESTED = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def split_array(data: bytes) -> list[bytes]:
    """Return the elements of the one msgpack array that `data` is, each as its own bytes.

    Time is linear in the length of `data`. Raises ValueError where it is truncated, malformed or longer.
    """
    count, position = _head(data, 0)
    if count is None:
        raise ValueError("expected an array")
    elements = []
    for _ in range(count):
        end = _skip(data, position)
        elements.append(data[position:end])
        position = end
    if position != len(data):
        raise ValueError("more bytes after the array")
    return elements


def split_map(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of the one map that `data` is, each as its own bytes; raises as `split_array`."""
    count, position = _head(data, 0)
    for _ in range((count or 0) // 2):
        middle = _skip(data, position)
        key = data[position:middle]
        position = _skip(data, middle)
        yield key, data[middle:position]
    if position != len(data):
        raise ValueError("more bytes after the map")


def bytes_nest_past(data: bytes, limit: int) -> bool:
    """Return whether more than `limit` arrays and maps lie within each other, as far as `data` can be read."""
    left, position = [1], 0
    while left:
        if not left[-1]:
            left.pop()
            continue
        left[-1] -= 1
        try:
            count, position = _head(data, position)
        except ValueError:
            return False
        if count is not None:
            if len(left) > limit:
                return True
            left.append(count)
    return False


def value_nests_past(value: Any, limit: int) -> bool:
    """Return the same of a decoded value, faster."""
    level = [value] if type(value) in _CONTAINERS else []
    for _ in range(limit):
        if not level:
            return False
        level = [
            item
            for each in level
            for item in (chain(each, each.values()) if type(each) is dict else each)
            if type(item) in _CONTAINERS
        ]
    return bool(level)


def _head(data: bytes, position: int) -> tuple[int | None, int]:
    """Return how many values the one at `position` holds (None: no container), and where they start."""
    if position >= len(data):
        raise ValueError("truncated")
    first = data[position]
    position += 1
    if 0x80 <= first <= 0x8F:
        return (first & 0x0F) * 2, position
    if 0x90 <= first <= 0x9F:
        return first & 0x0F, position
    if first in _NESTED:
        width, each = _NESTED[first]
        return _number(data, position, width) * each, position + width
    if first <= 0x7F or first >= 0xE0:
        size = 0
    elif 0xA0 <= first <= 0xBF:
        size = first & 0x1F
    elif first in _FIXED:
        size = _FIXED[first]
    elif first in _SIZED:
        width, more = _SIZED[first]
        size = width + more + _number(data, position, width)
    else:
        raise ValueError(f"the byte 0x{first:02x} starts no value")
    if position + size > len(data):
        raise ValueError("truncated")
    return None, position + size


def _number(data: bytes, position: int, width: int) -> int:
    if position + width > len(data):
        raise ValueError("truncated")
    return int.from_bytes(data[position : position + width], "big")


def _skip(data: bytes, position: int) -> int:
    left = 1
    while left:
        count, position = _head(data, position)
        left += (count or 0) - 1
    return position
