from collections.abc import Callable, Sequence
from typing import Any, Literal, final

__version__: str

@final
class Tokens:
    def __len__(self) -> int: ...

def probed() -> list[str]: ...
def take_tokens(tokens: Any) -> Tokens | None: ...
def bare_sha256_chain(lengths: Sequence[int], *, padded: bool = False) -> bytes: ...

@final
class Engine:
    def __new__(
        cls,
        *,
        serialization: Literal["pickle5", "cbor"],
        digest: Literal["sha256", "xxh3_128"],
        low64: bool,
        chain_values: Literal["int", "bytes"],
        none_hash: bytes,
        span: int,
        lookahead: int,
        lora_key: Literal["id", "name", "name_and_path"],
        multimodal_key: Literal["identifier", "identifier_and_offset"],
        prompt_embeds_key: Literal["absent", "bytes", "sha256"],
        tagged_keys: bool,
    ) -> Engine: ...
    def chain(
        self,
        *,
        lora: tuple[str | None, str | None, int | None] | None = None,
        cache_salt: str | None = None,
        multimodal: Sequence[tuple[str, int, int]] = ...,
        prompt_embeds: tuple[int, bytes] | None = None,
    ) -> Chain: ...
    def hash_tokens(self, tokens: Any) -> list[Any] | None: ...
    def hash_batch(
        self, prompts: Sequence[Any], normalize: Callable[[int], list[int]], threads: int
    ) -> list[list[Any]]: ...

@final
class Chain:
    def append(self, tokens: Tokens) -> list[Any]: ...
    @property
    def pending(self) -> int: ...
    def following(self) -> list[int]: ...
    def copy(self) -> Chain: ...
