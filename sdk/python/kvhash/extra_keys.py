"""What besides the tokens goes into a block's hash: LoRA adapter, multimodal items, cache salt, prompt embeddings.

Order within a block, in every release: LoRA, multimodal items by offset, salt (block 0 only), prompt embeddings.
A block with none of them has the key None. What each looks like in a release is data of its `Contract`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ._checks import check_fields, check_int, check_text
from ._errors import InvalidLoraError, InvalidMultimodalError, InvalidPromptEmbedsError, InvalidSaltError
from .contract import Contract
from .serialize import Ref, Value

__all__ = [
    "DTYPE_SIZES",
    "ExtraKeys",
    "Lora",
    "MultimodalItem",
    "PromptEmbeds",
    "RequestKeys",
    "event_extra_keys",
    "json_keys",
    "untag",
]

#: The extra keys of one block as hashed: None, or a tuple.
ExtraKeys: TypeAlias = "tuple[Value, ...] | None"

# The tags of 0.31 and later. Each is one constant object in vLLM's code, so a second use in a block is a
# back-reference in pickle: hence a Ref.
_LORA = Ref("lora")
_MM = Ref("mm")
_CACHE_SALT = Ref("cache_salt")
_PROMPT_EMBEDS = Ref("prompt_embeds")

#: Bytes per element of the dtypes that vLLM accepts for prompt embeddings.
DTYPE_SIZES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA adapter as registered with the engine.

    Before 0.11.1 the key holds ``id`` (the adapter's integer id), from 0.11.1 ``name``, from 0.31 ``name`` and
    ``path`` (the path exactly as the engine got it). Raises InvalidLoraError for a wrong type.
    """

    name: str | None = None
    path: str | None = None
    id: int | None = None

    def __post_init__(self) -> None:
        for name in ("name", "path"):
            value = getattr(self, name)
            if value is not None:
                check_text(value, at=f"$.lora.{name}", what=f"the adapter's {name}", error=InvalidLoraError)
                if not value:
                    raise InvalidLoraError(f"the adapter's {name} is empty", at=f"$.lora.{name}")
        if self.id is not None:
            number = check_int(
                self.id, at="$.lora.id", what="the adapter's id", minimum=1, error=InvalidLoraError
            )
            object.__setattr__(self, "id", number)

    @classmethod
    def of(cls, value: Lora | Mapping[str, Any]) -> Lora:
        """Return `value`, or the adapter that a mapping with ``name``, ``path``, ``id`` describes."""
        if isinstance(value, Lora):
            return value
        return cls(**check_fields(value, at="$.lora", allowed=("name", "path", "id"), error=InvalidLoraError))

    def key(self, contract: Contract) -> tuple[Value, ...]:
        """Return the adapter's part of every block's key in this release, tagged where the release tags."""
        if contract.lora_key == "id":
            return (self._needed("id", contract),)
        name = self._needed("name", contract)
        if contract.lora_key == "name":
            return (name,)
        return ((_LORA, name, self._needed("path", contract)),)

    def _needed(self, what: str, contract: Contract) -> Any:
        value = getattr(self, what)
        if value is None:
            raise InvalidLoraError(
                f"vLLM {contract.release} hashes the adapter's {what}, and none was given",
                at=f"$.lora.{what}",
            )
        return value


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """An image, audio or video in the prompt: its content identifier and the placeholder tokens that it fills.

    ``offset`` and ``length`` count tokens from the start of the prompt. Raises InvalidMultimodalError.
    """

    identifier: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """The position after the item's last token."""
        return self.offset + self.length

    @classmethod
    def of(cls, value: MultimodalItem | Mapping[str, Any], *, at: str) -> MultimodalItem:
        """Return the item, checked; a mapping has ``identifier``, ``offset`` and ``length``."""
        error = InvalidMultimodalError
        if not isinstance(value, MultimodalItem):
            names = ("identifier", "offset", "length")
            items = check_fields(value, at=at, allowed=names, error=error)
            for name in names:
                if name not in items:
                    raise error(f"a multimodal item needs {name!r}", at=at)
            value = cls(items["identifier"], items["offset"], items["length"])
        check_text(value.identifier, at=f"{at}.identifier", what="the identifier", error=error)
        offset = check_int(value.offset, at=f"{at}.offset", what="the offset", minimum=0, error=error)
        length = check_int(value.length, at=f"{at}.length", what="the length", minimum=1, error=error)
        return cls(value.identifier, offset, length)


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """Prompt embeddings: a matrix of ``shape`` (rows, hidden size), row-major little-endian bytes.

    One row per prompt token. ``dtype``: float32, float16 or bfloat16. Raises InvalidPromptEmbedsError.
    """

    shape: tuple[int, int]
    dtype: str
    data: bytes = field(repr=False)

    def __post_init__(self) -> None:
        error = InvalidPromptEmbedsError
        at = "$.prompt_embeds"
        if isinstance(self.shape, (str, bytes)) or not isinstance(self.shape, Sequence):
            raise error(f"expected [rows, hidden size], got {type(self.shape).__name__}", at=f"{at}.shape")
        if len(self.shape) != 2:
            raise error(f"expected [rows, hidden size], got {len(self.shape)} numbers", at=f"{at}.shape")
        rows = check_int(
            self.shape[0], at=f"{at}.shape[0]", what="the number of rows", minimum=0, error=error
        )
        hidden = check_int(self.shape[1], at=f"{at}.shape[1]", what="the hidden size", minimum=1, error=error)
        object.__setattr__(self, "shape", (rows, hidden))
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_SIZES:
            raise error(
                f"unknown dtype {self.dtype!r}; expected one of: {', '.join(DTYPE_SIZES)}", at=f"{at}.dtype"
            )
        if not isinstance(self.data, bytes):
            raise error(f"expected the rows as bytes, got {type(self.data).__name__}", at=f"{at}.data")
        needed = rows * self.row_size
        if len(self.data) != needed:
            raise error(
                f"{rows} rows of {hidden} {self.dtype} are {needed} bytes, got {len(self.data)}",
                at=f"{at}.data",
            )

    @classmethod
    def of(cls, value: Any) -> PromptEmbeds:
        """Return embeddings from a `PromptEmbeds`, a mapping (``data`` as hex), a NumPy array or a torch tensor."""
        at = "$.prompt_embeds"
        error = InvalidPromptEmbedsError
        if isinstance(value, PromptEmbeds):
            return value
        if isinstance(value, Mapping):
            names = ("shape", "dtype", "data")
            items = check_fields(value, at=at, allowed=names, error=error)
            for name in names:
                if name not in items:
                    raise error(f"prompt embeddings need {name!r}", at=at)
            data = items["data"]
            if isinstance(data, str):
                try:
                    data = bytes.fromhex(data)
                except ValueError:
                    raise error("the data is not hex", at=f"{at}.data") from None
            return cls(items["shape"], items["dtype"], data)
        shape = tuple(getattr(value, "shape", ()))
        if len(shape) != 2:
            raise error(f"expected a matrix (rows, hidden size), got {type(value).__name__} {shape}", at=at)
        dtype = str(value.dtype).rpartition(".")[2]
        if hasattr(value, "detach"):  # torch: NumPy has no bfloat16, so go by bytes
            import torch

            value = value.detach().cpu().contiguous().view(torch.uint8).numpy()
        elif str(getattr(value.dtype, "byteorder", "=")) == ">":
            raise error("the array is big-endian; vLLM hashes little-endian rows", at=at)
        return cls((int(shape[0]), int(shape[1])), dtype, value.tobytes())

    @property
    def row_size(self) -> int:
        """Bytes of one row."""
        return self.shape[1] * DTYPE_SIZES[self.dtype]

    def rows(self, start: int, end: int) -> bytes:
        """Return the bytes of rows `start` to `end`; rows that do not exist are left out, as vLLM's slice does."""
        return self.data[start * self.row_size : end * self.row_size]


@dataclass(frozen=True, slots=True)
class RequestKeys:
    """What one request adds to its blocks' keys. Build it with `of`, which checks everything once."""

    lora: Lora | None = None
    cache_salt: str | None = None
    multimodal: tuple[MultimodalItem, ...] = ()
    prompt_embeds: PromptEmbeds | None = None

    @classmethod
    def of(
        cls,
        *,
        lora: Lora | Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        multimodal: Iterable[MultimodalItem | Mapping[str, Any]] | None = None,
        prompt_embeds: Any = None,
        num_tokens: int | None = None,
    ) -> RequestKeys:
        """Check and combine. With `num_tokens`, items must end within it and embeddings must have a row for each.

        Raises InvalidLoraError, InvalidSaltError, InvalidMultimodalError or InvalidPromptEmbedsError.
        """
        if cache_salt is not None:
            check_text(cache_salt, at="$.cache_salt", what="the cache salt", error=InvalidSaltError)
        embeds = None if prompt_embeds is None else PromptEmbeds.of(prompt_embeds)
        if embeds is not None and num_tokens is not None and embeds.shape[0] < num_tokens:
            raise InvalidPromptEmbedsError(
                f"{embeds.shape[0]} rows for {num_tokens} tokens; expected a row per token",
                at="$.prompt_embeds.shape[0]",
            )
        return cls(
            None if lora is None else Lora.of(lora),
            cache_salt,
            _check_items(() if multimodal is None else multimodal, num_tokens),
            embeds,
        )

    @property
    def empty(self) -> bool:
        """Whether no block of this request can have a key."""
        return not (self.lora or self.cache_salt or self.multimodal or self.prompt_embeds)

    def block(self, contract: Contract, start: int, end: int, first_item: int = 0) -> ExtraKeys:
        """Return the extra keys of the tokens `start` to `end` as `contract` hashes them.

        `first_item`: the items before it are known to end before `start` (a walk along the prompt skips them).
        """
        keys: list[Value] = []
        if self.lora:
            keys += self.lora.key(contract)
        for item in self.multimodal[first_item:]:
            if item.offset >= end:
                break
            if item.end > start:
                keys.append(_item_key(item, start, contract))
        if self.cache_salt and start == 0:
            keys.append((_CACHE_SALT, self.cache_salt) if contract.tagged_keys else self.cache_salt)
        if self.prompt_embeds and contract.prompt_embeds_key != "absent":
            rows = self.prompt_embeds.rows(start, end)
            content = rows if contract.prompt_embeds_key == "bytes" else hashlib.sha256(rows).digest()
            keys.append((_PROMPT_EMBEDS, content) if contract.tagged_keys else content)
        return tuple(keys) or None


def _item_key(item: MultimodalItem, start: int, contract: Contract) -> Value:
    if contract.multimodal_key == "identifier":
        return item.identifier
    offset = item.offset - start
    return (_MM, item.identifier, offset) if contract.tagged_keys else (item.identifier, offset)


def _check_items(
    items: Iterable[MultimodalItem | Mapping[str, Any]], num_tokens: int | None
) -> tuple[MultimodalItem, ...]:
    if isinstance(items, (str, bytes, Mapping)) or not isinstance(items, Iterable):
        raise InvalidMultimodalError(
            f"expected a list of items, got {type(items).__name__}", at="$.multimodal"
        )
    checked: list[MultimodalItem] = []
    for i, value in enumerate(items):
        at = f"$.multimodal[{i}]"
        item = MultimodalItem.of(value, at=at)
        if checked and item.offset < checked[-1].offset:
            raise InvalidMultimodalError(
                f"items must be sorted by offset: {item.offset} comes after {checked[-1].offset}",
                at=f"{at}.offset",
            )
        if checked and item.offset < checked[-1].end:
            raise InvalidMultimodalError(
                f"items must not overlap: the one before ends at {checked[-1].end}, this starts at {item.offset}",
                at=f"{at}.offset",
            )
        if num_tokens is not None and item.end > num_tokens:
            raise InvalidMultimodalError(
                f"the item ends at {item.end}, past the {num_tokens} tokens of the prompt", at=f"{at}.length"
            )
        checked.append(item)
    return tuple(checked)


def event_extra_keys(keys: ExtraKeys, contract: Contract) -> ExtraKeys:
    """Return the keys of one block as its event publishes them: untagged, whatever the hash holds.

    A tagged multimodal key becomes ``(identifier, offset)``, every other its first value (for LoRA the name alone:
    from 0.31 the hash of an adapter's block cannot be rebuilt from its event).
    """
    return untag(keys) if contract.tagged_keys else keys


def untag(keys: ExtraKeys) -> ExtraKeys:
    """Return keys without their tags; a key that has none stays as it is."""
    if keys is None:
        return None
    return tuple(
        (key[1:] if key[0] is _MM else key[1]) if isinstance(key, tuple) and isinstance(key[0], Ref) else key
        for key in keys
    )


def json_keys(value: Value) -> Any:
    """Return extra keys as JSON values: tuples as lists, bytes as ``{"bytes": hex}``."""
    if isinstance(value, Ref):
        value = value.value
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, tuple):
        return [json_keys(item) for item in value]
    return value
