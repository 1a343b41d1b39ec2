"""The HTTP front answers as OpenAI's API does and tells the cache's truth."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerBase

from engine_ref.model_info import ModelInfo
from engine_ref.rank_process import RankProcess
from engine_ref.request import Request
from engine_ref.runner import NullRunner
from engine_ref.sampling import TokenLogprobs
from engine_ref.scheduler import StepPlan
from engine_ref.server import Frontend
from engine_ref.server.app import merge_streams
from engine_ref.server.text import EngineTokenizer
from kvhash import BlockHasher
from kvhash.events.records import Batch
from kvhash.events.schema import AllBlocksCleared, BlockStored
from kvhash.events.subscriber import Source, Subscriber

from .clients import run_clients
from .running import DEADLINE_S, serving, small_options, wait_for

HASHER = BlockHasher(block_size=4, algorithm="sha256_cbor", hash_seed="0")


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    """Return a client of a small engine in dev mode with the adapter ``sql``."""
    with serving(adapters={"sql": "adapters/sql"}) as (client, _):
        yield client


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    """Post a completion and return its answer."""
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def cached(answer: dict[str, Any]) -> int:
    """Return the cached tokens of an answer's usage."""
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def metric(client: httpx.Client, name: str) -> float:
    """Return the sum of a metric's series."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    """Return what NullRunner makes of a prompt."""
    runner, known = NullRunner(), list(prompt)
    for _ in range(count):
        known.append(runner.next_token(known[-8:], len(known)))
    return known[len(prompt) :]


def test_completion_says_what_was_cached(client: httpx.Client) -> None:
    """The same prompt again gives the same tokens, and its usage says how many were cached; a reset forgets."""
    body = {"model": "null", "prompt": list(range(17)), "max_tokens": 3}
    first, second = complete(client, **body), complete(client, **body)
    assert first["choices"][0]["token_ids"] == expected_tokens(list(range(17)), 3)
    assert second["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    assert first["choices"][0]["finish_reason"] == "length"
    assert (cached(first), cached(second)) == (0, 16)
    assert client.post("/reset_prefix_cache").json() == {"success": True}
    assert cached(complete(client, **body)) == 0
    assert metric(client, "vllm:prefix_cache_queries_total") == 51
    assert metric(client, "vllm:prefix_cache_hits_total") == 16
    assert client.get("/health").status_code == 200


def test_salt_adapter_and_items_separate_prefixes(client: httpx.Client) -> None:
    """What enters the hash decides the hit: each salt, adapter and multimodal item has its own prefix."""
    prompt = {"prompt": list(range(17)), "max_tokens": 1}
    item = [{"identifier": "image", "offset": 2, "length": 3}]
    for keys in ({}, {"cache_salt": "a"}, {"model": "sql"}, {"multimodal": item}):
        assert cached(complete(client, **prompt, **keys)) == 0
        assert cached(complete(client, **prompt, **keys)) == 16


def test_prompt_logprobs_read_no_cache(client: httpx.Client) -> None:
    """A request for prompt logprobs has no hit, and its lookup is not counted."""
    body = {"prompt": list(range(17)), "max_tokens": 1}
    complete(client, **body)
    assert cached(complete(client, **body, prompt_logprobs=1)) == 0
    assert metric(client, "vllm:prefix_cache_queries_total") == 17


def test_stream_carries_all_tokens_then_usage_then_done(client: httpx.Client) -> None:
    """A stream's tokens are those of the whole answer; the usage comes only where it is asked for."""
    body = {"prompt": [1, 2, 3], "max_tokens": 5, "stream": True}
    with_usage = client.post("/v1/completions", json={**body, "stream_options": {"include_usage": True}})
    lines = [line.removeprefix("data: ") for line in with_usage.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    tokens = [token for chunk in chunks[:-1] for token in chunk["choices"][0]["token_ids"]]
    assert tokens == expected_tokens([1, 2, 3], 5)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == " ".join(map(str, tokens))
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 5)
    assert '"usage"' not in client.post("/v1/completions", json=body).text


def test_each_chunk_says_what_its_choice_has_used(client: httpx.Client) -> None:
    """With continuous_usage_stats a chunk counts its own choice's prompt and tokens, up to that chunk; the last all."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": [[1, 2], [3, 4, 5]], "n": 2, "max_tokens": 6, "stream": True, "stream_options": options}
    lines = client.post("/v1/completions", json=body).text.split("\n\n")
    *chunks, last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    made: Counter[int] = Counter()
    for chunk in chunks:
        (choice,) = chunk["choices"]
        made[choice["index"]] += len(choice["token_ids"])
        assert chunk["usage"]["prompt_tokens"] == (2, 2, 3, 3)[choice["index"]]
        assert chunk["usage"]["completion_tokens"] == made[choice["index"]]
        assert chunk["usage"]["total_tokens"] == chunk["usage"]["prompt_tokens"] + made[choice["index"]]
    assert made == Counter(dict.fromkeys(range(4), 6))
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (5, 24)


def test_streams_that_nobody_reads_wait() -> None:
    """Merged streams run no further ahead of their reader than a line or two each."""
    given: Counter[int] = Counter()

    async def stream(number: int) -> AsyncIterator[bytes]:
        for _ in range(1000):
            given[number] += 1
            yield b"%d" % number

    async def main() -> None:
        merged = merge_streams([stream(number) for number in range(8)])
        read = [await anext(merged)]
        for _ in range(100):
            await asyncio.sleep(0)
        assert given.total() <= 3 * 8
        read += [line async for line in merged]
        assert Counter(read) == Counter({b"%d" % number: 1000 for number in range(8)})

    asyncio.run(main())


def test_several_prompts_and_choices(client: httpx.Client) -> None:
    """Each prompt gives `n` choices, in order; a prompt counts once in the usage."""
    answer = complete(client, prompt=[[1, 2], [3, 4, 5]], n=2, max_tokens=2)
    tokens = [choice["token_ids"] for choice in answer["choices"]]
    assert tokens == [expected_tokens([1, 2], 2)] * 2 + [expected_tokens([3, 4, 5], 2)] * 2
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 8)


def test_models_lists_the_adapters(client: httpx.Client) -> None:
    """The base model and each adapter are models; an adapter names its parent and its path."""
    cards = client.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("null", "null", None),
        ("sql", "adapters/sql", "null"),
    ]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "$"),
        (b"{}", "prompt"),
        (b'{"prompt":null}', "prompt"),
        (b'{"prompt":"text"}', "--tokenizer"),
        (b'{"prompt":[]}', "$.prompt"),
        (b'{"prompt":[[1],[]]}', "$.prompt"),
        (b'{"prompt":[1.5]}', "$.prompt[0]"),
        (b'{"prompt":[true]}', "$.prompt[0]"),
        (b'{"prompt":[1,-1]}', "$.prompt[1]"),
        (b'{"prompt":[[1],[2,"3"]]}', "$.prompt[1][1]"),
        (b'{"prompt":{"a":1}}', "$.prompt"),
        (b'{"prompt":[1,99999]}', "$.prompt[1]"),
        (b'{"prompt":[18446744073709551616]}', "prompt"),
        (b'{"prompt":[1],"max_tokens":0}', "$.max_tokens"),
        (b'{"prompt":[1],"max_tokens":"3"}', "$.max_tokens"),
        (b'{"prompt":[1],"max_tokens":64}', "maximum context length is 64"),
        (b'{"prompt":[1],"model":"other"}', "`other` does not exist"),
        (b'{"prompt":[1],"model":5}', "$.model"),
        (b'{"prompt":[1],"cache_salt":5}', "$.cache_salt"),
        (b'{"prompt":[1],"cache_salt":""}', "$.cache_salt"),
        (b'{"prompt":[1],"stream":"yes"}', "$.stream"),
        (b'{"prompt":[1],"temperature":-1}', "$.temperature"),
        (b'{"prompt":[1],"n":0}', "$.n"),
        (b'{"prompt":[1],"n":4097,"max_tokens":1}', "at most 4096 sequences"),
        (
            b'{"prompt":[' + b",".join([b"[1,2]"] * 33) + b'],"n":128,"max_tokens":1}',
            "at most 4096 sequences",
        ),
        (b'{"prompt":[1],"n":2,"temperature":0}', "greedy"),
        (b'{"prompt":"\xff"}', "not JSON"),
        (b'{"prompt":["a","\xff"]}', "not JSON"),
        (b'{"prompt":[1],"stop":["a","\xff"]}', "not JSON"),
        (b'{"prompt":[1],"stop":""}', "stop string"),
        (b'{"prompt":[1],"stop":["a",""]}', "stop string"),
        (b'{"prompt":[1],"best_of":3}', "best_of"),
        (b'{"prompt":[1],"echo":true,"logprobs":0}', "echo with logprobs"),
        (b'{"prompt":[1],"echo":false,"max_tokens":0}', "$.max_tokens"),
        (b'{"prompt":[1],"echo":true,"max_tokens":-1}', "$.max_tokens"),
        (b'{"prompt":[1],"logprobs":21}', "$.logprobs"),
        (b'{"prompt":[1],"logprobs":1000}', "at most 20"),
        (b'{"prompt":[1],"logprobs":-1}', "$.logprobs"),
        (b'{"prompt":[1],"prompt_logprobs":21}', "$.prompt_logprobs"),
        (b'{"prompt":[1],"prompt_logprobs":-1}', "$.prompt_logprobs"),
        (b'{"prompt":[1],"truncate_prompt_tokens":1}', "truncate_prompt_tokens"),
        (b'{"prompt":[1],"priority":1}', "priority"),
        (b'{"prompt":[1],"stop":"x"}', "--tokenizer"),
        (b'{"prompt":[1],"stop_token_ids":[99999]}', "$.stop_token_ids[0]"),
        (b'{"prompt":[1],"min_tokens":17}', "min_tokens"),
        (b'{"prompt":[1],"stream_options":{"include_usage":3}}', "$.stream_options.include_usage"),
        (b'{"prompt":[1],"multimodal":[{"identifier":"x","offset":0,"length":2}]}', "$.multimodal[0]"),
        (b'{"prompt":[1],"prompt_embeds":{"shape":[2,1]}}', "$.prompt_embeds"),
    ],
)
def test_bad_request_is_a_400_that_says_where(client: httpx.Client, body: bytes, says: str) -> None:
    """What cannot be served is said in OpenAI's form, and nothing of it stays in the engine."""
    answer = client.post("/v1/completions", content=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert says in error["message"]
    assert (error["type"], error["code"]) == ("BadRequestError", 400)
    assert client.post("/reset_prefix_cache").json() == {"success": True}


def test_unknown_paths_and_flags_are_said_too(client: httpx.Client) -> None:
    """Another path is a 404 in the same form, a wrong flag of the reset a 400, a wrong rank a 400."""
    assert client.get("/v1/nothing").json()["error"]["code"] == 404
    assert client.post("/reset_prefix_cache?reset_external=maybe").status_code == 400
    headers = {"X-data-parallel-rank": "3"}
    assert client.post("/v1/completions", json={"prompt": [1]}, headers=headers).status_code == 400


@pytest.mark.parametrize(
    ("rank", "status"),
    [("0", 200), ("+0", 200), ("abc", 200), ("", 200), ("-1", 400), ("1", 400), ("99999", 400)],
)
def test_the_rank_header_is_read_as_vllm_reads_it(client: httpx.Client, rank: str, status: int) -> None:
    """What is no number asks for no rank; a number that is no rank, a negative one too, is a 400 that names it."""
    answer = client.post(
        "/v1/completions", json={"prompt": [1], "max_tokens": 1}, headers={"X-data-parallel-rank": rank}
    )
    assert answer.status_code == status
    assert status == 200 or f"rank {rank}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone_gives_the_prompt_back(client: httpx.Client, stream: bool) -> None:
    """With max_tokens 0 the text is the prompt's; as in vLLM one token is made all the same, and counted."""
    body = {"prompt": [5, 6, 7], "echo": True, "max_tokens": 0, "stream": stream}
    if not stream:
        answer = complete(client, **body)
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("5 6 7 ", "length")
        assert answer["usage"]["completion_tokens"] == 1
        return
    lines = client.post("/v1/completions", json=body).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "5 6 7 "


def test_reset_needs_dev_mode() -> None:
    """Without dev mode the reset is not there, as in vLLM."""
    with serving(dev_mode=False) as (client, _):
        assert client.post("/reset_prefix_cache").status_code == 404


def hang_up(client: httpx.Client, body: dict[str, Any]) -> socket.socket:
    """Send a request over a bare socket and leave the answer unread; closing it is hanging up."""
    data = json.dumps(body).encode()
    url = client.base_url
    raw = socket.create_connection((url.host, url.port), timeout=DEADLINE_S)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    raw.sendall(head.encode() + data)
    return raw


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_frees_the_blocks(stream: bool) -> None:
    """A client that goes away ends its request: nothing runs, no block is held, and it counts as aborted."""
    options = small_options(max_model_len=2_000_000, num_gpu_blocks=500_002)
    with serving(options) as (client, frontend):
        raw = hang_up(client, {"prompt": [1] * 9, "max_tokens": 1_900_000, "stream": stream})
        wait_for(lambda: metric(client, "vllm:num_requests_running") == 1, "the request")
        assert client.post("/reset_prefix_cache").json() == {"success": False}
        raw.close()
        wait_for(lambda: metric(client, "vllm:num_requests_running") == 0, "the end of the request")
        assert metric(client, "vllm:kv_cache_usage_perc") == 0
        assert 'finished_reason="abort",model_name="null"} 1.0' in client.get("/metrics").text
        assert client.post("/reset_prefix_cache").json() == {"success": True}
        assert not frontend._generations


def test_reset_under_load_needs_its_flag() -> None:
    """With requests running a reset is refused, unless these are preempted for it; they go on with the same tokens."""
    options = small_options(max_model_len=4000, num_gpu_blocks=1002)
    body = {"prompt": [1] * 9, "max_tokens": 3000, "stream": True}
    with (
        serving(options) as (client, frontend),
        client.stream("POST", "/v1/completions", json=body) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        with httpx.Client(base_url=client.base_url, timeout=DEADLINE_S) as other:
            assert other.post("/reset_prefix_cache").json() == {"success": False}
            forced = other.post("/reset_prefix_cache?reset_running_requests=true&reset_external=true")
            assert forced.json() == {"success": True}
        text = [line.removeprefix("data: ") for line in lines if line][:-1]
        tokens = [token for line in text for token in json.loads(line)["choices"][0]["token_ids"]]
        assert tokens == expected_tokens([1] * 9, 3000)[-len(tokens) :]
        assert metric(client, "vllm:num_preemptions_total") == 1
        with httpx.Client(base_url=client.base_url, timeout=DEADLINE_S) as other:
            complete(other, prompt=[9] * 9, max_tokens=1)
        assert cleared_before(frontend, tuple(HASHER.chain([9] * 9).external())) == 1


def test_connector_brings_back_what_was_reset() -> None:
    """With a host tier a prefix survives the local reset and counts as external; `reset_external` forgets it too."""
    transfer = {
        "kv_connector": "TierConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tiers": [{"type": "host", "max_bytes": 1 << 20}]},
    }
    with serving(small_options(kv_transfer_config=transfer)) as (client, _):
        body = {"prompt": list(range(17)), "max_tokens": 3}
        tokens = complete(client, **body)["choices"][0]["token_ids"]
        assert wait_for(lambda: client.post("/reset_prefix_cache").json()["success"], "the reset")
        again = complete(client, **body)
        assert (again["choices"][0]["token_ids"], cached(again)) == (tokens, 16)
        assert metric(client, "vllm:external_prefix_cache_hits_total") == 16
        assert 'prompt_tokens_cached_by_source_total{engine="0",model_name="null",source="host"} 16.0' in (
            client.get("/metrics").text
        )
        loaded = 'event="loaded_blocks",model_name="null",part="connector"} 4.0'
        wait_for(lambda: loaded in client.get("/metrics").text, "the connector's counters")
        assert 'event="stores",model_name="null",part="host"}' in client.get("/metrics").text
        assert metric(client, "vllm:prefix_cache_hits_total") == 0
        both = "/reset_prefix_cache?reset_external=true"
        assert wait_for(lambda: client.post(both).json()["success"], "the reset of both")
        assert cached(complete(client, **body)) == 0


def cleared_before(frontend: Frontend, marker: tuple[Any, ...]) -> int:
    """Return how often the cache was cleared before the block hashes `marker` were stored."""
    cleared = 0
    endpoint, replay = frontend.ranks[0].endpoints
    with Subscriber(Source(str(endpoint), replay), from_seq="start") as subscriber:
        while True:
            record = subscriber.poll(DEADLINE_S)
            assert record is not None
            for event in record.batch.events if isinstance(record, Batch) else ():
                cleared += isinstance(event, AllBlocksCleared)
                if isinstance(event, BlockStored) and event.block_hashes == marker:
                    return cleared


def test_a_long_prompt_again_hits_all_but_its_last_block() -> None:
    """4,096 tokens sent twice with blocks of 16: 4,080 hits, since the last token must be computed."""
    options = small_options(block_size=16, max_model_len=8192, num_gpu_blocks=600)
    with serving(options) as (client, _):
        body = {"prompt": [number % 1000 for number in range(4096)], "max_tokens": 1}
        assert cached(complete(client, **body)) == 0
        assert cached(complete(client, **body)) == 4080
        assert metric(client, "vllm:prefix_cache_hits_total") == 4080


@pytest.fixture(scope="module")
def chatty(tokenizer_folder: Path) -> Iterator[httpx.Client]:
    """Return a client of an engine with a tokenizer."""
    options = small_options(max_model_len=400, num_gpu_blocks=200)
    with serving(options, tokenizer=EngineTokenizer(tokenizer_folder)) as (client, _):
        yield client


MESSAGES = [{"role": "user", "content": "The quick brown fox"}]


def test_chat_goes_through_the_template(chatty: httpx.Client) -> None:
    """A chat's prompt is what the template writes, as /tokenize says, and its answer is an assistant's."""
    tokens = chatty.post("/tokenize", json={"messages": MESSAGES}).json()
    answer = chatty.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 4}).json()
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["prompt_tokens"] == tokens["count"] == len(tokens["tokens"])
    assert answer["choices"][0]["message"]["role"] == "assistant"
    body = {"messages": MESSAGES, "max_completion_tokens": 4, "stream": True}
    lines = chatty.post("/v1/chat/completions", json=body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == answer["choices"][0]["message"]["content"]


def test_text_prompt_is_tokenized_as_tokenize_says(chatty: httpx.Client) -> None:
    """A text gives the same prompt as its token ids, with the BOS; /detokenize goes back."""
    text = "vLLM names every full block"
    tokens = chatty.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert tokens["token_strs"][0] == "<s>"
    by_text = complete(chatty, prompt=text, max_tokens=2, return_token_ids=True)
    assert by_text["choices"][0]["prompt_token_ids"] == tokens["tokens"]
    by_ids = complete(chatty, prompt=tokens["tokens"], max_tokens=2, return_token_ids=True)
    assert by_ids["choices"][0]["token_ids"] == by_text["choices"][0]["token_ids"]
    assert chatty.post("/detokenize", json={"tokens": tokens["tokens"][1:]}).json() == {"prompt": text}


def finished(client: httpx.Client) -> Counter[str]:
    """Return how many requests have ended, by why."""
    lines = client.get("/metrics").text.splitlines()
    counts = [line for line in lines if line.startswith("vllm:request_success_total{")]
    return Counter(
        {line.split('finished_reason="')[1].split('"')[0]: int(float(line.split()[-1])) for line in counts}
    )


def test_stop_string_ends_the_text(chatty: httpx.Client) -> None:
    """The text ends before the stop string, the engine's request with it."""
    body = {"prompt": "The quick brown fox", "max_tokens": 60, "ignore_eos": True}
    whole = complete(chatty, **body)["choices"][0]["text"]
    before = finished(chatty)
    stop = whole[len(whole) // 2 : len(whole) // 2 + 2]
    stopped = complete(chatty, **body, stop=[stop], return_token_ids=True)
    answer = stopped["choices"][0]
    assert answer["text"] == whole[: whole.index(stop)]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop)
    # No token after the one that ends the text is given or counted, however far the engine was ahead.
    used = stopped["usage"]["completion_tokens"]
    assert len(answer["token_ids"]) == used
    detokenized = [
        chatty.post("/detokenize", json={"tokens": answer["token_ids"][:count]}).json()["prompt"]
        for count in (used, used - 1)
    ]
    assert [stop in text for text in detokenized] == [True, False]
    wait_for(lambda: metric(chatty, "vllm:num_requests_running") == 0, "the end of the request")
    assert wait_for(lambda: finished(chatty) - before, "its count") == Counter(stop=1)


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/chat/completions", {"messages": "hi"}, "$.messages"),
        ("/v1/chat/completions", {"messages": []}, "$.messages"),
        ("/v1/chat/completions", {"messages": [{"content": "hi"}]}, "$.messages[0].role"),
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/chat/completions", {"messages": MESSAGES, "chat_template": "x"}, "chat-template"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 400}, "maximum context length"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "only text parts",
        ),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 0}, "$.max_tokens"),
        ("/v1/chat/completions", {"messages": MESSAGES, "top_logprobs": 2}, "`logprobs` must be set"),
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21},
            "$.top_logprobs",
        ),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "$.prompt"),
        ("/detokenize", {"tokens": ["a"]}, "$.tokens[0]"),
        ("/detokenize", {"tokens": [10_000]}, "vocabulary"),
        ("/v1/completions", {"prompt": ""}, "--"),
    ],
)
def test_bad_chat_and_text_are_400s(chatty: httpx.Client, path: str, body: Any, says: str) -> None:
    """What a tokenizer or a template cannot take is the client's error, not the server's."""
    answer = chatty.post(path, json=body)
    if body == {"prompt": ""}:
        assert answer.status_code == 200  # the BOS makes it a prompt
        return
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def called(calls: Any) -> dict[str, Any]:
    """Return a chat whose assistant calls tools."""
    return {"messages": [{"role": "assistant", "content": "x", "tool_calls": calls}]}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (called(5), "$.messages[0].tool_calls"),
        (called(True), "$.messages[0].tool_calls"),
        (called([5]), "$.messages[0].tool_calls[0]"),
        (
            called([{"function": {"name": "f", "arguments": "[" * 100_000}}]),
            "$.messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": MESSAGES, "chat_template_kwargs": {"self": 1}}, "$.chat_template_kwargs.self"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"messages": 1}}, "$.chat_template_kwargs.messages"),
        ({"messages": [{"role": "user"}], "continue_final_message": True}, "$.messages"),
    ],
)
def test_no_chat_is_a_fault_of_the_server(chatty: httpx.Client, path: str, body: Any, says: str) -> None:
    """Whatever a chat makes a template or a tokenizer raise, the client is told, with its place and no Python."""
    answer = chatty.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "BadRequestError")
    assert f"at {says}" in error["message"]
    assert "keyword argument" not in error["message"]


def test_template_kwargs_that_a_field_overrides_have_no_effect(chatty: httpx.Client) -> None:
    """As in vLLM the flags of a request win over those among the template's variables."""
    kwargs = {"add_generation_prompt": False, "continue_final_message": True, "documents": []}
    bodies: list[dict[str, Any]] = [{}, {"chat_template_kwargs": kwargs}]
    plain, given = (chatty.post("/tokenize", json={"messages": MESSAGES, **body}).json() for body in bodies)
    assert plain["tokens"] == given["tokens"]


@pytest.mark.parametrize(
    ("path", "make"),
    [
        ("/v1/completions", lambda text: {"prompt": text}),
        ("/v1/completions", lambda text: {"prompt": ["a", text]}),
        ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}),
    ],
)
def test_a_text_that_cannot_fit_is_never_tokenized(
    chatty: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str, make: Any
) -> None:
    """A text of more characters than the model's tokens can have is refused at once; no tokenizer sees it."""
    seen: list[int] = []
    encode = PreTrainedTokenizerBase.encode

    def counted(self: Any, text: str, **kwargs: Any) -> Any:
        seen.append(len(text))
        return encode(self, text, **kwargs)

    monkeypatch.setattr(PreTrainedTokenizerBase, "encode", counted)
    answer = chatty.post(path, json=make("x" * 5_000_000))
    assert answer.status_code == 400
    assert "maximum context length is 400 tokens" in answer.json()["error"]["message"]
    assert max(seen, default=0) < 10


def test_a_body_past_the_bound_is_a_413(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body with too many bytes is refused on every endpoint; one at the bound is read, and so is the next request."""
    monkeypatch.setattr("engine_ref.server.app.MAX_BODY", 300_000)
    good = b'{"prompt":[1],"max_tokens":1}'
    assert client.post("/v1/completions", content=good.ljust(300_000)).status_code == 200
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = client.post(path, content=good.ljust(300_001))
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, 413)
        assert "300000 bytes" in answer.json()["error"]["message"]
    assert complete(client, prompt=[1], max_tokens=1)


class SureRunner(NullRunner):
    """Reports log-probabilities as a model's runner does: each token's own, and one other."""

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> dict[str, list[int]]:
        """Give the usual tokens, and a report of each."""
        sampled = super().execute(plan, requests)
        for request_id, tokens in sampled.items():
            request = requests[request_id]
            for position in range(1, request.num_prompt_tokens):
                self._note(request, position, request.all_token_ids[position])
            for i, token in enumerate(tokens):
                self._note(request, request.num_tokens + i, token)
        return sampled

    @staticmethod
    def _note(request: Request, position: int, token: int) -> None:
        request.logprobs[position] = TokenLogprobs(token, -0.5, 2, {7: -0.25, token: -0.5})


def test_logprobs_are_in_the_forms_of_the_apis(
    monkeypatch: pytest.MonkeyPatch, tokenizer_folder: Path
) -> None:
    """What a runner reports is in completions, streams, chats and prompt logprobs, each in its own form."""
    monkeypatch.setattr("engine_ref.build.make_runner", lambda options: SureRunner(vocab_size=400))
    with serving(small_options(), tokenizer=EngineTokenizer(tokenizer_folder)) as (client, _):
        body = {"prompt": [10, 11, 12], "max_tokens": 3, "logprobs": 1, "prompt_logprobs": 1}
        choice = complete(client, **body, return_token_ids=True)["choices"][0]
        shown = choice["logprobs"]
        assert shown["token_logprobs"] == [-0.5] * 3
        assert [set(top.values()) for top in shown["top_logprobs"]] == [{-0.25, -0.5}] * 3
        assert shown["text_offset"][0] == 0
        assert choice["prompt_logprobs"][0] is None
        assert choice["prompt_logprobs"][1]["11"]["rank"] == 2
        lines = client.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        streamed = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
        assert streamed == shown["tokens"]
        chat = {"messages": MESSAGES, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
        content = client.post("/v1/chat/completions", json=chat).json()["choices"][0]["logprobs"]["content"]
        assert [entry["logprob"] for entry in content] == [-0.5] * 2
        assert len(content[0]["top_logprobs"]) == 2
        assert complete(client, prompt=[10, 11], max_tokens=1)["choices"][0]["logprobs"] is None


class DyingRunner(NullRunner):
    """Raises at a prompt of sixes."""

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> dict[str, list[int]]:
        """Fail as a broken device does."""
        if any(request.all_token_ids[0] == 6 for request in requests.values()):
            raise RuntimeError("the device is gone")
        return super().execute(plan, requests)


def test_dead_engine_answers_all_with_503(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the engine's thread is dead nothing waits for it: all is a 503, and the server can end."""
    monkeypatch.setattr("engine_ref.build.make_runner", lambda options: DyingRunner())
    with serving(small_options()) as (client, frontend):
        assert client.post("/v1/completions", json={"prompt": [6], "max_tokens": 2}).status_code == 503
        assert client.get("/health").status_code == 503
        assert client.post("/v1/completions", json={"prompt": [1], "max_tokens": 2}).status_code == 503
        assert client.post("/reset_prefix_cache").status_code == 503
        engine: Any = frontend.ranks[0]
        pending = engine.reset_prefix_cache()
        assert isinstance(pending.exception(timeout=DEADLINE_S), RuntimeError)
        assert not frontend._generations


SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {"async_scheduling": True},
        {"speculative_config": SPECULATIVE},
        {"num_gpu_blocks": 60, "max_num_seqs": 8},
        {"num_gpu_blocks": 60, "async_scheduling": True, "max_num_batched_tokens": 32},
        {"enable_prefix_caching": False},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 200},
        {"long_prefill_token_threshold": 16},
        {"decode_context_parallel_size": 2},
        {"scheduling_policy": "priority", "watermark": 0.1},
        {"info": ModelInfo(layers=(None, 16))},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_tokens_do_not_depend_on_the_settings(changes: dict[str, Any]) -> None:
    """However the engine schedules, drafts, preempts or groups its cache, many clients get the same tokens."""
    options = small_options(**{"max_model_len": 140, "num_gpu_blocks": 300, **changes})
    with serving(options) as (client, _):
        tally = run_clients(str(client.base_url), clients=8, seconds=0.5)
        assert tally.answered
        assert not tally.wrong
        wait_for(lambda: metric(client, "vllm:num_requests_running") == 0, "the end of every request")
        assert metric(client, "vllm:kv_cache_usage_perc") == 0


def test_ranks_are_processes_behind_one_server() -> None:
    """Each rank has its own cache and its own event endpoints; a router's header chooses, batches say which it was."""
    options = small_options()

    def make_rank(rank: int, deliver: Any) -> RankProcess:
        return RankProcess(options, deliver, rank=rank)

    prompt = list(range(17))
    hashes = tuple(HASHER.chain(prompt).external())
    with serving(options, make_rank=make_rank, ranks=2) as (client, frontend):
        for rank in (0, 1, 0, 1):
            headers = {"X-data-parallel-rank": str(rank)}
            answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}, headers=headers)
            assert answer.json()["choices"][0]["token_ids"] == expected_tokens(prompt, 1)
        assert 'hits_total{engine="1",model_name="null"} 16.0' in client.get("/metrics").text
        assert stored_by(frontend) == {0: [hashes], 1: [hashes]}
        assert client.post("/reset_prefix_cache").json() == {"success": True}
        frontend.ranks[1]._process.kill()  # type: ignore[attr-defined]
        wait_for(lambda: client.get("/health").status_code == 503, "the rank's end")
        assert client.post("/reset_prefix_cache").status_code == 503
        assert frontend.ranks[1].reset_prefix_cache(
            reset_running_requests=False, reset_external=False
        ).result(timeout=DEADLINE_S) in (True, False)


def test_a_rank_that_dies_ends_its_requests_alone() -> None:
    """After kill -9 of a rank its stream ends with an error that says so; the other rank goes on to its end."""
    options = small_options(max_model_len=100_000, num_gpu_blocks=50_002)

    def make_rank(rank: int, deliver: Any) -> RankProcess:
        return RankProcess(options, deliver, rank=rank)

    def generate(rank: int, max_tokens: int) -> Any:
        body = {"prompt": [1] * 9, "max_tokens": max_tokens, "stream": True}
        headers = {"X-data-parallel-rank": str(rank)}
        return client.stream("POST", "/v1/completions", json=body, headers=headers)

    with (
        serving(options, make_rank=make_rank, ranks=2) as (client, frontend),
        generate(0, 3000) as lives,
        generate(1, 90_000) as dies,
    ):
        answers = [answer.iter_lines() for answer in (dies, lives)]
        begun = [next(lines) for lines in answers]
        frontend.ranks[1]._process.kill()  # type: ignore[attr-defined]
        ended, whole = (
            [json.loads(text) for line in (first, *lines) if (text := line[6:]) not in ("", "[DONE]")]
            for first, lines in zip(begun, answers, strict=True)
        )
        assert ended[-1]["error"]["code"] == 503
        assert "died" in ended[-1]["error"]["message"]
        tokens = [token for chunk in whole for token in chunk["choices"][0]["token_ids"]]
        assert tokens == expected_tokens([1] * 9, 3000)
        assert client.post("/v1/completions", json={"prompt": [1]}).status_code == 503
        assert not frontend._generations


def stored_by(frontend: Frontend) -> dict[int | None, list[tuple[Any, ...]]]:
    """Return the hashes that each rank published, from its replay."""
    stored: dict[int | None, list[tuple[Any, ...]]] = {}
    sources = [Source(str(rank.endpoints[0]), rank.endpoints[1]) for rank in frontend.ranks]
    with Subscriber(sources, from_seq="start") as subscriber:
        while len(stored) < len(sources):
            record = subscriber.poll(DEADLINE_S)
            assert record is not None
            if isinstance(record, Batch):
                stored.setdefault(record.batch.data_parallel_rank, []).extend(
                    event.block_hashes for event in record.batch.events if isinstance(event, BlockStored)
                )
    return stored
