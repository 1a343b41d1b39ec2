"""From a body to engine requests: the model's name to an adapter, text and chats to tokens, every limit checked."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvhash.contract import Contract
from kvhash.extra_keys import RequestKeys
from kvhash.prompt import tokens_from_openai

from ..flags import Adapter
from ..options import EngineOptions
from ..report import EngineRequest
from ..sampling import SamplingParams
from .errors import bad_request
from .protocol import ChatBody, CompletionBody, SamplingBody, TokenizeBody, decode_prompts
from .text import EngineTokenizer

__all__ = ["Prompts"]

#: Sequences that one request may start: prompts, times `n`.
_MAX_SEQUENCES = 4096
#: A temperature below this is greedy, as in vLLM.
_GREEDY_BELOW = 1e-5
#: The likeliest tokens that may be asked for beside each: vLLM's default of --max-logprobs.
_MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Makes engine requests of bodies. Its methods may take long (a tokenizer): call them in a worker thread.

    ``model_names``: names of the base model, the first one is answered.
    """

    options: EngineOptions
    model_names: tuple[str, ...]
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    tokenizer: EngineTokenizer | None = None
    chat_template: str | None = None
    trust_request_chat_template: bool = False

    def adapter(self, model: str | None) -> Adapter | None:
        """Return the adapter that a model name stands for, None for the base model; raises ApiError."""
        if not model or model in self.model_names:
            return None
        if model in self.adapters:
            return self.adapters[model]
        raise bad_request(f"The model `{model}` does not exist.", param="model")

    def completion(self, body: CompletionBody) -> list[EngineRequest]:
        """Return the requests of a completion, one a prompt; raises ApiError or KvHashErrors."""
        if bytes(body.prompt) in (b"", b"null"):
            raise bad_request("a completion needs a prompt", param="prompt")
        if body.suffix is not None:
            raise bad_request("suffix is not supported", param="suffix")
        special = True if body.add_special_tokens is None else body.add_special_tokens
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise bad_request("best_of is not supported, other than as n", param="best_of")
        if body.echo and body.logprobs is not None:
            raise bad_request("echo with logprobs is not supported; ask for prompt_logprobs", param="echo")
        if body.max_tokens == 0 and not body.echo:
            raise bad_request(
                "expected at least 1, or 0 with echo, got 0 - at $.max_tokens", param="max_tokens"
            )
        prompts = decode_prompts(body.prompt)
        _check_sequences(body, len(prompts))
        requests = []
        for i, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                if self.tokenizer is None:
                    raise bad_request(
                        "the engine has no tokenizer, so it takes prompts as token ids only; give it one with "
                        "--tokenizer",
                        param="prompt",
                    )
                at = "$.prompt" if len(prompts) == 1 else f"$.prompt[{i}]"
                encoded = self.tokenizer.encode_text(
                    prompt, add_special_tokens=special, max_model_len=self.options.max_model_len, at=at
                )
                tokens = list(encoded.tokens)
            else:
                tokens = prompt
            # As in vLLM one that only echoes makes one token, which its text leaves out and its usage counts.
            max_tokens = 16 if body.max_tokens is None else max(body.max_tokens, 1)
            requests.append(self._request(body, tokens, f"cmpl-{_id(body)}-{i}", max_tokens))
        return requests

    def chat(self, body: ChatBody) -> EngineRequest:
        """Return the request of a chat; raises ApiError or KvHashErrors."""
        _check_sequences(body, 1)
        tokens = self.chat_tokens(body, max_model_len=self.options.max_model_len)
        max_tokens = body.max_completion_tokens or body.max_tokens
        if max_tokens is None:
            max_tokens = max(self.options.max_model_len - len(tokens), 1)
        return self._request(body, tokens, f"chatcmpl-{_id(body)}", max_tokens)

    def chat_tokens(self, body: ChatBody | TokenizeBody, *, max_model_len: int | None = None) -> list[int]:
        """Return the tokens of a chat as the template writes it; one that cannot fit is refused before it is."""
        if self.tokenizer is None:
            raise bad_request("the engine has no tokenizer, which a chat needs; give it one with --tokenizer")
        given = {name: value for name, value in msgspec.structs.asdict(body).items() if value is not None}
        if "chat_template" in given and not self.trust_request_chat_template:
            raise bad_request(
                "Chat template is passed with request, but --trust-request-chat-template is not set.",
                param="chat_template",
            )
        if body.continue_final_message:
            # vLLM's own default asks for a generation prompt too, and only both given is refused.
            given["add_generation_prompt"] = False
        given.setdefault("chat_template", self.chat_template)
        given.pop("cache_salt", None)
        (chat,) = tokens_from_openai(given, self.tokenizer, max_model_len=max_model_len)
        return list(chat.tokens)

    def text_tokens(self, body: TokenizeBody) -> list[int]:
        """Return the tokens of a text."""
        if self.tokenizer is None:
            raise bad_request("the engine has no tokenizer; give it one with --tokenizer")
        assert body.prompt is not None
        special = True if body.add_special_tokens is None else body.add_special_tokens
        return list(self.tokenizer.encode_text(body.prompt, add_special_tokens=special).tokens)

    def _request(
        self, body: SamplingBody, tokens: Sequence[int], request_id: str, max_tokens: int
    ) -> EngineRequest:
        tokens = list(tokens)
        self._check_tokens(tokens, max_tokens)
        if body.priority and self.options.scheduling_policy != "priority":
            raise bad_request(
                "a priority needs an engine with --scheduling-policy priority; this one has fcfs",
                param="priority",
            )
        if body.min_tokens > max_tokens:
            raise bad_request(
                f"min_tokens ({body.min_tokens}) is more than max_tokens ({max_tokens})", param="min_tokens"
            )
        self.check_vocabulary(body.stop_token_ids or [], "stop_token_ids")
        if body.stop is not None and "" in ([body.stop] if isinstance(body.stop, str) else body.stop):
            raise bad_request("a stop string has at least one character", param="stop")
        if body.truncate_prompt_tokens is not None:
            raise bad_request("truncate_prompt_tokens is not supported", param="truncate_prompt_tokens")
        if body.stop and self.tokenizer is None:
            raise bad_request("stop strings need a tokenizer; give one with --tokenizer", param="stop")
        adapter = self.adapter(body.model)
        lora = adapter.key() if adapter else None
        embeds = body.prompt_embeds if isinstance(body, CompletionBody) else None
        # Hashing is the engine's; what is wrong with the keys is said here, to the client.
        keys = RequestKeys.of(
            lora=lora,
            cache_salt=body.cache_salt,
            multimodal=body.multimodal,
            prompt_embeds=embeds,
            num_tokens=len(tokens),
        )
        if keys.lora:
            keys.lora.key(self._contract)
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=tokens,
            max_tokens=max_tokens,
            min_tokens=body.min_tokens,
            eos_token_id=None if body.ignore_eos else self._eos_token_id,
            stop_token_ids=body.stop_token_ids or [],
            cache_salt=body.cache_salt,
            lora=lora,
            multimodal=body.multimodal,
            prompt_embeds=embeds,
            priority=body.priority,
            arrival_time=time.time(),
            skip_reading_prefix_cache=body.prompt_logprobs is not None,
            sampling=_sampling(body),
        )

    @property
    def _contract(self) -> Contract:
        return Contract.for_vllm(self.options.emulate_vllm)

    @property
    def _eos_token_id(self) -> int | None:
        if self.options.info.eos_token_id is not None:
            return self.options.info.eos_token_id
        return self.tokenizer.eos_token_id if self.tokenizer else None

    def _check_tokens(self, tokens: Sequence[int], max_tokens: int) -> None:
        longest = self.options.max_model_len
        if not tokens:
            raise bad_request("a prompt has at least one token", param="prompt")
        if len(tokens) >= longest:
            raise bad_request(
                f"This model's maximum context length is {longest} tokens. However, your prompt contains "
                f"{len(tokens)} input tokens, which leaves no room for output. Please reduce the length of the prompt.",
                param="prompt",
            )
        if len(tokens) + max_tokens > longest:
            raise bad_request(
                f"This model's maximum context length is {longest} tokens. However, you requested {max_tokens} output "
                f"tokens and your prompt contains {len(tokens)} input tokens, {len(tokens) + max_tokens} in all. "
                "Please reduce the length of the prompt or the number of output tokens.",
                param="max_tokens",
            )
        self.check_vocabulary(tokens, "prompt")

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of a prompt, to be echoed."""
        if self.tokenizer is None:
            return "".join(f"{token} " for token in tokens)
        return self.tokenizer.decode(tokens)

    def check_vocabulary(self, tokens: Sequence[int], param: str) -> None:
        """Raise ApiError for a token id that the model does not have."""
        size = self.options.info.vocab_size
        if tokens and max(tokens) >= size:
            bad = next(i for i, token in enumerate(tokens) if token >= size)
            raise bad_request(
                f"Token id {tokens[bad]} is out of vocabulary: expected 0 to {size - 1} - at $.{param}[{bad}]",
                param=param,
            )


def _check_sequences(body: SamplingBody, num_prompts: int) -> None:
    """Raise ApiError for more sequences than one request may start, or for several greedy choices."""
    n = body.n or 1
    if n > 1 and body.temperature is not None and body.temperature < _GREEDY_BELOW:
        raise bad_request(f"n must be 1 when using greedy sampling, got {n}", param="n")
    if num_prompts * n > _MAX_SEQUENCES:
        raise bad_request(
            f"expected at most {_MAX_SEQUENCES} sequences in a request, got {num_prompts} prompts "
            f"with n = {n}",
            param="n" if num_prompts == 1 else "prompt",
        )


def _sampling(body: SamplingBody) -> dict[str, Any]:
    """Return the sampling parameters that a body gives; raises InvalidRequestError."""
    names = ("temperature", "top_p", "top_k", "min_p", "seed")
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        raise bad_request("when using `top_logprobs`, `logprobs` must be set to true", param="top_logprobs")
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        asked = getattr(body, name, None)
        if type(asked) is int and not -1 < asked <= _MAX_LOGPROBS:
            wanted = "those of the whole vocabulary" if asked < 0 else asked
            raise bad_request(
                f"expected at most {_MAX_LOGPROBS} log-probabilities a token, got {wanted} - at $.{name}",
                param=name,
            )
    if isinstance(body, CompletionBody):
        given["logprobs"] = body.logprobs
    elif isinstance(body, ChatBody) and body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    if body.prompt_logprobs is not None:
        given["prompt_logprobs"] = body.prompt_logprobs
    SamplingParams(**given)
    return given


def _id(body: SamplingBody) -> str:
    return body.request_id or uuid.uuid4().hex
