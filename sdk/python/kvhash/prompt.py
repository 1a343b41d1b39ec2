"""Text and chats to token ids, as vLLM's completions and chat endpoints make them. Needs ``kvhash[tokenizer]``.

* Text (``/v1/completions``): encoded with the tokenizer's default special tokens.
* Chat (``/v1/chat/completions``): rendered by the chat template, then encoded *without* special tokens, since the
  template writes its own: no second BOS.

Source: vLLM 0.33.0's renderers, and its OpenAI protocol for defaults.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ._checks import check_text, normalize_tokens
from ._errors import InvalidRequestError, InvalidSaltError, MissingDependencyError, TokenizerError

__all__ = ["ContentFormat", "PromptTokens", "Tokenizer", "tokens_from_openai"]

ContentFormat = Literal["auto", "string", "openai"]


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt as the engine sees it: token ids, the rendered text where there was one, and the request's salt."""

    tokens: tuple[int, ...]
    text: str | None = None
    cache_salt: str | None = None


class Tokenizer:
    """A Hugging Face tokenizer with vLLM's rules for special tokens.

    ``model``: a local folder or a hub id. Raises MissingDependencyError without transformers, TokenizerError when the
    tokenizer cannot be loaded.
    """

    def __init__(
        self, model: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
    ) -> None:
        try:
            import transformers
        except ImportError:
            raise MissingDependencyError(
                "text and chat prompts need transformers; install it with: pip install 'kvhash[tokenizer]'"
            ) from None
        name = str(model)
        if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
            raise TokenizerError(f"no such tokenizer folder: {name}")
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name,
                revision=revision,
                trust_remote_code=trust_remote_code,
            )
        except Exception as error:  # whatever a tokenizer's own code raises
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise TokenizerError(f"cannot load the tokenizer {name!r}: {first}") from error

    @cached_property
    def max_chars_per_token(self) -> int:
        """The characters of the longest token as the vocabulary writes it, from which vLLM bounds a text."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def encode_text(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        max_model_len: int | None = None,
        at: str = "$.prompt",
    ) -> PromptTokens:
        """Return the tokens of a completions prompt; special tokens as the tokenizer adds them by default.

        `max_model_len` (tokens): a text that cannot fit into that many is refused before it is tokenized. Raises
        InvalidRequestError, or TokenizerError when the tokenizer refuses it.
        """
        check_text(text, at=at, what="the prompt")
        return self._encode(text, add_special_tokens, max_model_len, at=at)

    def _encode(
        self, text: str, add_special_tokens: bool, max_model_len: int | None, *, at: str
    ) -> PromptTokens:
        if max_model_len is not None and len(text) > (most := max_model_len * self.max_chars_per_token):
            raise InvalidRequestError(
                f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
                f"{len(text)} characters, and {max_model_len} tokens have at most {most}. Please reduce the length "
                "of the prompt.",
                at=at,
            )
        with _refusals("the tokenizer refuses the text", at=at):
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return PromptTokens(tuple(normalize_tokens(ids)), text)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        content_format: ContentFormat = "auto",
        max_model_len: int | None = None,
    ) -> PromptTokens:
        """Return the tokens of a chat, rendered by the tokenizer's template or by `chat_template` (Jinja text).

        `add_generation_prompt` and `continue_final_message` exclude each other. `content_format` says whether the
        template takes a message's content as text or as a list of parts; ``"auto"`` reads that off the template.
        `chat_template_kwargs` are the template's own variables; as in vLLM one that is None or "auto", or that the
        template does not name, has no effect, `documents` and the two flags win over theirs, and their ``tools`` over
        `tools`. `max_model_len` (tokens): a rendered chat that cannot fit is refused before it is tokenized.
        Raises InvalidRequestError for a malformed chat, TokenizerError when there is no template or it refuses.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                at="$.continue_final_message",
            )
        extra = _template_kwargs(chat_template_kwargs)
        _check_kind(chat_template, str, "a template as text", at="$.chat_template")
        given = extra.pop("tools", None)
        _check_kind(given, (list, tuple), "a list of tools", at="$.chat_template_kwargs.tools")
        template = chat_template if chat_template is not None else self._template(given or tools)
        tree = _parse_template(template)
        if content_format == "auto":
            content_format = _detect_content_format(tree)
        conversation = [
            _message(message, content_format, at=f"$.messages[{i}]")
            for i, message in enumerate(_list(messages))
        ]
        described = None if tools is None else _tools(tools)
        _check_kind(documents, (list, tuple), "a list of documents", at="$.documents")
        own_documents = extra.pop("documents", None)
        with _refusals("the chat template refuses the chat", at="$.messages"):
            text = self._tokenizer.apply_chat_template(
                conversation,
                tools=described if given is None else given,
                chat_template=template,
                documents=own_documents if documents is None else documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **self._known(extra, tree),
            )
        return self._encode(text, add_special_tokens, max_model_len, at="$.messages")

    def _known(self, variables: Mapping[str, Any], tree: Any) -> dict[str, Any]:
        """Return the variables that the template names; all of them for a tokenizer with a way of its own."""
        import transformers

        own = getattr(type(self._tokenizer), "apply_chat_template", None)
        if tree is None or own is not transformers.PreTrainedTokenizerBase.apply_chat_template:
            return dict(variables)
        from jinja2 import meta

        named = meta.find_undeclared_variables(tree)
        return {name: value for name, value in variables.items() if name in named}

    def _template(self, tools: object) -> str:
        template = self._tokenizer.chat_template
        if isinstance(template, Mapping):
            template = template.get("tool_use" if tools and "tool_use" in template else "default")
        if not isinstance(template, str):
            raise TokenizerError("the tokenizer has no chat template; give one (--chat-template FILE)")
        return template


#: What a chat template gets from elsewhere, so that no request can name it among the template's variables.
_NOT_KWARGS = frozenset(
    {
        "chat_template",
        "conversation",
        "conversations",
        "messages",
        "model_config",
        "self",
        "tokenize",
        "tokenizer",
    }
)


@contextlib.contextmanager
def _refusals(what: str, *, at: str) -> Iterator[None]:
    """Make what a template or a tokenizer raises over its input a TokenizerError."""
    try:
        yield
    except BaseException as error:  # a template raises what it likes; a tokenizer's panic is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise TokenizerError(f"{what}: {why}", at=at) from error


def _check_kind(value: object, kind: type | tuple[type, ...], expected: str, *, at: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise InvalidRequestError(f"expected {expected}, got {type(value).__name__}", at=at)


def _template_kwargs(kwargs: object) -> dict[str, Any]:
    """Return the variables that a request gives the template, without those that mean nothing given."""
    at = "$.chat_template_kwargs"
    _check_kind(kwargs, Mapping, "an object", at=at)
    given: Mapping[str, Any] = kwargs or {}  # type: ignore[assignment]
    for name in given:
        if not isinstance(name, str):
            raise InvalidRequestError("expected names as text", at=at)
        if name in _NOT_KWARGS:
            raise InvalidRequestError(f"{name!r} is no variable that a request can give", at=f"{at}.{name}")
    flags = ("add_generation_prompt", "continue_final_message")  # the request's own fields always win
    return {
        name: value
        for name, value in given.items()
        if name not in flags and value is not None and not (isinstance(value, str) and value == "auto")
    }


def _list(messages: object) -> list[Any]:
    if not isinstance(messages, (list, tuple)):
        raise InvalidRequestError(
            f"expected a list of messages, got {type(messages).__name__}", at="$.messages"
        )
    if not messages:
        raise InvalidRequestError("expected at least one message", at="$.messages")
    return list(messages)


def _message(message: object, content_format: ContentFormat, *, at: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"expected a message object, got {type(message).__name__}", at=at)
    if not isinstance(message.get("role"), str):
        raise InvalidRequestError("a message needs a role, as text", at=f"{at}.role")
    result = dict(message)
    content = result.get("content")
    if isinstance(content, str):
        result["content"] = [{"type": "text", "text": content}] if content_format == "openai" else content
    elif isinstance(content, (list, tuple)):
        texts = [_part_text(part, at=f"{at}.content[{i}]") for i, part in enumerate(content)]
        result["content"] = (
            [{"type": "text", "text": text} for text in texts]
            if content_format == "openai"
            else "\n".join(texts)
        )
    elif content is not None:
        raise InvalidRequestError("expected the content as text or a list of parts", at=f"{at}.content")
    calls = result.get("tool_calls")
    if calls is not None and result["role"] == "assistant":
        if not isinstance(calls, (list, tuple)):
            raise InvalidRequestError(
                f"expected a list of tool calls, got {type(calls).__name__}", at=f"{at}.tool_calls"
            )
        if calls:
            result["tool_calls"] = [
                _tool_call(call, at=f"{at}.tool_calls[{i}]") for i, call in enumerate(calls)
            ]
        else:
            del result["tool_calls"]
    return result


def _part_text(part: object, *, at: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequestError(
        f"only text parts can be tokenized here, got {kind!r}; give the expanded token ids and multimodal items",
        at=at,
    )


def _tool_call(call: object, *, at: str) -> dict[str, Any]:
    """Return the call with its arguments as an object, which is what templates expect."""
    if (
        not isinstance(call, Mapping)
        or not isinstance(call.get("function"), Mapping)
        or call.get("type", "function") != "function"
    ):
        raise InvalidRequestError("expected a tool call of type 'function'", at=at)
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise InvalidRequestError("the arguments are not JSON", at=f"{at}.function.arguments") from None
    elif not arguments:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise InvalidRequestError(
            f"expected the arguments as a JSON object, got {type(arguments).__name__}",
            at=f"{at}.function.arguments",
        )
    function["arguments"] = arguments
    return {**call, "function": function}


def _tools(tools: object) -> list[dict[str, Any]]:
    _check_kind(tools, (list, tuple), "a list of tools", at="$.tools")
    return [_tool(tool, at=f"$.tools[{i}]") for i, tool in enumerate(tools)]  # type: ignore[arg-type, var-annotated]


def _tool(tool: object, *, at: str) -> dict[str, Any]:
    """Return the tool with the fields, and in the order, in which vLLM's protocol hands it to the template."""
    if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
        raise InvalidRequestError("expected a tool of type 'function'", at=at)
    function = tool["function"]
    if not isinstance(function.get("name"), str):
        raise InvalidRequestError("a function needs a name", at=f"{at}.function.name")
    described = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        described["strict"] = function["strict"]
    return {"type": tool.get("type", "function"), "function": described}


def _parse_template(template: str) -> Any:
    """Return the template's syntax tree; None when it does not parse, which rendering it then says."""
    import jinja2
    from jinja2.ext import Extension

    class Generation(Extension):  # type: ignore[misc]
        """The block that transformers marks an assistant's tokens with."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            """Return what the block holds."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        return jinja2.Environment(extensions=["jinja2.ext.loopcontrols", Generation]).parse(template)
    except (jinja2.TemplateError, RecursionError):
        return None


def _detect_content_format(tree: Any) -> ContentFormat:
    """Return ``"openai"`` when the template loops over a message's content, else ``"string"``."""
    from jinja2 import nodes

    if tree is None:
        return "string"
    content_names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _mentions_content(assign.node, content_names):
            content_names.add(assign.target.name)
    loops = any(_mentions_content(loop.iter, content_names) for loop in tree.find_all(nodes.For))
    return "openai" if loops else "string"


def _mentions_content(node: Any, names: set[str]) -> bool:
    from jinja2 import nodes

    if isinstance(node, nodes.Filter):
        return node.node is not None and _mentions_content(node.node, names)
    if isinstance(node, nodes.Getattr):
        return bool(node.attr == "content")
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _mentions_content(node.node, names)
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names


#: Fields of a chat request that reach the template or the tokenizer.
_CHAT_OPTIONS = (
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
)


def tokens_from_openai(
    body: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    *,
    content_format: ContentFormat = "auto",
    max_model_len: int | None = None,
) -> list[PromptTokens]:
    """Return the prompts of an OpenAI request body: ``/v1/chat/completions`` (messages) or ``/v1/completions``.

    A completions prompt may be text, token ids, or a list of either; token ids need no `tokenizer` (None). Sampling
    and other fields that do not reach the prompt are ignored. `max_model_len` (tokens): text that cannot fit is refused
    before it is tokenized. Raises InvalidRequestError or TokenizerError.
    """
    if not isinstance(body, Mapping):
        raise InvalidRequestError(f"expected a request body, got {type(body).__name__}", at="$")
    salt = body.get("cache_salt")
    if salt is not None:
        check_text(salt, at="$.cache_salt", what="the cache salt", error=InvalidSaltError)
    if "messages" in body:
        if tokenizer is None:
            raise InvalidRequestError("a chat needs a tokenizer (--model)", at="$.messages")
        options = {name: body[name] for name in _CHAT_OPTIONS if body.get(name) is not None}
        if options.get("continue_final_message") and "add_generation_prompt" not in options:
            options["add_generation_prompt"] = False
        chat = tokenizer.encode_chat(
            body["messages"], content_format=content_format, max_model_len=max_model_len, **options
        )
        return [PromptTokens(chat.tokens, chat.text, salt)]
    if "prompt" not in body:
        raise InvalidRequestError("expected 'messages' (chat) or 'prompt' (completions)", at="$")
    prompt = body["prompt"]
    prompts = (
        prompt
        if isinstance(prompt, list) and (not prompt or isinstance(prompt[0], (str, list)))
        else [prompt]
    )
    special = body.get("add_special_tokens", True)
    result = []
    for i, one in enumerate(prompts):
        at = "$.prompt" if prompts is not prompt else f"$.prompt[{i}]"
        if isinstance(one, str):
            if tokenizer is None:
                raise InvalidRequestError("a text prompt needs a tokenizer (--model)", at=at)
            encoded = tokenizer.encode_text(
                one, add_special_tokens=bool(special), max_model_len=max_model_len, at=at
            )
            result.append(PromptTokens(encoded.tokens, one, salt))
        else:
            result.append(PromptTokens(tuple(normalize_tokens(one, at=at)), None, salt))
    return result
