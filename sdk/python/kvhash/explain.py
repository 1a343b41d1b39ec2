"""Why a block's hash is what it is: its preimage, annotated byte by byte."""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ._errors import InvalidRequestError
from .block_hash import ChainValue, external_hash, json_hash
from .extra_keys import ExtraKeys, json_keys
from .request import HashRequest
from .serialize import Ref, Value

__all__ = ["Explanation", "Segment", "annotate", "explain_block"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Some bytes of a preimage: where they start, which they are, what they encode, and what that means."""

    offset: int
    data: bytes
    encoding: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """One block, from its tokens to its published hash."""

    index: int
    start: int
    end: int
    parent: ChainValue
    tokens: tuple[int, ...]
    extra_keys: ExtraKeys
    serialization: str
    preimage: bytes
    segments: tuple[Segment, ...]
    digest_name: str
    block_hash: ChainValue

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as JSON values; bytes are hex."""
        return {
            "block": self.index,
            "tokens": [self.start, self.end],
            "parent": json_hash(self.parent),
            "extra_keys": json_keys(self.extra_keys),
            "serialization": self.serialization,
            "preimage": self.preimage.hex(),
            "segments": [
                {
                    "offset": segment.offset,
                    "bytes": segment.data.hex(),
                    "encoding": segment.encoding,
                    "meaning": segment.meaning,
                }
                for segment in self.segments
            ],
            "digest": self.digest_name,
            "block_hash": json_hash(self.block_hash),
            "external": str(external_hash(self.block_hash)),
        }


def explain_block(request: HashRequest, index: int) -> Explanation:
    """Explain block `index` (from 0; negative counts from the last) of a request.

    Raises InvalidRequestError when the request has no such full block, and as `HashRequest.chain` does.
    """
    hasher = request.hasher()
    chain = request.chain(hasher)
    hashes = chain.block_hashes
    if not -len(hashes) <= index < len(hashes):
        need = f" and {hasher.lookahead} tokens after it" if hasher.lookahead else ""
        raise InvalidRequestError(
            f"there is no full block {index}: {len(request.tokens)} tokens fill {len(hashes)} blocks of "
            f"{hasher.span}{need}",
            at="$.block",
        )
    index %= len(hashes)
    start = index * hasher.span
    tokens = request.tokens[start : start + hasher.span]
    parent = hashes[index - 1] if index else hasher.none_hash
    keys = chain.extra_keys()[index]
    value: Value = (parent, tokens, keys)
    preimage = hasher.hash_function.serialize(value)
    algorithm = hasher.contract.algorithm(hasher.algorithm)
    labels = list(_labels(index, start, tokens, keys, hasher.lookahead))
    return Explanation(
        index=index,
        start=start,
        end=start + len(tokens),
        parent=parent,
        tokens=tokens,
        extra_keys=keys,
        serialization=algorithm.serialization,
        preimage=preimage,
        segments=annotate(algorithm.serialization, preimage, labels),
        digest_name=algorithm.digest + (", low 64 bits" if algorithm.keeps == "low64" else ""),
        block_hash=hashes[index],
    )


def _labels(
    index: int, start: int, tokens: tuple[int, ...], keys: ExtraKeys, lookahead: int
) -> Iterator[str]:
    """Yield what each leaf of the preimage means, in the order in which a serializer writes the leaves."""
    yield f"parent: hash of block {index - 1}" if index else "parent: NONE_HASH"
    for i, _ in enumerate(tokens):
        yield f"token {start + i}"
    if not lookahead or keys is None:
        yield from _key_labels(keys)
        return
    own = keys[0]
    assert own is None or isinstance(own, tuple)
    yield from _key_labels(own)
    for i in range(lookahead):
        yield f"look-ahead token {start + len(tokens) + i}"


def _key_labels(keys: Value) -> Iterator[str]:
    if keys is None:
        yield "no extra keys"
    elif isinstance(keys, tuple):
        for i, key in enumerate(keys):
            if not isinstance(key, tuple):
                yield f"extra key {i}"
                continue
            tag = key[0].value if isinstance(key[0], Ref) else None
            names = {
                "lora": ("tag", "adapter name", "adapter path"),
                "mm": ("tag", "identifier", "offset from the block's start"),
                "cache_salt": ("tag", "cache salt"),
                "prompt_embeds": ("tag", "digest of the block's rows"),
                None: ("identifier", "offset from the block's start"),
            }[tag if tag is None else str(tag)]
            for name in names:
                yield f"extra key {i}: {name}"


def annotate(serialization: str, data: bytes, labels: list[str] | None = None) -> tuple[Segment, ...]:
    """Split a serialized preimage into its segments; `labels` name its leaves, in order."""
    meanings = iter(labels or ())
    split = _split_cbor if serialization == "cbor" else _split_pickle
    return tuple(
        Segment(offset, data[offset:end], encoding, next(meanings, "") if leaf else meaning)
        for offset, end, encoding, meaning, leaf in split(data)
    )


_Piece = tuple[int, int, str, str, bool]


def _split_cbor(data: bytes) -> Iterator[_Piece]:
    kinds = ("unsigned", "negative", "bytes", "text", "array", "map", "tag", "simple")
    position = 0
    outermost = True
    inside_bignum = False
    while position < len(data):
        first = data[position]
        major, short = first >> 5, first & 31
        width = {24: 1, 25: 2, 26: 4, 27: 8}.get(short, 0)
        argument = int.from_bytes(data[position + 1 : position + 1 + width], "big") if width else short
        end = position + 1 + width
        if major in (2, 3):
            end += argument
        if first == 0xF6:
            yield position, end, "null", "", True
        elif major == 4:
            meaning = "the block: (parent, tokens, extra keys)" if outermost else f"{argument} items"
            yield position, end, f"array of {argument}", meaning, False
        elif major == 6:
            yield position, end, f"tag {argument}", "integer of more than 64 bits", False
        elif major in (2, 3):
            content = data[end - argument : end]
            shown = content.decode("utf-8", "replace") if major == 3 else f"{argument} bytes"
            encoding = f"text {_clip(shown)}" if major == 3 else shown
            yield position, end, "its magnitude" if inside_bignum else encoding, "", True
        else:
            yield position, end, f"{kinds[major]} {argument if major == 0 else -1 - argument}", "", True
        inside_bignum = major == 6
        outermost = False
        position = end


def _split_pickle(data: bytes) -> Iterator[_Piece]:
    structure = {
        "PROTO": "pickle protocol 5",
        "FRAME": "frame of so many bytes",
        "MEMOIZE": "number the object just written",
        "MARK": "a tuple of 4 or more begins",
        "TUPLE": "the tuple ends",
        "TUPLE1": "a tuple of 1",
        "TUPLE2": "a tuple of 2",
        "TUPLE3": "a tuple of 3",
        "EMPTY_TUPLE": "an empty tuple",
        "STOP": "end",
    }
    operations = [(op, arg, position or 0) for op, arg, position in pickletools.genops(data)]
    ends = [position for _, _, position in operations[1:]] + [len(data)]
    for (op, arg, position), end in zip(operations, ends, strict=True):
        if op.name in structure:
            argument = f" {arg}" if op.name in ("PROTO", "FRAME") else ""
            yield position, end, op.name + argument, structure[op.name], False
        elif op.name in ("BINGET", "LONG_BINGET"):
            yield position, end, f"{op.name} {arg} (the same object again)", "", True
        elif isinstance(arg, bytes):
            yield position, end, f"{op.name} of {len(arg)} bytes", "", True
        else:
            yield position, end, op.name if arg is None else f"{op.name} {_clip(str(arg))}", "", True


def _clip(text: str, limit: int = 48) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
