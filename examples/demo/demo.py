"""Hash a real prompt, check every hash of recorded vLLM servers, then of an engine that runs here: `make demo`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import live
import msgspec

from kvhash import BlockHasher, answer, backend, parse_request
from kvhash.block_hash import low64
from kvhash.prompt import Tokenizer

ROOT = Path(__file__).parents[2]
SCRATCH = ROOT / ".demo"
MESSAGES = [
    {
        "role": "system",
        "content": "You are the on-call assistant of a fleet of vLLM engines. Answer briefly.",
    },
    {
        "role": "user",
        "content": "Why is my prefix cache hit rate 0 although the prompts share a long system message?",
    },
]


def say(text: str) -> None:
    """Print one line of progress."""
    print(text, flush=True)


def tokenizer_folder() -> Path:
    """Return the demo's tokenizer, a byte-level BPE with a chat template, trained on the README when first needed."""
    folder = SCRATCH / "tokenizer"
    if (folder / "tokenizer.json").is_file():
        return folder
    from tokenizers import Tokenizer as Bpe
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Bpe(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=["<s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train([str(ROOT / "README.md"), str(ROOT / "LICENSE")], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>")
    fast.chat_template = (
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    fast.save_pretrained(str(folder))
    return folder


def hash_a_prompt() -> None:
    """Tokenize a chat and print its block hashes for three releases."""
    chat = Tokenizer(tokenizer_folder()).encode_chat(MESSAGES)
    say(f"   {len(chat.tokens)} tokens; the first: {list(chat.tokens[:8])}")
    for release, algorithm, seed in (
        ("0.10.2", "sha256_cbor", "0"),
        ("0.33.0", "sha256_cbor", "0"),
        ("0.33.0", "sha256", None),
    ):
        hasher = BlockHasher(vllm=release, algorithm=algorithm, hash_seed=seed, block_size=16)
        first = hasher.hash_tokens(chat.tokens)[0]
        shown = "unset" if seed is None else seed
        say(
            f"   vLLM {release}, {algorithm:<11}, PYTHONHASHSEED {shown:<5}: block 0 is published as {low64(first)}"
        )


def check_recording(path: Path) -> tuple[int, int]:
    """Hash a recorded server's requests; return (hashes that it published, how many of them came out)."""
    run: dict[str, Any] = json.loads(path.read_bytes())
    ours: set[str] = set()
    for request in run["requests"]:
        if "prompt" not in request:
            continue
        line = {
            "vllm": "0.32.0",
            "algorithm": run["algo"],
            "hash_seed": run["hash_seed"],
            "block_size": run["block_size"],
            "tokens": request["prompt"] + (request["out"] or []),
            "cache_salt": request.get("cache_salt"),
        }
        if request.get("model"):
            line["lora"] = run["lora"]
        result = answer(parse_request(line))
        ours |= {*result["external"], *result["block_hashes"]}
    published = {
        value.hex() if isinstance(value, bytes) else str(value)
        for _topic, _seq, payload in run["frames"]
        for event in msgspec.msgpack.decode(bytes.fromhex(payload))[1]
        if event["type"] == "BlockStored"
        for value in event["block_hashes"]
    }
    return len(published), len(published & ours)


def main() -> int:
    """Run the demo; return 1 when a published hash was not reproduced, or a part could not run."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    say(f"1. Hashing a chat prompt (backend: {backend()})")
    hash_a_prompt()
    say(
        "2. Hashing the requests of recorded vLLM 0.32.0 servers, and checking every hash that they published"
    )
    bad = 0
    for path in sorted((ROOT / "tests" / "data" / "captures").glob("*.json")):
        published, equal = check_recording(path)
        bad += published - equal
        say(f"   {path.stem:<32} {equal} of {published} published hashes reproduced")
    say("3. Starting the reference engine in a child process, without a model, and following its events")
    try:
        bad += live.run(tokenizer_folder(), MESSAGES[0], say)
    except live.DemoError as error:
        say(f"failed: {error}")
        return 1
    say("every hash agrees" if not bad else f"{bad} hashes differ")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
