"""How candidate chains are made for `kvhash.identify`: as vLLM does, and with each mistake that is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .block_hash import low64
from .extra_keys import ExtraKeys, RequestKeys, untag
from .hasher import HashFunction
from .serialize import Ref, Value

__all__ = ["CORRECT", "FORMS", "MISTAKES", "NULL_ROOT", "Recipe", "normalize_observed", "salt_everywhere"]

# --- published forms ------------------------------------------------------------------------------------------

_Form = Callable[[Any], "int | bytes"]


def _digest_bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else value.to_bytes(32 if value >> 64 else 8, "big")


FORMS: tuple[tuple[str, _Form, tuple[str, str] | None], ...] = (
    ("64-bit integer", low64, None),
    ("bytes", lambda value: value, None),
    (
        "first 8 bytes",
        lambda value: int.from_bytes(_digest_bytes(value)[:8], "big"),
        (
            "first-8-bytes",
            "the first 8 bytes of the digest were taken; vLLM publishes the last 8 (the low 64 bits)",
        ),
    ),
    (
        "little-endian",
        lambda value: int.from_bytes(_digest_bytes(value)[-8:], "little"),
        ("little-endian", "the last 8 bytes were read little-endian; vLLM reads the digest big-endian"),
    ),
    (
        "first 8 bytes, little-endian",
        lambda value: int.from_bytes(_digest_bytes(value)[:8], "little"),
        (
            "first-8-little-endian",
            "the first 8 bytes were read little-endian; vLLM takes the last 8, big-endian",
        ),
    ),
)


def normalize_observed(value: bytes | int) -> int | bytes:
    if isinstance(value, bytes):
        if len(value) in (20, 36):  # a digest with its group id behind it
            return value[:-4]
        if len(value) == 8:
            return int.from_bytes(value, "big")
    return value


#: Stands for a None parent of block 0, since None says that a mistake does not apply.
NULL_ROOT = Ref(b"")


# --- mistakes in the chain ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one candidate chain is made; the defaults are what vLLM does."""

    mistake: tuple[str, str] | None = None
    root: Callable[[HashFunction, Any, str | None], Any] = lambda _function, root, _seed: root
    parent: Callable[[Any], Value] = lambda value: value
    chained: bool = True
    keys: Callable[[int, ExtraKeys], ExtraKeys] = lambda _index, keys: keys
    preimage: Callable[[Value, tuple[int, ...], ExtraKeys], Value] = lambda parent, tokens, keys: (
        parent,
        tokens,
        keys,
    )
    tokens: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda tokens: tokens
    request: Callable[[RequestKeys], RequestKeys | None] = lambda keys: keys
    needs_keys: bool = False
    rootless: bool = False
    needs_tag: str | None = None


def _seed_as_number(function: HashFunction, root: Any, seed: str | None) -> Any:
    return function(int(seed)) if seed is not None and seed.isascii() and seed.isdigit() else None


def _seed_with(suffix: str) -> Callable[[HashFunction, Any, str | None], Any]:
    return lambda function, root, seed: None if seed is None else function(seed + suffix)


def _dropped(name: str) -> Callable[[RequestKeys], RequestKeys | None]:
    def drop(keys: RequestKeys) -> RequestKeys | None:
        if not getattr(keys, name):
            return None
        parts = {part: getattr(keys, part) for part in ("lora", "cache_salt", "multimodal", "prompt_embeds")}
        parts[name] = () if name == "multimodal" else None
        return RequestKeys(**parts)

    return drop


def _map_lora(change: Callable[[tuple[Value, ...]], Value]) -> Callable[[int, ExtraKeys], ExtraKeys]:
    def apply(_index: int, keys: ExtraKeys) -> ExtraKeys:
        if keys is None:
            return None
        return tuple(
            change(key)
            if isinstance(key, tuple) and isinstance(key[0], Ref) and key[0].value == "lora"
            else key
            for key in keys
        )

    return apply


MISTAKES: tuple[Recipe, ...] = (
    Recipe(
        (
            "parent-64-bit",
            "the 64-bit published value was fed forward as the parent; vLLM chains the whole digest",
        ),
        parent=low64,
    ),
    Recipe(
        (
            "parent-8-bytes",
            "8 bytes of the digest were fed forward as the parent; vLLM chains the whole digest",
        ),
        parent=lambda value: value[-8:] if isinstance(value, bytes) else value,
    ),
    Recipe(
        ("parent-hex-text", "the parent was hashed as hex text; vLLM hashes its bytes"),
        parent=lambda value: value.hex() if isinstance(value, bytes) else str(value),
    ),
    Recipe(
        ("parent-as-integer", "the parent digest was hashed as an integer; vLLM hashes bytes from 0.10.2 on"),
        parent=lambda value: int.from_bytes(value, "big") if isinstance(value, bytes) else value,
    ),
    Recipe(
        ("seed-as-number", "the seed was hashed as a number; vLLM hashes PYTHONHASHSEED as a text string"),
        root=_seed_as_number,
    ),
    Recipe(
        ("seed-newline", "the seed has a newline at its end; PYTHONHASHSEED has none"),
        root=_seed_with("\n"),
    ),
    Recipe(
        ("root-none", "block 0 has None as its parent; vLLM puts NONE_HASH there"),
        root=lambda *_: NULL_ROOT,
        rootless=True,
    ),
    Recipe(
        ("root-empty", "block 0 has an empty parent; vLLM puts NONE_HASH there"),
        root=lambda *_: b"",
        rootless=True,
    ),
    Recipe(
        ("root-zero", "block 0 has a parent of zeros; vLLM puts NONE_HASH there"),
        root=lambda _function, root, _seed: bytes(len(root)) if isinstance(root, bytes) else 0,
        rootless=True,
    ),
    Recipe(
        ("not-chained", "each block was hashed onto NONE_HASH; vLLM chains each onto the one before"),
        chained=False,
    ),
    Recipe(
        ("empty-tuple-keys", "a block without extra keys got an empty tuple; vLLM puts None there"),
        keys=lambda _index, keys: () if keys is None else keys,
    ),
    Recipe(
        (
            "no-key-slot",
            "the preimage has two parts; vLLM's has three, the third None where there are no keys",
        ),
        preimage=lambda parent, tokens, keys: (parent, tokens) if keys is None else (parent, tokens, keys),
    ),
    Recipe(
        ("extra-leading-token", "the engine saw one token less at the start (BOS added here but not there)"),
        tokens=lambda tokens: tokens[1:],
    ),
    Recipe(
        ("untagged-keys", "the extra keys are untagged; from 0.31 vLLM hashes them with their tags"),
        keys=lambda _index, keys: untag(keys),
        needs_keys=True,
        needs_tag="",
    ),
    Recipe(
        (
            "missing-adapter-path",
            "the adapter's path is missing from its key; from 0.31 vLLM hashes ('lora', name, path)",
        ),
        keys=_map_lora(lambda key: key[:2]),
        needs_keys=True,
        needs_tag="lora",
    ),
    Recipe(
        (
            "empty-adapter-path",
            "the adapter's path is empty in its key; from 0.31 vLLM hashes ('lora', name, path)",
        ),
        keys=_map_lora(lambda key: (*key[:2], "")),
        needs_keys=True,
        needs_tag="lora",
    ),
    Recipe(
        (
            "null-adapter-path",
            "the adapter's path is None in its key; from 0.31 vLLM hashes ('lora', name, path)",
        ),
        keys=_map_lora(lambda key: (*key[:2], None)),
        needs_keys=True,
        needs_tag="lora",
    ),
    Recipe(("salt-ignored", "the cache salt was left out of block 0"), request=_dropped("cache_salt")),
    Recipe(("lora-ignored", "the LoRA adapter was left out"), request=_dropped("lora")),
    Recipe(("multimodal-ignored", "the multimodal items were left out"), request=_dropped("multimodal")),
    Recipe(
        ("prompt-embeds-ignored", "the prompt embeddings were left out"), request=_dropped("prompt_embeds")
    ),
)
CORRECT = Recipe()


def salt_everywhere(salt: str) -> Recipe:
    return Recipe(
        ("salt-on-every-block", "the cache salt is in every block's key; vLLM puts it into block 0's only"),
        keys=lambda index, keys: keys if index == 0 else (*(keys or ()), salt),
    )
