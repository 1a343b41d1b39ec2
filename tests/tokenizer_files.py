"""A real byte-level BPE tokenizer with a BOS and a chat template, trained on a few sentences for the tests."""

from __future__ import annotations

from pathlib import Path

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "vLLM names every full block of the KV cache by a chained hash.",
    "A router that knows the prefix sends the request where it is cached.",
    "user assistant system tool function arguments content",
]

TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% if style is defined %}<style>{{ style }}</style>{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}"
    "<call>{{ call.function.name }}:{{ call.function.arguments | tojson }}</call>{% endfor %}{% endif %}"
    "<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

PARTS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>"
    "{% for part in message['content'] %}[{{ part['text'] }}]{% endfor %}<|end|>{% endfor %}"
)

SPECIAL = ["<s>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>"]


def make_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Train the tokenizer, save it into `folder` as transformers does, and return the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bpe.token_to_id("<s>"))]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>")
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(str(folder))
    return folder
