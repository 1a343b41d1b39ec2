"""Options that several commands share, and how a prompt is read from them."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import click

from kvhash import InvalidRequestError
from kvhash.request import HashRequest, parse_json

__all__ = [
    "MAX_SIZE",
    "SEQUENCE",
    "Seconds",
    "output_option",
    "prompt_options",
    "read_file",
    "read_prompts",
    "read_request",
    "refuse_prompt",
    "request_options",
    "settings_of",
    "settings_options",
]

_F = TypeVar("_F", bound=Callable[..., Any])

#: What no block size and no context parallelism is above.
MAX_SIZE = (1 << 31) - 1
#: A batch's sequence number; 2^64 - 1 is the end marker of a replay.
SEQUENCE = click.IntRange(0, (1 << 64) - 2)
#: More than anybody waits, and less than what clocks overflow at.
_LONGEST_S = 1e9


class Seconds(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A time: a number from `least` to 1e9. A plain float would be infinite or, as no range refuses it, no number."""

    name = "seconds"

    def __init__(self, least: float = 0.0) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number of seconds; fails for anything else."""
        try:
            seconds = float(value)
        except (TypeError, ValueError):
            seconds = math.nan
        if not self.least <= seconds <= _LONGEST_S:
            self.fail(
                f"{value!r:.40} is no time; expected a number of seconds, from {self.least:g} to {_LONGEST_S:g}",
                param,
                ctx,
            )
        return seconds


def _stack(*decorators: Callable[[_F], _F]) -> Callable[[_F], _F]:
    return lambda function: functools.reduce(lambda inner, one: one(inner), reversed(decorators), function)


def output_option(*choices: str) -> Callable[[_F], _F]:
    """Return the ``-o`` option; the first choice is the default and never depends on where stdout goes."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(choices),
        default=choices[0],
        show_default=True,
        help="Output format.",
    )


def settings_options(function: _F) -> _F:
    """Add the engine's settings: release, algorithm, seed, block size, look-ahead, context parallelism."""
    return _stack(
        click.option(
            "--vllm", default=None, metavar="RELEASE", help="vLLM release, or 'latest'. [default: latest]"
        ),
        click.option(
            "--algorithm", default=None, metavar="NAME", help="--prefix-caching-hash-algo. [default: sha256]"
        ),
        click.option(
            "--hash-seed",
            default=None,
            metavar="TEXT",
            help="PYTHONHASHSEED of the engine; left out where the engine has none.",
        ),
        click.option(
            "--block-size", default=None, metavar="TOKENS", type=int, help="Tokens per block. [default: 16]"
        ),
        click.option(
            "--lookahead",
            default=None,
            metavar="N",
            type=int,
            help="Tokens after a block that its hash covers (drafters).",
        ),
        click.option(
            "--decode-context-parallel-size",
            default=None,
            metavar="N",
            type=int,
            help="A hash covers N times the block size.",
        ),
    )(function)


def request_options(function: _F) -> _F:
    """Add what a request contributes to the keys: salt, LoRA adapter, multimodal items, prompt embeddings."""
    return _stack(
        click.option("--cache-salt", default=None, metavar="TEXT", help="The request's cache_salt."),
        click.option(
            "--lora-name", default=None, metavar="TEXT", help="LoRA adapter name (hashed from 0.11.1)."
        ),
        click.option(
            "--lora-path", default=None, metavar="TEXT", help="LoRA adapter path (hashed from 0.31)."
        ),
        click.option(
            "--lora-id", default=None, metavar="N", type=int, help="LoRA integer id (hashed before 0.11.1)."
        ),
        click.option(
            "--multimodal",
            default=None,
            metavar="JSON",
            help='Items, e.g. \'[{"identifier":"img","offset":5,"length":40}]\'; JSON, @FILE or -.',
        ),
        click.option(
            "--prompt-embeds",
            default=None,
            metavar="JSON",
            help='{"shape":[rows,hidden],"dtype":"float16","data":"<hex>"}; JSON, @FILE or -.',
        ),
    )(function)


def prompt_options(function: _F) -> _F:
    """Add the ways to give a prompt: tokens, text, a chat, or an OpenAI request body."""
    return _stack(
        click.option(
            "--tokens", default=None, metavar="JSON", help="Token ids: JSON, @FILE, or - for stdin."
        ),
        click.option("--text", default=None, metavar="TEXT", help="A completions prompt: text, @FILE or -."),
        click.option("--chat", default=None, metavar="JSON", help="Chat messages: JSON, @FILE or -."),
        click.option(
            "--request",
            "openai_body",
            default=None,
            metavar="JSON",
            help="An OpenAI request body: JSON, @FILE or -.",
        ),
        click.option("--model", default=None, metavar="NAME", help="Tokenizer: a local folder or a hub id."),
        click.option("--revision", default=None, metavar="REV", help="The tokenizer's revision on the hub."),
        click.option("--trust-remote-code", is_flag=True, help="Run tokenizer code that the model brings."),
        click.option("--chat-template", default=None, metavar="FILE", help="A chat template file (Jinja)."),
        click.option("--tools", default=None, metavar="JSON", help="Tools of the chat: JSON, @FILE or -."),
        click.option(
            "--template-kwargs", default=None, metavar="JSON", help="chat_template_kwargs: JSON or @FILE."
        ),
        click.option(
            "--add-generation-prompt/--no-generation-prompt",
            default=None,
            help="Whether the template opens the assistant's turn. [default: yes]",
        ),
        click.option("--continue-final-message", is_flag=True, help="Leave the last message open."),
        click.option(
            "--add-special-tokens/--no-special-tokens",
            default=None,
            help="Override the endpoint's default: yes for text, no for a chat.",
        ),
    )(function)


def settings_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings and request fields that were given, under the names of request lines."""
    names = (
        "vllm",
        "algorithm",
        "hash_seed",
        "block_size",
        "lookahead",
        "decode_context_parallel_size",
        "cache_salt",
    )
    fields = {name: options[name] for name in names if options.get(name) is not None}
    lora = {
        name: options[f"lora_{name}"]
        for name in ("name", "path", "id")
        if options.get(f"lora_{name}") is not None
    }
    if lora:
        fields["lora"] = lora
    for name in ("multimodal", "prompt_embeds"):
        if options.get(name) is not None:
            fields[name] = parse_json(
                read_value(options[name], f"--{name.replace('_', '-')}"), what=f"--{name}"
            )
    return fields


def read_file(name: str) -> bytes:
    """Return the bytes of a file, or of stdin for ``-``."""
    if name == "-":
        with open_lines("-") as lines:
            return lines.read()
    return Path(name).read_bytes()


def open_lines(name: str) -> BinaryIO:
    """Open a file of lines, or stdin for ``-``."""
    if name != "-":
        return Path(name).open("rb")
    if sys.stdin is None:  # type: ignore[redundant-expr, unused-ignore]
        raise InvalidRequestError("stdin is closed", code="io")
    return open(sys.stdin.fileno(), "rb", closefd=False)


def read_value(text: str, option: str) -> bytes | str:
    """Return an option's value: itself, the file behind ``@``, or stdin for ``-``; raises when it is empty."""
    data: bytes | str = text
    if text == "-":
        data = read_file("-")
    elif text.startswith("@"):
        data = read_file(text[1:])
    if not data.strip():
        raise InvalidRequestError(f"{option} is empty", code="empty-input")
    return data


def _json(options: Mapping[str, Any], name: str, option: str) -> Any:
    value = options.get(name)
    return None if value is None else parse_json(read_value(value, option), what=option)


def refuse_prompt(options: Mapping[str, Any], instead: str) -> None:
    """Raise InvalidRequestError when a prompt option stands beside `instead`, which brings its own prompt."""
    for name, option in (
        ("tokens", "--tokens"),
        ("text", "--text"),
        ("chat", "--chat"),
        ("openai_body", "--request"),
    ):
        if options.get(name) is not None:
            raise InvalidRequestError(f"{option} and {instead} exclude each other", code="no-prompt")


def read_prompts(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the prompts that the options give, as request fields (tokens, and the salt that a request body holds).

    Raises InvalidRequestError unless exactly one way was used, and as the tokenizer does.
    """
    ways = [name for name in ("tokens", "text", "chat", "openai_body") if options.get(name) is not None]
    if len(ways) != 1:
        raise InvalidRequestError(
            "give the prompt in one way: --tokens, --text, --chat or --request (or lines, see --help)",
            code="no-prompt",
        )
    if ways == ["tokens"]:
        return [{"tokens": _json(options, "tokens", "--tokens")}]
    from kvhash.prompt import Tokenizer, tokens_from_openai

    # transformers says on stderr that there is no PyTorch, and more; a tokenizer needs none of it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

    body = _json(options, "openai_body", "--request")
    if body is not None and not isinstance(body, Mapping):
        raise InvalidRequestError(f"expected a request body, got {type(body).__name__}", at="$")
    tokenizer = None
    if options.get("model") is not None:
        tokenizer = Tokenizer(
            options["model"],
            revision=options.get("revision"),
            trust_remote_code=bool(options.get("trust_remote_code")),
        )
    elif body is None:
        raise InvalidRequestError(
            f"--{ways[0]} needs a tokenizer: --model FOLDER or hub id", code="no-tokenizer"
        )
    if ways == ["text"]:
        assert tokenizer is not None
        data = read_value(options["text"], "--text")
        text = data if isinstance(data, str) else _utf8(data)
        special = options.get("add_special_tokens")
        return [{"tokens": tokenizer.encode_text(text, add_special_tokens=special is None or special).tokens}]
    if ways == ["chat"]:
        body = {"messages": _json(options, "chat", "--chat")}
    body = {**body, **_chat_overrides(options)}
    return [
        {"tokens": prompt.tokens, **({} if prompt.cache_salt is None else {"cache_salt": prompt.cache_salt})}
        for prompt in tokens_from_openai(body, tokenizer)
    ]


def _chat_overrides(options: Mapping[str, Any]) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    tools = _json(options, "tools", "--tools")
    kwargs = _json(options, "template_kwargs", "--template-kwargs")
    if tools is not None:
        overrides["tools"] = tools
    if kwargs is not None:
        overrides["chat_template_kwargs"] = kwargs
    if options.get("chat_template") is not None:
        overrides["chat_template"] = _utf8(read_file(options["chat_template"]))
    for name in ("add_generation_prompt", "add_special_tokens"):
        if options.get(name) is not None:
            overrides[name] = options[name]
    if options.get("continue_final_message"):
        overrides["continue_final_message"] = True
    return overrides


def _utf8(data: bytes) -> str:
    from kvhash import InvalidEncodingError

    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidEncodingError(f"the text is not UTF-8: {error.reason} at byte {error.start}") from None


def read_request(options: Mapping[str, Any]) -> HashRequest:
    """Return the one request that the options describe; raises InvalidRequestError for several prompts."""
    prompts = read_prompts(options)
    if len(prompts) != 1:
        raise InvalidRequestError(f"expected one prompt, got {len(prompts)}", at="$.prompt")
    return HashRequest.of({**prompts[0], **settings_of(options)})


def request_from_line(text: str, defaults: Mapping[str, Any]) -> HashRequest:
    """Return the request of a request line given as JSON, ``@FILE`` or ``-``."""
    value = parse_json(read_value(text, "a request"), what="the request")
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"expected a JSON object, got {type(value).__name__}", at="$")
    from kvhash.request import parse_request

    return parse_request(value, defaults)
