"""`engine_ref serve` over a model folder, as a process: its answers, its events, and what it says of bad ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvhash.events.records import Batch
from kvhash.events.schema import BlockStored
from kvhash.events.subscriber import Source, Subscriber

from ..engine.running import DEADLINE_S, ROOT, Served, process, run_here
from ..ports import free_base
from .engine import BLOCK
from .models import MAX_LEN, TEXT_MODEL, ModelShelf, prompts
from .test_lora import expected, write_adapter
from .test_model_errors import drop_tensor, set_config, truncate

pytestmark = pytest.mark.torch

#: A token whose embedding is no number, as a broken file may have it; the model never chooses it.
BROKEN_TOKEN = 399
CHATS = [
    [
        {"role": "system", "content": f"You know cache {i}."},
        {"role": "user", "content": "Which block is first?"},
    ]
    for i in range(6)
]


@dataclass(frozen=True)
class ServedModel:
    """A server, the folder of its model, its adapter, and where its events are."""

    client: httpx.Client
    process: Served
    folder: Path
    adapter: Path
    source: Source

    def post(self, path: str, **body: Any) -> httpx.Response:
        """Ask, greedily, with token ids in the answer."""
        return self.client.post(
            f"/v1/{path}", json={"temperature": 0, "ignore_eos": True, "return_token_ids": True, **body}
        )

    def complete(self, prompt: Sequence[int] | str, **body: Any) -> list[int]:
        """Return the tokens of a completion."""
        answer = self.post("completions", prompt=prompt, **{"max_tokens": 12, **body})
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])


def make_folder(shelf: ModelShelf, tokenizer: Path, folder: Path) -> Path:
    """Make a folder as one downloads it: configuration, safetensors, tokenizer."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(shelf.folder(TEXT_MODEL), folder)
    for file in tokenizer.iterdir():
        shutil.copy(file, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][BROKEN_TOKEN] = float("nan")
    tensors["lm_head.weight"][BROKEN_TOKEN] = 0.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folder(shelf: ModelShelf, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the model's folder."""
    return make_folder(shelf, tokenizer_folder, tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[ServedModel]:
    """Serve the model in a process of its own."""
    adapter = write_adapter(folder.parent / "sql", 1, targets=("q_proj", "v_proj"))
    port = free_base(1)
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://*:{port + 1}",
    }
    arguments = [
        *("--served-model-name", "tiny", "--lora-modules", f"sql={adapter}", "--enable-lora"),
        *("--block-size", str(BLOCK), "--num-gpu-blocks-override", "100", "--max-num-batched-tokens", "64"),
        *("--prefix-caching-hash-algo", "sha256_cbor", "--kv-events-config", json.dumps(events)),
        *("--uvicorn-log-level", "warning"),
    ]
    with process(folder.parent / "log", *arguments, model=str(folder)) as running:
        source = Source(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}")
        with httpx.Client(base_url=running.url, timeout=DEADLINE_S) as client:
            yield ServedModel(client, running, folder, adapter, source)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    """Return the model as transformers runs it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    """Return the folder's tokenizer as transformers loads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def chat_tokens(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[int, ...]:
    """Return the tokens of a chat, as the model's own template writes it."""
    return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def test_completions_equal_generate(served: ServedModel, reference: Any) -> None:
    """32 prompts from 32 clients, more than the pool holds at once, get generate's tokens, again with hits."""
    asked = prompts(32)
    right = [expected(reference, prompt, 12) for prompt in asked]
    with ThreadPoolExecutor(32) as clients:
        assert list(clients.map(served.complete, asked)) == right
        assert list(clients.map(served.complete, asked)) == right


def test_text_equals_generate(served: ServedModel, reference: Any, tokenizer: Any) -> None:
    """A prompt of text, whole and streamed, is answered with the text of generate's tokens."""
    text = "A router that knows the prefix"
    tokens = tuple(tokenizer(text).input_ids)
    right = tokenizer.decode(expected(reference, tokens, 12), skip_special_tokens=True)
    whole = served.post("completions", prompt=text, max_tokens=12).json()["choices"][0]
    assert whole["text"] == right
    with served.client.stream(
        "POST",
        "/v1/completions",
        json={"prompt": text, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": True},
    ) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == right


def test_chats_equal_generate(served: ServedModel, reference: Any, tokenizer: Any) -> None:
    """Chats at the same time are answered with generate's tokens and their text."""
    with ThreadPoolExecutor(len(CHATS)) as clients:
        answers = list(
            clients.map(lambda chat: served.post("chat/completions", messages=chat, max_tokens=9), CHATS)
        )
    for chat, answer in zip(CHATS, answers, strict=True):
        assert answer.status_code == 200, answer.text
        right = expected(reference, chat_tokens(tokenizer, chat), 9)
        choice = answer.json()["choices"][0]
        assert choice["token_ids"] == right
        assert choice["message"]["content"] == tokenizer.decode(right, skip_special_tokens=True)


def test_an_adapter_by_its_name_equals_merged_weights(served: ServedModel, reference: Any) -> None:
    """The adapter's name as the model gives what PEFT makes of it; the base model beside it is unchanged."""
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(served.folder, attn_implementation="eager")
    merged = peft.PeftModel.from_pretrained(base, served.adapter).merge_and_unload().eval()
    prompt = prompts(1, seed=6)[0]
    right = expected(merged, prompt, 12)
    assert served.complete(prompt, model="sql") == right
    assert served.complete(prompt, model="tiny") == expected(reference, prompt, 12) != right


def run_program(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of the installed commands to its end."""
    program = Path(sys.executable).with_name(name)
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, check=False, timeout=2 * DEADLINE_S
    )


def stored_hashes(subscriber: Subscriber, last: int) -> list[int | bytes]:
    """Return the hashes stored until `last` is, in their order."""
    found: list[int | bytes] = []
    end = time.monotonic() + DEADLINE_S
    while last not in found:
        assert time.monotonic() < end, "the event did not come"
        record = subscriber.poll(1)
        if isinstance(record, Batch):
            for event in record.batch.events:
                if isinstance(event, BlockStored):
                    found += event.block_hashes
    return found


@pytest.mark.parametrize("kind", ["text", "salt", "lora"])
def test_a_routers_hashes_are_the_first_blocks_events(served: ServedModel, tokenizer: Any, kind: str) -> None:
    """`kvhash hash --chat`, told what the client tells the engine, gives the hashes that its events begin with."""
    flags: list[str] = []
    body: dict[str, Any] = {}
    if kind == "salt":
        body, flags = {"cache_salt": "tenant-1"}, ["--cache-salt", "tenant-1"]
    elif kind == "lora":
        body, flags = {"model": "sql"}, ["--lora-name", "sql", "--lora-path", str(served.adapter)]
    chat = [{"role": "user", "content": f"{kind}: which block of the cache is the first, and why?"}]
    done = run_program(
        *("kvhash", "hash", "--chat", json.dumps(chat), "--model", str(served.folder), "-o", "int"),
        *("--algorithm", "sha256_cbor", "--hash-seed", "0", "--block-size", str(BLOCK), *flags),
    )
    assert done.returncode == 0, done.stderr
    right = [int(line) for line in done.stdout.split()]
    prompt = chat_tokens(tokenizer, chat)
    assert len(right) == len(prompt) // BLOCK > 3
    with Subscriber(served.source, from_seq="start") as subscriber:
        answer = served.post("chat/completions", messages=chat, max_tokens=3, **body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["prompt_token_ids"] == list(prompt)
        found = stored_hashes(subscriber, right[-1])
    assert found[-len(right) :] == right


def test_the_events_of_the_run_verify(served: ServedModel) -> None:
    """The `kvevents verify` command recomputes every hash that the server has published, and all are right."""
    for i in range(3):
        served.complete([i, *range(40)])
        served.complete([i, *range(40)], model="sql")
        served.complete([i, *range(40)], cache_salt="verified")
    assert served.source.replay_endpoint is not None
    done = run_program(
        *("kvevents", "verify", served.source.endpoint, "--replay", served.source.replay_endpoint),
        *("--from-seq", "start", "--idle-timeout", "2", "--algorithm", "sha256_cbor", "--hash-seed", "0"),
        *("--block-size", str(BLOCK), "--lora-path", f"sql={served.adapter}", "-o", "jsonl"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["match"] == summary["blocks"] > 60, summary


def test_bad_requests_are_told_why_and_the_server_stays_up(served: ServedModel, reference: Any) -> None:
    """Too long a prompt, tokens beyond the vocabulary, an unknown model, logits that are no numbers: one line each."""
    for body, status, words in (
        ({"prompt": [1] * MAX_LEN}, 400, "maximum context length is 192 tokens"),
        ({"prompt": [1] * 10, "max_tokens": MAX_LEN}, 400, "maximum context length is 192 tokens"),
        ({"prompt": [1, 400]}, 400, "vocabulary"),
        ({"prompt": [1], "model": "none"}, 400, "`none` does not exist"),
        ({"prompt": [1, 2, BROKEN_TOKEN]}, 500, "NaN"),
        ({"prompt": [1, BROKEN_TOKEN, *[2] * 20], "model": "sql"}, 500, "NaN"),
    ):
        answer = served.post("completions", **body)
        assert (answer.status_code, words in answer.text) == (status, True), answer.text
    good = prompts(8, seed=3)
    with ThreadPoolExecutor(12) as clients:
        broken = [clients.submit(served.post, "completions", prompt=[BROKEN_TOKEN, i]) for i in range(4)]
        assert list(clients.map(served.complete, good)) == [expected(reference, p, 12) for p in good]
        assert {answer.result().status_code for answer in broken} == {500}
    assert served.client.get("/health").status_code == 200
    assert "Traceback" not in served.process.log.read_text()


def test_a_pool_that_is_too_small_is_shared_by_turns(folder: Path, tmp_path: Path, reference: Any) -> None:
    """Out of blocks: the longest prompt that the model takes and 15 others wait or are preempted, and all are right."""
    arguments = ["--block-size", str(BLOCK), "--num-gpu-blocks-override", "49", "--watermark", "0"]
    with process(tmp_path / "log", *arguments, model=str(folder)) as running:
        asked = [[*range(MAX_LEN - 12)], *([i] * 3 + list(range(60)) for i in range(15))]
        with httpx.Client(base_url=running.url, timeout=DEADLINE_S) as client:

            def complete(prompt: list[int]) -> list[int]:
                body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
                answer = client.post("/v1/completions", json={**body, "return_token_ids": True})
                assert answer.status_code == 200, answer.text
                return list(answer.json()["choices"][0]["token_ids"])

            with ThreadPoolExecutor(16) as clients:
                found = list(clients.map(complete, asked))
            assert client.get("/health").status_code == 200
        assert found == [expected(reference, tuple(prompt), 12) for prompt in asked]


def test_less_blocks_than_one_request_needs_is_refused(folder: Path) -> None:
    """Said at the start, with the numbers."""
    done = run_here("serve", str(folder), "--num-gpu-blocks-override", "8", "--max-model-len", "192")
    assert done.returncode == 2
    assert "needs 12 blocks and the pool has 7" in done.stderr


FAULTS: dict[str, tuple[Any, str]] = {
    "unknown family": (
        lambda f: set_config(f, model_type="bert"),
        "the model family 'bert' is not supported",
    ),
    "missing tensor": (drop_tensor, "layers.1.mlp.up_proj"),
    "missing file": (
        lambda f: (
            (f / "model.safetensors").unlink(),
            (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
        ),
        "b.safetensors is not there",
    ),
    "corrupt safetensors": (truncate, "cannot be read"),
    "broken configuration": (lambda f: (f / "config.json").write_text("{"), "config.json"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_model_is_one_line_at_the_start(folder: Path, tmp_path: Path, fault: str) -> None:
    """Nothing listens, no traceback: exit code 2 and what is wrong."""
    change, words = FAULTS[fault]
    broken = tmp_path / "model"
    shutil.copytree(folder, broken)
    change(broken)
    # In a process of its own: transformers' log keeps the standard error of its first use.
    done = subprocess.run(
        [sys.executable, "-m", "engine_ref", "serve", str(broken), "--port", "0", "--block-size", str(BLOCK)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S * 4,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, done.stderr
    assert words in said[0]
    assert "Traceback" not in done.stderr
