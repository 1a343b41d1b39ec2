"""The bodies of requests: their fields, types and limits. What vLLM knows and the engine has no use for is ignored.

A field of the wrong type is refused with its path; so are token ids that are no integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from .errors import ApiError, bad_request

__all__ = [
    "MAX_BODY",
    "ChatBody",
    "CompletionBody",
    "DetokenizeBody",
    "SamplingBody",
    "StreamOptions",
    "TokenizeBody",
    "decode",
    "decode_prompts",
]

#: Bytes of a body: some million token ids, or a longer text; past it nothing is read on.
MAX_BODY = 64 << 20
_T = TypeVar("_T")
_Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Count = Annotated[int, Meta(ge=0)]
_Salt = Annotated[str, Meta(min_length=1, max_length=1024)]


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream carries beside its tokens."""

    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


class SamplingBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that completions and chats share."""

    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: _Count = 0
    n: Annotated[int, Meta(ge=1, le=16384)] | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[_Count] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool | None = True
    seed: _Int64 | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=-1)] | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    cache_salt: _Salt | None = None
    priority: _Int64 = 0
    truncate_prompt_tokens: int | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    session_id: str | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
    multimodal: list[dict[str, Any]] | None = None


class CompletionBody(SamplingBody, frozen=True, kw_only=True):
    """``POST /v1/completions``. ``prompt`` is read by `decode_prompts`, ``prompt_embeds`` as request lines have it.

    ``max_tokens`` may be 0 with ``echo``.
    """

    prompt: msgspec.Raw = msgspec.Raw()
    max_tokens: _Count | None = None
    prompt_embeds: dict[str, Any] | None = None
    echo: bool | None = False
    logprobs: _Count | None = None
    suffix: str | None = None
    best_of: int | None = None


class ChatBody(SamplingBody, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: _Count | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    echo: bool | None = False


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /tokenize``: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /detokenize``."""

    tokens: list[_Count]
    model: str | None = None


def decode(data: bytes, kind: type[_T]) -> _T:
    """Read a body; raises ApiError that says what is wrong and where."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}") from None


def _refusal(message: str, *, prefix: str = "$") -> ApiError:
    what, _, path = message.rpartition(" - at `")
    if not what:
        what, path = message, "$`"
    path = prefix + path.rstrip("`").removeprefix("$")
    name = path.removeprefix("$.").partition("[")[0].partition(".")[0]
    return bad_request(f"{what} - at {path}", param=None if name == "$" else name)


def decode_prompts(raw: msgspec.Raw) -> Sequence[str | list[int]]:
    """Return the prompts of a completion: texts, or lists of token ids; raises ApiError."""
    data = bytes(raw)
    inner = data[1:].lstrip()
    kind: Any
    if data[:1] == b'"':
        kind = str
    elif data[:1] == b"[":
        kind = {b'"': list[str], b"[": list[list[_Count]]}.get(inner[:1], list[_Count])
    else:
        raise bad_request(
            "expected the prompt as text, token ids, or a list of these - at $.prompt", param="prompt"
        )
    try:
        value = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), prefix="$.prompt") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise bad_request(f"the prompt is not JSON: {error} - at $.prompt", param="prompt") from None
    prompts: Any = [value] if kind is str or (value and isinstance(value[0], int)) else value
    if not prompts or not all(prompts if isinstance(prompts[0], list) else [True]):
        raise bad_request("a prompt has at least one token - at $.prompt", param="prompt")
    return prompts  # type: ignore[no-any-return]
