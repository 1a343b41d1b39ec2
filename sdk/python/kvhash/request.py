"""Request lines: one JSON object a line in, one a line out; the one text format for hashing.

::

    -> {"id":"1","vllm":"0.33.0","algorithm":"sha256_cbor","hash_seed":"0","block_size":16,"tokens":[...],
        "lora":{"name":"sql","path":"adapters/sql","id":3},"cache_salt":"t",
        "multimodal":[{"identifier":"..","offset":5,"length":40}],
        "prompt_embeds":{"shape":[48,4],"dtype":"float32","data":"<hex>"},"lookahead":1}
    <- {"id":"1","none_hash":"<hex>","block_hashes":["<hex>",...],"external":["<decimal>",...],
        "extra_keys":[null,[["cache_salt","t"]],...]}
    <- {"id":"2","error":{"code":"algorithm-not-in-release","message":"..."}}

One bad line gives one error line; the others are answered. An unknown field is refused: a misspelt ``cache_salt``
must not become a wrong hash.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from ._checks import check_fields, check_text, normalize_tokens
from ._errors import (
    InvalidEncodingError,
    InvalidJsonError,
    InvalidRequestError,
    KvHashError,
    LineTooLongError,
)
from .block_hash import json_hash
from .extra_keys import Lora, MultimodalItem, PromptEmbeds, RequestKeys, json_keys
from .hasher import BlockHasher, Chain

__all__ = ["MAX_LINE_BYTES", "HashRequest", "answer", "answer_lines", "parse_json", "parse_request"]

#: The longest request line, in bytes; some 10^6 tokens.
MAX_LINE_BYTES = 8 * 1024 * 1024
#: Arrays and objects that may lie within each other in a line.
MAX_JSON_DEPTH = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class HashRequest:
    """Everything that decides the block hashes of one prompt: the engine's settings and the request's.

    A checked value; make it with `parse_request` or `HashRequest.of`.
    """

    tokens: tuple[int, ...]
    vllm: str = "latest"
    algorithm: str = "sha256"
    hash_seed: str | None = None
    block_size: int = 16
    lookahead: int = 0
    decode_context_parallel_size: int = 1
    lora: Lora | None = None
    cache_salt: str | None = None
    multimodal: tuple[MultimodalItem, ...] = ()
    prompt_embeds: PromptEmbeds | None = None

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> HashRequest:
        """Check a mapping with the fields of a request line (all but ``id``); raises `KvHashError`s."""
        items = check_fields(value, at="$", allowed=_FIELDS)
        if "tokens" not in items:
            raise InvalidRequestError("a request needs 'tokens', a list of token ids", at="$.tokens")
        ids = normalize_tokens(items["tokens"])
        keys = RequestKeys.of(
            lora=items.get("lora"),
            cache_salt=items.get("cache_salt"),
            multimodal=items.get("multimodal"),
            prompt_embeds=items.get("prompt_embeds"),
            num_tokens=len(ids),
        )
        settings = {name: items[name] for name in _SETTINGS if name in items}
        for name in _COUNTS:
            if settings.get(name, 0) is None:
                del settings[name]
        if "vllm" in settings:
            check_text(settings["vllm"], at="$.vllm", what="the vLLM release")
        return cls(
            tokens=tuple(ids),
            lora=keys.lora,
            cache_salt=keys.cache_salt,
            multimodal=keys.multimodal,
            prompt_embeds=keys.prompt_embeds,
            **settings,
        )

    def hasher(self) -> BlockHasher:
        """Return the hasher of the request's settings; raises as `BlockHasher` does."""
        return _hasher(
            self.vllm,
            self.algorithm,
            self.hash_seed,
            self.block_size,
            self.lookahead,
            self.decode_context_parallel_size,
        )

    def chain(self, hasher: BlockHasher | None = None) -> Chain:
        """Return the chain of the request's tokens."""
        return (hasher or self.hasher()).chain(
            self.tokens,
            lora=self.lora,
            cache_salt=self.cache_salt,
            multimodal=self.multimodal,
            prompt_embeds=self.prompt_embeds,
        )

    def with_(self, **changes: Any) -> HashRequest:
        """Return a copy with some fields changed, unchecked."""
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Return the request as a request line's object, defaults left out where they say nothing."""
        line: dict[str, Any] = {
            "vllm": self.vllm,
            "algorithm": self.algorithm,
            "hash_seed": self.hash_seed,
            "block_size": self.block_size,
            "tokens": list(self.tokens),
        }
        if self.lora:
            line["lora"] = {
                name: getattr(self.lora, name)
                for name in ("name", "path", "id")
                if getattr(self.lora, name) is not None
            }
        if self.cache_salt is not None:
            line["cache_salt"] = self.cache_salt
        if self.multimodal:
            line["multimodal"] = [
                {"identifier": item.identifier, "offset": item.offset, "length": item.length}
                for item in self.multimodal
            ]
        if self.prompt_embeds:
            embeds = self.prompt_embeds
            line["prompt_embeds"] = {
                "shape": list(embeds.shape),
                "dtype": embeds.dtype,
                "data": embeds.data.hex(),
            }
        if self.lookahead:
            line["lookahead"] = self.lookahead
        if self.decode_context_parallel_size != 1:
            line["decode_context_parallel_size"] = self.decode_context_parallel_size
        return line


_FIELDS = tuple(f.name for f in fields(HashRequest))
#: Where null means left out; for ``hash_seed`` and what a request adds, null is a value.
_COUNTS = ("block_size", "lookahead", "decode_context_parallel_size")
_SETTINGS = ("vllm", "algorithm", "hash_seed", "block_size", "lookahead", "decode_context_parallel_size")


@lru_cache(maxsize=64)
def _cached_hasher(*settings: Any) -> BlockHasher:
    vllm, algorithm, hash_seed, block_size, lookahead, dcp = settings
    return BlockHasher(
        vllm=vllm,
        algorithm=algorithm,
        hash_seed=hash_seed,
        block_size=block_size,
        lookahead=lookahead,
        decode_context_parallel_size=dcp,
    )


def _hasher(*settings: Any) -> BlockHasher:
    # A key of the cache compares 1, 1.0 and True as equal, and a list cannot be one: only plain settings are kept.
    if all(value is None or type(value) in (str, int) for value in settings):
        return _cached_hasher(*settings)
    return _cached_hasher.__wrapped__(*settings)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidJsonError(f"the field {twice!r} stands twice in one object")
    return result


def _no_constant(text: str) -> Any:
    raise InvalidJsonError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise InvalidJsonError(f"{text[:20]} is beyond any number")
    return value


def _nests_past(value: Any, limit: int) -> bool:
    """Return whether more than `limit` arrays and objects lie within each other."""
    level = [value] if isinstance(value, (list, dict)) else []
    for _ in range(limit):
        level = [
            item
            for each in level
            for item in (each.values() if isinstance(each, dict) else each)
            if isinstance(item, (list, dict))
        ]
        if not level:
            return False
    return bool(level)


def parse_json(data: bytes | str, *, what: str = "the line") -> Any:
    """Read one strict JSON text: UTF-8, no field twice, no NaN, bounded nesting.

    Raises InvalidEncodingError or InvalidJsonError, saying where.
    """
    if isinstance(data, bytes):
        try:
            data = data.decode()
        except UnicodeDecodeError as error:
            raise InvalidEncodingError(f"{what} is not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        value = json.loads(
            data, object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_finite
        )
        # What the interpreter could follow differs by its release and by who calls.
        if data.count("[") + data.count("{") > MAX_JSON_DEPTH and _nests_past(value, MAX_JSON_DEPTH):
            raise RecursionError
        return value
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}" if "\n" in data else f"column {error.colno}"
        raise InvalidJsonError(f"{what} is not JSON: {error.msg}, at {where}") from None
    except RecursionError:
        raise InvalidJsonError(f"{what} is nested too deeply") from None
    except ValueError:
        raise InvalidJsonError(f"{what} holds a number of too many digits") from None


def parse_request(
    line: bytes | str | Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> HashRequest:
    """Read one request line (or its object); `defaults` fill fields that it leaves out. Raises `KvHashError`s."""
    value = parse_json(line) if isinstance(line, (bytes, str)) else line
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"expected a JSON object, got {type(value).__name__}", at="$")
    given = {k: v for k, v in value.items() if k != "id" and not (v is None and k in _COUNTS)}
    return HashRequest.of({**(defaults or {}), **given})


def answer(request: HashRequest) -> dict[str, Any]:
    """Hash a request and return the answer line's object, without ``id``."""
    chain = request.chain()
    return {
        "none_hash": json_hash(chain.none_hash),
        "block_hashes": [json_hash(value) for value in chain.block_hashes],
        "external": [str(value) for value in chain.external()],
        "extra_keys": [json_keys(keys) for keys in chain.extra_keys()],
    }


def error_object(error: KvHashError) -> dict[str, str]:
    """Return an error as answer lines carry it: its code and its message (with the place)."""
    return {"code": error.code, "message": str(error)}


def answer_lines(
    lines: Iterable[bytes],
    defaults: Mapping[str, Any] | None = None,
    *,
    max_line_bytes: int = MAX_LINE_BYTES,
    other: Callable[[Mapping[str, Any]], dict[str, Any] | None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Answer request lines one by one; blank lines are passed over, a bad line gives an error object in its place.

    A line longer than `max_line_bytes` (its end, one ``\\n`` or ``\\r\\n``, not counted) is refused unread, blank or
    not; its ``id`` is null then, as for a line that is no JSON.
    `other` answers lines of another kind among them: it gets each line's object, and returns None for a request.
    """
    for line in lines:
        too_long = len(line.removesuffix(b"\r\n").removesuffix(b"\n")) > max_line_bytes
        if not too_long and not line.strip():
            continue
        identity: Any = None
        try:
            if too_long:
                raise LineTooLongError(
                    f"the line has more than the {max_line_bytes} bytes that are read (raise the limit to hash it)"
                )
            value = parse_json(line)
            if not isinstance(value, dict):
                raise InvalidRequestError(f"expected a JSON object, got {type(value).__name__}", at="$")
            identity = value.get("id")
            answered = None if other is None else other(value)
            yield {"id": identity, **(answered or answer(parse_request(value, defaults)))}
        except KvHashError as error:
            yield {"id": identity, "error": error_object(error)}
