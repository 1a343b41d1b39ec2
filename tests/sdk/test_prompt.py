"""Text and chats to tokens with a real BPE tokenizer, as vLLM's endpoints make them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvhash import InvalidRequestError, KvHashError, TokenizerError
from kvhash.prompt import Tokenizer, tokens_from_openai

from ..tokenizer_files import PARTS_TEMPLATE, make_tokenizer

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The quick brown fox"}]
TOOL = {"type": "function", "function": {"parameters": {"type": "object"}, "name": "look", "extra": 1}}


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    """Return the tokenizer under test."""
    return Tokenizer(tokenizer_folder)


@pytest.fixture(scope="module")
def raw(tokenizer_folder: Path) -> Any:
    """Return transformers' own tokenizer of the same folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


def test_text_has_the_tokenizers_default_special_tokens(tokenizer: Tokenizer, raw: Any) -> None:
    """A completions prompt begins with BOS because the tokenizer adds one, unless the request says no."""
    text = "The router knows the prefix, naïvely."
    assert list(tokenizer.encode_text(text).tokens) == raw(text)["input_ids"]
    assert tokenizer.encode_text(text).tokens[0] == raw.bos_token_id
    bare = tokenizer.encode_text(text, add_special_tokens=False).tokens
    assert bare == tokenizer.encode_text(text).tokens[1:]


def test_a_chat_has_one_bos(tokenizer: Tokenizer, raw: Any) -> None:
    """The template writes BOS itself, so encoding its text must not add a second."""
    chat = tokenizer.encode_chat(MESSAGES)
    expected = raw.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert list(chat.tokens) == list(expected)
    assert chat.tokens.count(raw.bos_token_id) == 1
    assert chat.text is not None
    assert chat.text.endswith("<|assistant|>")


def test_text_and_chat_share_at_most_the_bos(tokenizer: Tokenizer) -> None:
    """Hashing the bare text of a chat finds nothing: the template's tokens come first."""
    text = tokenizer.encode_text("The quick brown fox").tokens
    chat = tokenizer.encode_chat(MESSAGES[1:]).tokens
    common = next(i for i, (a, b) in enumerate(zip(text, chat, strict=False)) if a != b)
    assert common == 1


def test_tools_kwargs_and_flags_reach_the_template(tokenizer: Tokenizer) -> None:
    """Each part of a chat request that the template sees changes the tokens."""
    base = tokenizer.encode_chat(MESSAGES)
    variants = [
        tokenizer.encode_chat(MESSAGES, tools=[TOOL]),
        tokenizer.encode_chat(MESSAGES, chat_template_kwargs={"style": "dry"}),
        tokenizer.encode_chat(MESSAGES, add_generation_prompt=False),
        tokenizer.encode_chat(MESSAGES, add_generation_prompt=False, continue_final_message=True),
        tokenizer.encode_chat(MESSAGES, chat_template="{{ bos_token }}{{ messages[-1].content }}"),
        tokenizer.encode_chat(MESSAGES, add_special_tokens=True),
    ]
    assert len({base.tokens, *(variant.tokens for variant in variants)}) == 7
    assert variants[3].text is not None
    assert variants[3].text.endswith("The quick brown fox")


def test_tools_are_written_as_the_engines_protocol_writes_them(tokenizer: Tokenizer) -> None:
    """The function's fields in the protocol's order, absent ones null, unknown ones gone."""
    text = tokenizer.encode_chat(MESSAGES, tools=[TOOL]).text or ""
    shown = json.loads(text[text.index("<tools>") + 7 : text.index("</tools>")])
    function = {"name": "look", "description": None, "parameters": {"type": "object"}}
    assert json.dumps(shown) == json.dumps([{"type": "function", "function": function}])


def test_content_parts_follow_the_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Text parts are joined by newlines, or given as parts to a template that loops over them."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    assert "<|user|>one\ntwo<|end|>" in (tokenizer.encode_chat(parts).text or "")
    looping = Tokenizer(make_tokenizer(tmp_path, PARTS_TEMPLATE))
    assert "<|user|>[one][two]<|end|>" in (looping.encode_chat(parts).text or "")
    assert "<|user|>[Be brief.]" in (
        looping.encode_chat([{"role": "user", "content": "Be brief."}]).text or ""
    )


def test_tool_call_arguments_become_objects(tokenizer: Tokenizer) -> None:
    """OpenAI's clients send arguments as JSON text; templates get the object, an empty text being an empty one."""
    calls = [
        {"type": "function", "function": {"name": "look", "arguments": text}} for text in ('{"a": 1}', "")
    ]
    text = tokenizer.encode_chat([{"role": "assistant", "content": "", "tool_calls": calls}]).text or ""
    assert '<call>look:{"a": 1}</call><call>look:{}</call>' in text


def test_openai_bodies(tokenizer: Tokenizer, raw: Any) -> None:
    """Chat and completions bodies, several prompts, token ids without a tokenizer, and the salt."""
    (chat,) = tokens_from_openai(
        {"model": "m", "messages": MESSAGES, "cache_salt": "t", "temperature": 0}, tokenizer
    )
    assert (chat.tokens, chat.cache_salt) == (tokenizer.encode_chat(MESSAGES).tokens, "t")
    one, two = tokens_from_openai({"prompt": ["The fox", "The dog"]}, tokenizer)
    assert list(one.tokens) == raw("The fox")["input_ids"]
    assert one.tokens != two.tokens
    assert tokens_from_openai({"prompt": [5, 6]}, None)[0].tokens == (5, 6)
    assert [p.tokens for p in tokens_from_openai({"prompt": [[5, 6], [7]]}, None)] == [(5, 6), (7,)]
    (open_end,) = tokens_from_openai({"messages": MESSAGES, "continue_final_message": True}, tokenizer)
    assert (open_end.text or "").endswith("fox")


def called(calls: Any) -> dict[str, Any]:
    """Return an assistant's message with tool calls."""
    return {"role": "assistant", "content": "x", "tool_calls": calls}


def call(arguments: Any) -> dict[str, Any]:
    """Return a tool call."""
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"messages": []}, "$.messages"),
        ({"messages": "hi"}, "$.messages"),
        ({"messages": ["hi"]}, "$.messages[0]"),
        ({"messages": [{"content": "hi"}]}, "$.messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "$.messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "$.messages[0].content[0]"),
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "$.tools[0]"),
        (
            {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
            "$.continue_final_message",
        ),
        ({"messages": [called(5)]}, "$.messages[0].tool_calls"),
        ({"messages": [called(True)]}, "$.messages[0].tool_calls"),
        ({"messages": [called(0)]}, "$.messages[0].tool_calls"),
        ({"messages": [called({"function": {"name": "f"}})]}, "$.messages[0].tool_calls"),
        ({"messages": [called([5])]}, "$.messages[0].tool_calls[0]"),
        ({"messages": [called([{"function": "f"}])]}, "$.messages[0].tool_calls[0]"),
        ({"messages": [called([{"type": "custom", "function": {}}])]}, "$.messages[0].tool_calls[0]"),
        ({"messages": [called([call("[" * 100_000)])]}, "$.messages[0].tool_calls[0].function.arguments"),
        ({"messages": [called([call("{")])]}, "$.messages[0].tool_calls[0].function.arguments"),
        ({"messages": [called([call("[]")])]}, "$.messages[0].tool_calls[0].function.arguments"),
        ({"messages": [called([call(5)])]}, "$.messages[0].tool_calls[0].function.arguments"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "$.messages"),
        ({"messages": MESSAGES, "tools": 5}, "$.tools"),
        ({"messages": MESSAGES, "documents": 5}, "$.documents"),
        ({"messages": MESSAGES, "chat_template": 5}, "$.chat_template"),
        ({"messages": MESSAGES, "chat_template": "{{" + "(" * 50_000}, "$.messages"),
        ({"messages": MESSAGES, "chat_template": "{{ messages[9].content.x }}"}, "$.messages"),
        ({"messages": MESSAGES, "chat_template_kwargs": 5}, "$.chat_template_kwargs"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"tools": 5}}, "$.chat_template_kwargs.tools"),
        ({"prompt": "\ud800"}, "$.prompt"),
        ({"messages": MESSAGES, "cache_salt": 7}, "$.cache_salt"),
        ({"prompt": [True]}, "$.prompt[0]"),
        ({"prompt": None}, "$.prompt"),
        ({}, "$"),
    ],
)
def test_a_malformed_body_is_refused_with_its_place(
    tokenizer: Tokenizer, body: dict[str, Any], where: str
) -> None:
    """Each fault of a request body is a typed error that says where."""
    with pytest.raises(KvHashError) as caught:
        tokens_from_openai(body, tokenizer)
    assert caught.value.at == where


def test_a_prompt_that_needs_a_tokenizer_says_so() -> None:
    """Text and chats without one are refused, token ids are not."""
    for body in ({"prompt": "text"}, {"messages": MESSAGES}):
        with pytest.raises(InvalidRequestError, match="tokenizer"):
            tokens_from_openai(body, None)


def test_a_tokenizer_that_cannot_be_loaded_or_has_no_template(tmp_path: Path) -> None:
    """A missing folder, an empty folder, and a tokenizer without a chat template are clear errors."""
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(TokenizerError):
            Tokenizer(folder)
    bare = Tokenizer(make_tokenizer(tmp_path / "bare", None))
    with pytest.raises(TokenizerError, match="chat template"):
        bare.encode_chat(MESSAGES)
    with pytest.raises(TokenizerError, match="refuses"):
        bare.encode_chat(MESSAGES, chat_template="{{ raise_exception('no system role') }}")


def test_without_the_extra_the_error_names_the_command() -> None:
    """Where transformers is missing, the error says how to install it."""
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from kvhash.prompt import Tokenizer\nfrom kvhash import MissingDependencyError\n"
        "try: Tokenizer('x')\nexcept MissingDependencyError as error: print(error.code, error)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("missing-dependency ")
    assert "pip install 'kvhash[tokenizer]'" in shown


FLAGS_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}|{% endfor %}"
    "{% generation %}{{ documents }}{% endgeneration %}|{{ tools }}|{{ thinking is defined }}|"
    "{{ add_generation_prompt }}"
)


@pytest.mark.parametrize(
    ("fields", "kwargs", "shown"),
    [
        ({}, {"add_generation_prompt": False, "continue_final_message": True}, "None|None|False|True"),
        ({"add_generation_prompt": False}, {"add_generation_prompt": 5}, "None|None|False|False"),
        ({}, {"documents": [{"text": "a"}]}, "[{'text': 'a'}]|None|False|True"),
        ({"documents": [{"text": "b"}]}, {"documents": 5}, "[{'text': 'b'}]|None|False|True"),
        ({"tools": [TOOL]}, {"tools": [{"own": 1}]}, "None|[{'own': 1}]|False|True"),
        ({}, {"thinking": False}, "None|None|True|True"),
        ({}, {"thinking": None}, "None|None|False|True"),
        ({}, {"thinking": "auto", "tools": None, "documents": None}, "None|None|False|True"),
        ({}, {"padding": 5, "return_dict": True, "return_tensors": "x", "other": 1}, "None|None|False|True"),
    ],
)
def test_template_kwargs_are_merged_as_vllm_merges_them(
    tokenizer: Tokenizer, fields: dict[str, Any], kwargs: dict[str, Any], shown: str
) -> None:
    """The flags and documents of the request win, the tools of the kwargs do, and what no template names is nothing."""
    body = {"messages": MESSAGES[1:], **fields, "chat_template_kwargs": kwargs}
    (chat,) = tokens_from_openai({**body, "chat_template": FLAGS_TEMPLATE}, tokenizer)
    assert chat.text == "The quick brown fox|" + shown


@pytest.mark.parametrize(
    "name", ["self", "messages", "conversation", "chat_template", "tokenize", "tokenizer", "model_config"]
)
def test_a_template_kwarg_that_is_none_is_named(tokenizer: Tokenizer, name: str) -> None:
    """What the template gets from elsewhere is refused by its name, without a word of Python's."""
    body = {"messages": MESSAGES, "chat_template_kwargs": {name: "x"}}
    with pytest.raises(InvalidRequestError) as caught:
        tokens_from_openai(body, tokenizer)
    assert caught.value.at == f"$.chat_template_kwargs.{name}"
    assert "argument" not in str(caught.value)


class Counting:
    """A tokenizer of transformers that counts what it is asked to encode."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.encoded = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """Count, then encode."""
        self.encoded += 1
        return self._inner.encode(*args, **kwargs)


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda text: {"prompt": text}, "$.prompt"),
        (lambda text: {"prompt": [text, "a"]}, "$.prompt[0]"),
        (lambda text: {"messages": [{"role": "user", "content": text}]}, "$.messages"),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, make: Any, where: str
) -> None:
    """More characters than the longest tokens could hold never reach the tokenizer; as many as they hold do."""
    counting = Counting(tokenizer._tokenizer)
    monkeypatch.setattr(tokenizer, "_tokenizer", counting)
    longest = max(map(len, counting.get_vocab()))
    with pytest.raises(InvalidRequestError, match="maximum context length is 50") as caught:
        tokens_from_openai(make("x" * (50 * longest + 1)), tokenizer, max_model_len=50)
    assert (caught.value.at, counting.encoded) == (where, 0)
    assert tokens_from_openai({"prompt": "x" * 50 * longest}, tokenizer, max_model_len=50)
    assert tokens_from_openai(make("x" * (50 * longest + 1)), tokenizer)


@pytest.mark.parametrize("make", [lambda: {"prompt": "a"}, lambda: {"messages": MESSAGES}])
@pytest.mark.parametrize("kind", [RuntimeError, RecursionError, type("PanicException", (BaseException,), {})])
def test_whatever_a_tokenizer_raises_is_a_typed_error(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, make: Any, kind: type[BaseException]
) -> None:
    """A tokenizer that fails over its input, or panics, ends in the one error for it."""

    class Failing(Counting):
        def encode(self, *args: Any, **kwargs: Any) -> Any:
            raise kind("no")

    monkeypatch.setattr(tokenizer, "_tokenizer", Failing(tokenizer._tokenizer))
    with pytest.raises(TokenizerError, match="the tokenizer refuses the text"):
        tokens_from_openai(make(), tokenizer)
