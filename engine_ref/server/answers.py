"""From tokens to OpenAI's answers: objects, stream chunks, usage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..sampling import TextStream
from .frontend import Generation
from .logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from .text import EngineTokenizer, TokenIdText

__all__ = ["Answer", "Choice", "usage"]


def usage(generations: Sequence[Generation], n: int) -> dict[str, Any]:
    """Return the usage of an answer: a prompt that gave `n` choices counts once, and so do its cached tokens."""
    prompts = generations[::n]
    prompt = sum(len(g.request.prompt_token_ids) for g in prompts)
    generated = sum(len(g.token_ids) for g in generations)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + generated,
        "completion_tokens": generated,
        "prompt_tokens_details": {"cached_tokens": sum(g.num_cached_tokens for g in prompts)},
    }


class Choice:
    """One choice of an answer: its generation, and its text as it grows.

    With stop strings the text is made as the tokens come, so that none is taken after the one that ends it.
    """

    def __init__(
        self,
        index: int,
        generation: Generation,
        tokenizer: EngineTokenizer | None,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        echo: str = "",
        only_echo: bool = False,
    ) -> None:
        self.index = index
        self._tokenizer = tokenizer
        self.generation = generation
        self._include_stop = include_stop
        self._echo = echo
        self._only_echo = only_echo
        self._text: TextStream | TokenIdText = (
            TokenIdText() if tokenizer is None else TextStream(tokenizer, stop)
        )
        self._found = ""
        if stop and tokenizer is not None:
            generation.find_stop = self._find_stop
        self.text = ""
        #: Tokens whose text has been given out.
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def token_text(self, token_id: int) -> str:
        """Return the text of one token."""
        return str(token_id) if self._tokenizer is None else self._tokenizer.decode([token_id])

    def push(self, token_ids: Sequence[int]) -> str:
        """Take in tokens; returns the text that they add. Sets ``finish_reason`` with the last."""
        new, self._echo = self._echo, ""
        echoed = new
        self.num_tokens += len(token_ids)
        if self.generation.find_stop is None:
            new += self._text.push(token_ids)
        else:
            new, self._found = new + self._found, ""
        if self.generation.finished:
            new += self._text.finish()
            if self._text.stopped and self._include_stop:
                new += self._text.stop_string or ""
            self.finish_reason, self.stop_reason = self.generation.finish_reason, self.generation.stop_reason
        if self._only_echo:
            new = echoed
        self.text += new
        return new

    def _find_stop(self, token_ids: Sequence[int]) -> str | None:
        self._found += self._text.push(token_ids)
        return self._text.stop_string


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How one request is answered. ``token_ids``, ``prompt_token_ids``: whether choices carry them."""

    kind: Literal["text", "chat"]
    id: str
    model: str
    token_ids: bool = False
    prompt_token_ids: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Choice], n: int) -> dict[str, Any]:
        """Return the answer of a request that does not stream."""
        name = "text_completion" if self.kind == "text" else "chat.completion"
        return {
            **self._head(name),
            "choices": [self._whole(c) for c in choices],
            "usage": self.usage(choices, n),
        }

    def _whole(self, choice: Choice) -> dict[str, Any]:
        part: dict[str, Any] = {"index": choice.index}
        if self.kind == "text":
            part["text"] = choice.text
        else:
            part["message"] = {"role": "assistant", "content": choice.text}
        part |= {
            "logprobs": self._logprobs(choice, 0),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if choice.generation.prompt_logprobs is not None:
            part["prompt_logprobs"] = prompt_logprobs(choice.generation.prompt_logprobs, choice.token_text)
        if self.token_ids:
            part["token_ids"] = choice.generation.token_ids
        if self.prompt_token_ids:
            part["prompt_token_ids"] = choice.generation.request.prompt_token_ids
        return part

    def _logprobs(self, choice: Choice, first: int) -> dict[str, Any] | None:
        """Return the log-probabilities from output token `first` on; None where none were asked for or known."""
        known = choice.generation.logprobs
        if not known:
            return None
        if self.kind == "chat":
            return chat_logprobs(known[first:], choice.token_text)
        before = sum(len(choice.token_text(token.token_id)) for token in known[:first] if token is not None)
        return completion_logprobs(known[first:], choice.token_text, offset=before)

    def begin(self, choice: Choice) -> dict[str, Any] | None:
        """Return the chunk that begins a choice: a chat says who speaks."""
        if self.kind == "text":
            return None
        return self._chunk({"index": choice.index, "delta": {"role": "assistant", "content": ""}})

    def chunk(self, choice: Choice, text: str, token_ids: list[int]) -> dict[str, Any]:
        """Return the chunk of new tokens."""
        part: dict[str, Any] = {"index": choice.index}
        if self.kind == "text":
            part["text"] = text
        else:
            part["delta"] = {"content": text} if text else {}
        first = len(choice.generation.token_ids) - len(token_ids)
        part |= {
            "logprobs": self._logprobs(choice, first),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.token_ids:
            part["token_ids"] = token_ids
        return self._chunk(part)

    def _chunk(self, part: dict[str, Any]) -> dict[str, Any]:
        name = "text_completion" if self.kind == "text" else "chat.completion.chunk"
        return {**self._head(name), "choices": [part]}

    def usage_chunk(self, choices: Sequence[Choice], n: int) -> dict[str, Any]:
        """Return the last chunk of a stream that reports its usage."""
        name = "text_completion" if self.kind == "text" else "chat.completion.chunk"
        return {**self._head(name), "choices": [], "usage": self.usage(choices, n)}

    @staticmethod
    def running_usage(choice: Choice) -> dict[str, Any]:
        """Return what one choice has used so far, which is what each of its chunks says where that is asked for."""
        prompt = len(choice.generation.request.prompt_token_ids)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + choice.num_tokens,
            "completion_tokens": choice.num_tokens,
            "prompt_tokens_details": {"cached_tokens": choice.generation.num_cached_tokens},
        }

    @staticmethod
    def usage(choices: Sequence[Choice], n: int) -> dict[str, Any]:
        """Return what was used so far."""
        return usage([choice.generation for choice in choices], n)

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}
