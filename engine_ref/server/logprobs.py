"""Log-probabilities in the forms of OpenAI's completions and chats, and vLLM's of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..sampling import TokenLogprobs

__all__ = ["chat_logprobs", "completion_logprobs", "prompt_logprobs"]

_Text = Callable[[int], str]


def completion_logprobs(
    tokens: Sequence[TokenLogprobs | None], text: _Text, *, offset: int = 0
) -> dict[str, Any]:
    """Return the object of a completion's choice; `offset`: where its text begins."""
    known = [token for token in tokens if token is not None]
    texts = [text(token.token_id) for token in known]
    offsets = []
    for one in texts:
        offsets.append(offset)
        offset += len(one)
    return {
        "text_offset": offsets,
        "token_logprobs": [token.logprob for token in known],
        "tokens": texts,
        "top_logprobs": [{text(i): value for i, value in token.top.items()} for token in known],
    }


def chat_logprobs(tokens: Sequence[TokenLogprobs | None], text: _Text) -> dict[str, Any]:
    """Return the object of a chat's choice."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        written = text(token_id)
        return {"token": written, "logprob": logprob, "bytes": list(written.encode("utf-8", "replace"))}

    return {
        "content": [
            entry(token.token_id, token.logprob)
            | {"top_logprobs": [entry(i, value) for i, value in token.top.items()]}
            for token in tokens
            if token is not None
        ]
    }


def prompt_logprobs(tokens: Sequence[TokenLogprobs | None], text: _Text) -> list[dict[str, Any] | None]:
    """Return vLLM's list: for each prompt token its own and the likeliest, by id; None for the first."""

    def described(token: TokenLogprobs) -> dict[str, Any]:
        by_rank = sorted(token.top.items(), key=lambda item: -item[1])
        ranks = {i: rank for rank, (i, _) in enumerate(by_rank, 1)}
        values = {**token.top, token.token_id: token.logprob}
        return {
            str(i): {"logprob": value, "rank": ranks.get(i, token.rank), "decoded_token": text(i)}
            for i, value in values.items()
        }

    return [None if token is None else described(token) for token in tokens]
