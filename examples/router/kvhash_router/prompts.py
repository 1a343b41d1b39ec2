"""A request's body to what the engines hash: token ids, salt and adapter, and from them the exact block hashes.

What cannot be hashed here (an image, prompt embeddings, a prompt that the engine is told not to look up) is no error:
the prompt then has no hashes, with the reason, and load alone decides. The engine judges the request itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhash import BlockHasher, KvHashError, Lora
from kvhash.block_hash import ChainValue
from kvhash.prompt import PromptTokens, Tokenizer, tokens_from_openai
from kvhash.request import HashRequest

from .config import ConfigError, ModelConfig

__all__ = ["HashedPrompt", "Plan", "PromptHasher"]


#: Fields of a request that change what is hashed, or which tokens the prompt has, in ways that only the engine knows:
#: each with the reason. Given as null, or as an empty list or object, they say nothing.
_ENGINE_ONLY = {
    "prompt_embeds": "prompt-embeds: their bytes are hashed as the engine decodes them",
    "multimodal": "multimodal: the items' identifiers are hashed with their blocks, not the tokens alone",
    "mm_processor_kwargs": "multimodal: the engine's processor decides what is hashed",
    "media_io_kwargs": "multimodal: the engine's processor decides what is hashed",
    "truncate_prompt_tokens": "truncated: the engine cuts the prompt, and hashes what is left",
}

#: The endpoints whose prompts are known, and the field of the other one, which they do not read.
_UNREAD = {"/v1/completions": "messages", "/v1/chat/completions": "prompt"}

#: More output tokens than any request makes; larger numbers do not fit a float.
_MOST_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """One prompt: its tokens, and the hash of every full block of `span` tokens."""

    request: HashRequest = field(repr=False)
    hashes: tuple[ChainValue, ...] = field(repr=False)
    span: int

    @property
    def num_tokens(self) -> int:
        """The prompt's length in tokens."""
        return len(self.request.tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request asks for: its model, adapter, prompts and most output tokens.

    ``unhashed``: why there are no prompts; None when there are. ``estimated_tokens`` stands in for their length then.
    """

    model: str
    adapter: str | None
    prompts: tuple[HashedPrompt, ...]
    max_tokens: int | None
    unhashed: str | None = None
    estimated_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        """The tokens of all prompts, or an estimate from the body's length."""
        return sum(prompt.num_tokens for prompt in self.prompts) or self.estimated_tokens


class PromptHasher:
    """Plans the requests of one model. Loads its tokenizer; raises ConfigError when that cannot be."""

    def __init__(self, name: str, config: ModelConfig) -> None:
        self.name = name
        self.config = config
        self.hasher: BlockHasher = config.hash.hasher()
        self._tokenizer: Tokenizer | None = None
        self._template: str | None = None
        at = f"$.models.{name}"
        try:
            if config.tokenizer is not None:
                self._tokenizer = Tokenizer(config.tokenizer)
        except KvHashError as error:
            raise ConfigError(error.message, at=f"{at}.tokenizer") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot load the tokenizer: {error}", at=f"{at}.tokenizer") from None
        try:
            if config.chat_template is not None:
                self._template = Path(config.chat_template).read_text(encoding="utf-8")
        except (
            OSError,
            ValueError,
        ) as error:  # a name with a NUL is a ValueError, as is text that is not UTF-8
            raise ConfigError(f"cannot read the template: {error}", at=f"{at}.chat_template") from None

    def plan(
        self, body: Mapping[str, Any], adapter: str | None, *, path: str | None = None, body_bytes: int = 0
    ) -> Plan:
        """Return what `body` asks for at `path` (None: what its fields say); never raises for what a body holds."""
        max_tokens = _max_tokens(body)
        try:
            body, reason = _read_at(path, body)
            reason = reason or _not_looked_up(body)
            prompts = () if reason else tuple(self._hash(one, adapter) for one in self._tokens(body))
        except KvHashError as error:
            reason, prompts = f"{error.code}: {error}", ()
        except Exception as error:  # a body may hold anything, and templates raise what they like
            reason, prompts = f"unreadable: {type(error).__name__}: {error}", ()
        if not prompts and reason is None:
            reason = "no-prompt: there is nothing to compute"
        return Plan(self.name, adapter, prompts, max_tokens, reason, max(1, body_bytes // 4))

    def _tokens(self, body: Mapping[str, Any]) -> Sequence[PromptTokens]:
        if "messages" in body and self._template is not None and body.get("chat_template") is None:
            body = {**body, "chat_template": self._template}
        return tokens_from_openai(body, self._tokenizer, content_format=self.config.content_format)

    def _hash(self, prompt: PromptTokens, adapter: str | None) -> HashedPrompt:
        settings = self.config.hash
        lora: Lora | None = None if adapter is None else self.config.lora(adapter)
        request = HashRequest(
            tokens=prompt.tokens,
            vllm=settings.vllm,
            algorithm=settings.algorithm,
            hash_seed=settings.hash_seed,
            block_size=settings.block_size,
            lookahead=settings.lookahead,
            decode_context_parallel_size=settings.decode_context_parallel_size,
            lora=lora,
            cache_salt=prompt.cache_salt or None,
        )
        hashes = request.chain(self.hasher).block_hashes
        return HashedPrompt(request, tuple(hashes), self.hasher.span)


def _read_at(path: str | None, body: Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
    """Return the body without what the endpoint does not read, and why its prompt is not known here, or None."""
    if path is None:
        return body, None
    unread = _UNREAD.get(path)
    if unread is None:
        return body, f"other-endpoint: what {path:.80} makes of a body is not known here"
    return {name: value for name, value in body.items() if name != unread}, None


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if type(value) is int and value > 0:
            return min(value, _MOST_TOKENS)
    return None


def _not_looked_up(body: Mapping[str, Any]) -> str | None:
    """Return why an engine would not use its prefix cache for this body, or why its keys are not known here."""
    for name, reason in _ENGINE_ONLY.items():
        value = body.get(name)
        if value is not None and value != [] and value != {}:
            return reason
    if "messages" in body and body.get("reasoning_effort") is not None:
        return "reasoning-effort: what the template gets of it depends on the engine's release and flags"
    if body.get("prompt_logprobs") is not None or (body.get("echo") and body.get("logprobs") is not None):
        return "prompt-logprobs: the engine computes the whole prompt for them"
    return None
