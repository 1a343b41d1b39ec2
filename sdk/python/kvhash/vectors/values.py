"""Preimages as JSON, with object identity said: what the serialization vectors are made of.

========================  ===================================================
JSON                      value
========================  ===================================================
``null``                  None
``{"int": "<decimal>"}``  an integer
``{"text": "..."}``       text, a fresh object at every place
``{"bytes": "<hex>"}``    bytes, a fresh object at every place
``[...]``                 a tuple
``{"same": n, "text"}``   the one object number n, wherever it stands
``{"tokens": spec}``      a tuple of generated token ids (see ``inputs``)
``{"repeat": .., ..}``    ``{"repeat": "ab", "count": n}`` as text
========================  ===================================================
"""

from __future__ import annotations

from typing import Any

from kvhash.serialize import Ref, Value

from .inputs import tokens
from .plain import fresh

__all__ = ["from_json", "plain_from_json"]


def from_json(value: Any, same: dict[int, Ref] | None = None) -> Value:
    """Return the preimage that a JSON value describes, as `kvhash.serialize` takes it."""
    objects: dict[int, Ref] = {} if same is None else same
    if isinstance(value, list):
        return tuple(from_json(item, objects) for item in value)
    if isinstance(value, dict) and "same" in value:
        return objects.setdefault(value["same"], Ref(value["text"]))
    result = _scalar(value)
    assert isinstance(result, (type(None), int, str, bytes, tuple))
    return result


def plain_from_json(value: Any, same: dict[int, str] | None = None) -> Any:
    """Return the same in Python's own values, identities as objects, for `pickle` and `cbor2`."""
    objects: dict[int, str] = {} if same is None else same
    if isinstance(value, list):
        return tuple(plain_from_json(item, objects) for item in value)
    if isinstance(value, dict) and "same" in value:
        return objects.setdefault(value["same"], value["text"])
    return _scalar(value)


def _scalar(value: Any) -> Any:
    if value is None:
        return None
    if "int" in value:
        return int(value["int"])
    if "bytes" in value:
        return bytes(bytearray.fromhex(value["bytes"]))
    if "repeat" in value:
        return fresh(value["repeat"] * value["count"])
    if "tokens" in value:
        spec = value["tokens"]
        return tuple(tokens(spec["seed"], spec["count"], spec["vocabulary"]))
    return fresh(value["text"])
