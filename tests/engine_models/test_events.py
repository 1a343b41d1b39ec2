"""What a real model's run publishes verifies, and is what a router computes from the chat before sending it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvhash.events import BlockStored, EventBatch, Verifier

from .engine import BLOCK, make_engine
from .models import TEXT_MODEL, ModelShelf
from .test_lora import write_adapter

pytestmark = pytest.mark.torch

MESSAGES = [
    {"role": "system", "content": "You know every cache."},
    {"role": "user", "content": "Which block comes first?"},
]


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[int]]:
    """Return what `kvhash hash --chat` prints for the messages, run in this process."""
    from kvhash_cli.entry import kvhash_main

    def run(tokenizer: Path, *options: str) -> list[int]:
        command = ["kvhash", "hash", "--chat", json.dumps(MESSAGES), "--model", str(tokenizer)]
        command += ["--algorithm", "sha256_cbor", "--block-size", str(BLOCK), "-o", "int", *options]
        monkeypatch.setattr(sys, "argv", command)
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            sys.exit(kvhash_main())
        said = capsys.readouterr()
        assert not left.value.code, said.err
        return [int(line) for line in said.out.split()]

    return run


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_events_verify_and_equal_the_routers_hashes(
    shelf: ModelShelf,
    tokenizer_folder: Path,
    tmp_path: Path,
    routed: Callable[..., list[int]],
    async_scheduling: bool,
) -> None:
    """Chats plain, with a salt and with an adapter, in a tight pool: every hash can be derived and is right."""
    from transformers import AutoTokenizer

    adapter = str(write_adapter(tmp_path / "sql", 1, targets=("q_proj",)))
    engine = make_engine(
        shelf.folder(TEXT_MODEL),
        num_blocks=60,
        budget=40,
        async_scheduling=async_scheduling,
        runner_options={"adapters": {"sql": adapter}},
    )
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    kinds: dict[str, tuple[dict[str, Any], list[str]]] = {
        "text": ({}, []),
        "salt": ({"cache_salt": "t1"}, ["--cache-salt", "t1"]),
        "lora": (
            {"lora": {"name": "sql", "path": adapter}},
            ["--lora-name", "sql", "--lora-path", adapter],
        ),
    }
    verifier = Verifier(algorithm="sha256_cbor", block_size=BLOCK, lora_paths={"sql": adapter})
    for name, (options, flags) in kinds.items():
        engine.published.clear()
        requests = [engine.request(f"{name}{i}", prompt + [i] * i, **options) for i in range(5)]
        engine.run(*requests)
        stored = [e for events in engine.published for e in events if isinstance(e, BlockStored)]
        first = next(e for e in stored if e.parent_block_hash is None)
        right = routed(tokenizer_folder, *flags)
        assert len(right) == len(prompt) // BLOCK
        assert list(first.block_hashes) == right[: len(first.block_hashes)]
        published = {value for event in stored for value in event.block_hashes}
        assert set(right) <= published
        for events in engine.published:
            verifier.feed(EventBatch(ts=0.0, events=tuple(events)))
    assert set(verifier.verdicts) == {"match"}
    assert verifier.verdicts["match"] > 60
