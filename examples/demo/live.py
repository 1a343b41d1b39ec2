"""The demo's live part: an engine in a child process, chats sent to it, its events followed and every hash checked."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhash import BlockHasher
from kvhash.events.records import Batch
from kvhash.events.schema import AllBlocksCleared, BlockRemoved, BlockStored
from kvhash.events.subscriber import Source, Subscriber
from kvhash.events.verify import Verifier
from kvhash.prompt import Tokenizer

ALGORITHM, SEED, BLOCK_SIZE = "sha256_cbor", "0", 16
ADAPTER = {"name": "sql", "path": "adapters/sql", "id": 1}
DEADLINE_S = 20.0
QUESTIONS = (
    "Why is my prefix cache hit rate 0 although the prompts share a long system message?",
    "Which engine holds the prefix of this chat?",
    "A restart lost the cache. How does a router notice?",
    "What does a block hash cover beside the tokens?",
)


class DemoError(Exception):
    """The demo could not do what it shows."""


@dataclass
class Engine:
    """The child: where it answers and where its events are."""

    http: str
    source: Source


@contextlib.contextmanager
def engine(tokenizer: Path) -> Iterator[Engine]:
    """Run the reference engine in a child process, with made-up tokens: no torch, no GPU."""
    events = {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://127.0.0.1:*",
        "replay_endpoint": "tcp://127.0.0.1:*",
    }
    command = [
        sys.executable,
        "-m",
        "engine_ref",
        "serve",
        "demo",
        "--port",
        "0",
        "--tokenizer",
        str(tokenizer),
    ]
    command += ["--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", "64", "--max-model-len", "512"]
    command += ["--prefix-caching-hash-algo", ALGORITHM, "--kv-events-config", json.dumps(events)]
    command += ["--lora-modules", f"{ADAPTER['name']}={ADAPTER['path']}", "--uvicorn-log-level", "warning"]
    environment = {**os.environ, "PYTHONHASHSEED": SEED, "VLLM_SERVER_DEV_MODE": "1"}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    assert child.stdout is not None
    try:
        # The child says one line when it is ready; one that hangs is ended, which ends its output.
        watch = threading.Timer(DEADLINE_S, child.kill)
        watch.start()
        line = child.stdout.readline()
        watch.cancel()
        if not line:
            raise DemoError(f"the engine did not start (exit code {child.wait()})")
        ready = json.loads(line)
        rank = ready["ranks"][0]
        yield Engine(ready["http"], Source(rank["endpoint"], rank["replay_endpoint"]))
        child.terminate()
        if child.wait(DEADLINE_S):
            raise DemoError(f"the engine ended with exit code {child.returncode}")
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


@dataclass
class Followed:
    """What a subscriber saw of the engine."""

    batches: int = 0
    stored: list[int | bytes] = field(default_factory=list)
    removed: int = 0
    cleared: int = 0
    verifier: Verifier = field(
        default_factory=lambda: Verifier(
            algorithm=ALGORITHM,
            hash_seed=SEED,
            block_size=BLOCK_SIZE,
            lora_paths={str(ADAPTER["name"]): str(ADAPTER["path"])},
        )
    )
    trouble: list[str] = field(default_factory=list)

    def follow(self, subscriber: Subscriber) -> None:
        """Take batches until the cache is cleared, or the subscriber is closed or hears nothing more."""
        for record in subscriber:
            if not isinstance(record, Batch):
                self.trouble.append(type(record).__name__)
                continue
            self.batches += 1
            self.verifier.feed(record.batch)
            for event in record.batch.events:
                if isinstance(event, BlockStored):
                    self.stored += event.block_hashes
                elif isinstance(event, BlockRemoved):
                    self.removed += len(event.block_hashes)
                elif isinstance(event, AllBlocksCleared):
                    self.cleared += 1
            if self.cleared:
                return


@dataclass
class Sent:
    """What the chats came to: the hashes that their own text gives, and their usage."""

    hashes: set[int | bytes] = field(default_factory=set)
    chats: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


def post(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Post JSON and return the answer."""
    data = json.dumps(body).encode() if body is not None else b""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data, method="POST"), timeout=DEADLINE_S
        ) as answer:
            result: dict[str, Any] = json.load(answer)
            return result
    except urllib.error.HTTPError as error:
        raise DemoError(f"{url} answered {error.code}: {error.read().decode()}") from None


def send_chats(server: Engine, tokenizer: Tokenizer, system: dict[str, str]) -> Sent:
    """Send chats that share a system message; hash each from its own text and the tokens that came back."""
    hasher = BlockHasher(algorithm=ALGORITHM, hash_seed=SEED, block_size=BLOCK_SIZE)
    sent = Sent()
    variants: list[dict[str, Any]] = [
        {},
        {"cache_salt": "tenant-a"},
        {"cache_salt": "tenant-b"},
        {"model": ADAPTER["name"]},
    ]
    chats = [
        {"messages": [system, {"role": "user", "content": question}], **variant}
        for variant in variants
        for _ in range(2)
        for question in QUESTIONS
    ]

    def send(chat: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        options = {"max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
        return chat, post(f"{server.http}/v1/chat/completions", {**chat, **options})

    with ThreadPoolExecutor(2) as pool:
        for chat, answer in pool.map(send, chats):
            prompt = list(tokenizer.encode_chat(chat["messages"]).tokens)
            choice = answer["choices"][0]
            if choice["prompt_token_ids"] != prompt:
                raise DemoError("the engine tokenized a chat otherwise than the SDK")
            keys = {"cache_salt": chat.get("cache_salt"), "lora": ADAPTER if "model" in chat else None}
            sent.hashes.update(hasher.chain(prompt + choice["token_ids"], **keys).external())
            sent.chats += 1
            sent.prompt_tokens += answer["usage"]["prompt_tokens"]
            sent.cached_tokens += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return sent


def run(folder: Path, system: dict[str, str], say: Any) -> int:
    """Run the live part; returns how many published hashes were not reproduced."""
    tokenizer = Tokenizer(folder)
    followed = Followed()
    with (
        engine(folder) as server,
        Subscriber(server.source, from_seq="start", idle_timeout=DEADLINE_S) as subscriber,
    ):
        say(f"   ready at {server.http}, events at {server.source.endpoint}")
        following = threading.Thread(target=followed.follow, args=(subscriber,))
        following.start()
        sent = send_chats(server, tokenizer, system)
        post(f"{server.http}/reset_prefix_cache")
        following.join()
    if not followed.cleared:
        raise DemoError("the events did not come to their end")
    if followed.trouble:
        raise DemoError(f"the stream had {', '.join(followed.trouble)}")
    share = sent.cached_tokens / sent.prompt_tokens
    say(f"   {sent.chats} chats with one system message, two tenants (cache salts) and an adapter:")
    say(f"   {sent.prompt_tokens} prompt tokens, {sent.cached_tokens} of them from the cache ({share:.0%})")
    say(
        f"   {followed.batches} batches: {len(followed.stored)} blocks stored, {followed.removed} evicted, then cleared"
    )
    total = len(followed.stored)
    by_text = sum(value in sent.hashes for value in followed.stored)
    by_stream = followed.verifier.verdicts["match"]
    say(f"   {by_text} of {total} published hashes reproduced from the chats' own text")
    say(
        f"   {by_stream} of {total} published hashes reproduced from the stream alone, as `kvevents verify` does"
    )
    if not total or not sent.cached_tokens:
        raise DemoError("the engine published or cached nothing")
    return (total - by_text) + (total - by_stream)
