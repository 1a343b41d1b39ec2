"""The JSON Schema (2020-12) of every file of the corpus, each complete in itself."""

from __future__ import annotations

import json
from typing import Any

from .load import REQUEST_KINDS

__all__ = ["schema_files"]

_TEXT = {"type": "string"}
_HEX = {"type": "string", "pattern": "^([0-9a-f]{2})*$"}
_DECIMAL = {"type": "string", "pattern": "^-?(0|[1-9][0-9]*)$"}
_RELEASE = {"type": "string", "pattern": "^[0-9]+\\.[0-9]+\\.[0-9]+$"}
_COUNT = {"type": "integer", "minimum": 0}
_ID = {"type": "string", "pattern": "^[a-z_]+/[A-Za-z0-9._-]+/[0-9.]+$"}
_CODES = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"codes": {"type": "array", "minItems": 1, "items": _TEXT}},
            "required": ["codes"],
            "additionalProperties": False,
        }
    },
    "required": ["error"],
    "additionalProperties": False,
}


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": sorted(required),
        "additionalProperties": False,
        **more,
    }


def _list(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def _either(*schemas: Any) -> dict[str, Any]:
    return {"anyOf": list(schemas)}


_CHAIN_VALUE = _either(_HEX, _object({"int": _DECIMAL}))
_ANSWER = _object(
    {
        "none_hash": _CHAIN_VALUE,
        "block_hashes": _list(_CHAIN_VALUE),
        "external": _list(_DECIMAL),
        "extra_keys": _list({"type": ["array", "null"]}),
    }
)
_GENERATE = _object({"generate": _object({"seed": _TEXT, "count": _COUNT, "vocabulary": _COUNT})})
# A request may hold wrong values on purpose, so only its shape is fixed here.
_REQUEST = {"type": "object", "not": {"required": ["vllm"]}}
_WRONG = {"type": "object", "additionalProperties": _TEXT, "propertyNames": {"pattern": "^[a-z0-9-]+$"}}
_FACT = {"type": "object"}

_REQUEST_INPUT = _either(
    _object({"request": _REQUEST, "vllm": _list(_TEXT)}),
    _object({"line": _TEXT, "vllm": _list(_TEXT, maxItems=0)}),
)
_REQUEST_REST: tuple[dict[str, Any], dict[str, Any]] = (
    {"input": _REQUEST_INPUT, "expected": _either(_ANSWER, _CODES)},
    {
        "accepted": _list(_ANSWER, minItems=2),
        "serialized": _list(_HEX),
        "serialized_root": _HEX,
        "wrong": _WRONG,
        "published": _list(_TEXT),
        "provenance": _TEXT,
    },
)
_KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **dict.fromkeys(REQUEST_KINDS, _REQUEST_REST),
    "serialization": (
        {
            "input": _object({"serialization": {"enum": ["cbor", "pickle5"]}, "value": {}}),
            "serialized_length": _COUNT,
            "digests": _object({"sha256": _HEX, "xxh3_128": _HEX}),
        },
        {"serialized": _HEX},
    ),
    "external": (
        {
            "input": _either(_object({"digest": _HEX}, {"group_id": _COUNT}), _object({"int": _DECIMAL})),
            "expected": _object(
                {}, {"uint64": _DECIMAL, "int64": _DECIMAL, "bytes": _HEX, "with_group_id": _HEX}
            ),
        },
        {"wrong": _WRONG},
    ),
    "block_size": (
        {
            "input": _either(
                _object({"hashes": _list(_CHAIN_VALUE), "factor": _COUNT}),
                _object(
                    {
                        "groups": _list(_COUNT),
                        "hash_block_size": {"type": ["integer", "null"]},
                        "decode_context_parallel_size": _COUNT,
                        "unscaled_groups": _list(_COUNT),
                    }
                ),
            ),
            "expected": _either(
                _object({"hashes": _list(_CHAIN_VALUE)}),
                _object({"groups": _list(_COUNT), "hash_block_size": _COUNT, "scheduler_block_size": _COUNT}),
                _CODES,
            ),
        },
        {},
    ),
    "accumulated": (
        {
            "input": _object(
                {
                    "algorithm": _TEXT,
                    "vllm": _list(_RELEASE, minItems=1),
                    "chains": _COUNT,
                    "blocks": _COUNT,
                    "block_size": _COUNT,
                    "stream": _TEXT,
                    "vocabulary": _COUNT,
                }
            ),
            "digest": _HEX,
        },
        {},
    ),
    "events": (
        {"input": _object({"payload": _HEX}), "expected": _either(_object({"batch": _FACT}), _CODES)},
        {"encodes_at": _list(_RELEASE), "provenance": _TEXT},
    ),
    "streams": (
        {
            "input": _object(
                {
                    "steps": _list(
                        _object({"from": {"enum": ["live", "replay"]}, "rank": _COUNT, "frames": _list(_HEX)})
                    )
                }
            ),
            "expected": _FACT,
        },
        {"accepted": _list(_FACT, minItems=2)},
    ),
    "engine": (
        {
            "input": _object(
                {
                    "engine": _object(
                        {
                            "vllm": _RELEASE,
                            "algorithm": _TEXT,
                            "hash_seed": _TEXT,
                            "block_size": _COUNT,
                            "num_blocks": _COUNT,
                        },
                        {
                            "decode_context_parallel_size": _COUNT,
                            "lookahead": _COUNT,
                            "groups": _list(_FACT, minItems=1),
                            "event_hash_form": {"enum": ["uint64", "int64", "bytes"]},
                        },
                    ),
                    "steps": _list(
                        _either(
                            _object(
                                {
                                    "requests": _list(
                                        _object(
                                            {
                                                "tokens": _list(_COUNT),
                                                "max_tokens": _COUNT,
                                                "output": _list(_COUNT),
                                            },
                                            {
                                                "cache_salt": _TEXT,
                                                "lora": _FACT,
                                                "multimodal": _list(_FACT),
                                                "skip_reading_prefix_cache": {"type": "boolean"},
                                            },
                                        ),
                                        minItems=1,
                                    )
                                }
                            ),
                            _object({"reset_prefix_cache": {"const": True}}),
                        ),
                        minItems=1,
                    ),
                }
            ),
            "expected": _object(
                {
                    "steps": _list(
                        _object(
                            {
                                "payloads": _list(_HEX),
                                "requests": _list(_object({"cached_tokens": _COUNT})),
                            }
                        )
                    ),
                    "resident": {"type": "object", "additionalProperties": _list(_DECIMAL, minItems=1)},
                }
            ),
        },
        {},
    ),
}


def _schema(kind: str) -> dict[str, Any]:
    required, optional = _KINDS[kind]
    item = _object(
        {
            "id": _ID,
            "name": _TEXT,
            "flags": _list(_TEXT, minItems=1, uniqueItems=True),
            "since": _RELEASE,
            "until": _either(_RELEASE, {"type": "null"}),
            "result": {"enum": ["valid", "invalid", "implementation_defined"]},
            **required,
        },
        optional,
        **(
            {
                "if": {"properties": {"result": {"const": "implementation_defined"}}},
                "then": {"required": ["accepted"]},
            }
            if "accepted" in optional
            else {}
        ),
    )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"kvhash test vectors: {kind}",
        **_object(
            {
                "kind": {"const": kind},
                "schema": {"const": f"schema/{kind}.schema.json"},
                "schema_version": {"const": 1},
                "notes": {
                    "type": "object",
                    "additionalProperties": _object({"mistake": _TEXT, "cost": _TEXT}),
                },
                "vectors": _list(item, minItems=1),
            }
        ),
    }


def schema_files() -> dict[str, str]:
    """Return the schemas, path in the corpus to text."""
    return {
        f"schema/{kind}.schema.json": json.dumps(_schema(kind), indent=1, sort_keys=True) + "\n"
        for kind in _KINDS
    }
