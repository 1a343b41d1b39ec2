"""Requests go where their prefix is, by exact hashes and live events of real engines."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvhash_router.config import AdapterConfig, EngineConfig, HashSettings, ModelConfig, RouterConfig
from kvhash_router.decision_log import DecisionLog, prompt_json
from kvhash_router.prompts import PromptHasher

import kvhash.events.publisher
from kvhash import BlockHasher
from kvhash.diff import diff_requests
from kvhash.events.decode import decode_batch
from kvhash.events.schema import BlockStored, EventBatch, hash_key
from kvhash.prompt import Tokenizer
from kvhash.request import HashRequest

from ..data_files import CAPTURES, capture
from ..ports import free_base
from .running import (
    EngineProcess,
    RunningRouter,
    chunk,
    engines,
    environment,
    event,
    router,
    stream_head,
    stubs,
    wait_for,
    whole,
)

PROMPT = list(range(200))
SETTINGS = HashSettings(algorithm="sha256_cbor", hash_seed="0")


@pytest.fixture(scope="module")
def fleet() -> Iterator[list[EngineProcess]]:
    """Run two engines for the tests that leave them as they are."""
    with engines(2, "--step-ms", "1") as started:
        yield started


def other(engine: str) -> str:
    """Return the other of two engines."""
    return {"e0": "e1", "e1": "e0"}[engine]


def cached(answer: Any) -> int:
    """Return the cached tokens that the engine reported."""
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_second_turn_goes_where_the_first_was(fleet: list[EngineProcess]) -> None:
    """A prompt that goes on from another goes to its engine, which has what the router said it has."""
    with router(fleet) as running:
        first = running.complete(PROMPT)
        engine = first.headers["x-kvhash-engine"]
        wait_for(lambda: running.where(PROMPT)["matched_tokens"][engine] == 192, "the blocks to be announced")
        place = running.where([*PROMPT, *range(500, 540)])
        assert place["engine"] == engine
        assert place["basis"] == "prefix"
        assert place["matched_tokens"] == {engine: 192, other(engine): 0}
        second = running.complete([*PROMPT, *range(500, 540)])
        assert second.headers["x-kvhash-engine"] == engine
        assert cached(second) == 192
        # The last token is computed whatever is cached, so its block is not counted as held.
        assert running.where(PROMPT[:192])["matched_tokens"][engine] == 176
        assert cached(running.complete(PROMPT[:192])) == 176
        state = running.state(engine)
        assert state["knowledge"] == "exact"
        assert state["hashes"]["matched"] >= 12
        assert state["hashes"]["mismatched"] == 0


def test_router_that_starts_later_learns_what_was_stored_before(fleet: list[EngineProcess]) -> None:
    """By replay from the start, a new router knows the caches of engines that ran before it."""
    prompt = [7, *range(1000, 1200)]
    with router(fleet) as running:
        engine = running.complete(prompt).headers["x-kvhash-engine"]
    with router(fleet) as running:
        wait_for(lambda: running.where(prompt)["matched_tokens"][engine] == 192, "the replay")
        assert running.where(prompt)["engine"] == engine


def test_salted_prompt_never_matches_an_unsalted_one(fleet: list[EngineProcess]) -> None:
    """A cache salt makes other hashes: neither plain nor another salt's blocks count for it."""
    prompt = [8, *range(2000, 2200)]
    with router(fleet) as running:
        engine = running.complete(prompt, cache_salt="tenant").headers["x-kvhash-engine"]
        wait_for(
            lambda: running.where(prompt, cache_salt="tenant")["matched_tokens"][engine] == 192, "the blocks"
        )
        assert set(running.where(prompt)["matched_tokens"].values()) == {0}
        assert set(running.where(prompt, cache_salt="x")["matched_tokens"].values()) == {0}
        assert cached(running.complete(prompt)) == 0


def test_streams_are_passed_on_as_they_come(fleet: list[EngineProcess]) -> None:
    """A streamed answer has the engine's events, whole and in order, to the end mark."""
    with router(fleet) as running:
        answer = running.complete(PROMPT, max_tokens=5, stream=True)
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [one for one in answer.text.split("\n\n") if one]
        assert len(events) == 7
        assert events[-1] == "data: [DONE]"
        tokens = [json.loads(one[6:])["choices"][0]["token_ids"][0] for one in events[:5]]
        assert tokens == running.complete(PROMPT, max_tokens=5).json()["choices"][0]["token_ids"]


def test_settings_that_are_not_the_engines_are_found_out(fleet: list[EngineProcess]) -> None:
    """With another seed than the engine's, its own events show it: unknown, with the reason, and load alone decides."""
    wrong = ModelConfig(hash=msgspec.structs.replace(SETTINGS, hash_seed="1"))
    prompt = [9, *range(3000, 3200)]
    with router(fleet, model=wrong) as running:
        engine = running.complete(prompt).headers["x-kvhash-engine"]
        wait_for(lambda: running.state(engine)["knowledge"] == "unknown", "the mismatch")
        assert running.state(engine)["reason"].startswith("hash-mismatch: the engine published")
        assert running.where(prompt)["basis"] == "load"
        assert running.complete(prompt).status_code == 200
        assert running.metric(f'kvhash_router_knowledge{{engine="{engine}",state="unknown"}}') == 1


def test_errors_of_a_request_are_told_as_the_api_tells_them(fleet: list[EngineProcess]) -> None:
    """The router refuses what it cannot route; what the engine refuses comes back as the engine said it."""
    with router(fleet) as running:
        post = running.client.post
        assert post("/v1/completions", content=b"{").status_code == 400
        assert post("/v1/completions", json=[1]).json()["error"]["message"] == "expected a JSON object"
        answer = running.complete(PROMPT, model="nobody")
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == "the model 'nobody' does not exist"
        answer = running.complete([10**9])
        assert answer.status_code == 400
        assert "vocabulary" in answer.json()["error"]["message"]
        assert running.complete("text, without a tokenizer").status_code == 400
        assert [card["id"] for card in running.client.get("/v1/models").json()["data"]] == ["demo"]
        assert running.client.get("/health").status_code == 200


def test_too_large_a_body_is_refused_unread(fleet: list[EngineProcess]) -> None:
    """A body above the limit is answered 413, not kept."""
    from kvhash_router.config import ProxyConfig

    with router(fleet, proxy=ProxyConfig(max_body_bytes=1000)) as running:
        assert running.complete(list(range(1000))).status_code == 413
        assert running.complete([1, 2, 3]).status_code == 200


class Publisher:
    """Announces blocks as an engine does, without one."""

    def __init__(self, *, replay: bool = True, endpoint: str = "tcp://127.0.0.1:*", rank: int = 0) -> None:
        self._rank = rank
        self._publisher = kvhash.events.publisher.Publisher(
            endpoint, "tcp://127.0.0.1:*" if replay else None, bind=True
        )

    def engine(self, name: str, url: str = "") -> EngineConfig:
        """Return the engine's configuration; without a URL nothing answers its requests."""
        return EngineConfig(
            url=url or f"http://127.0.0.1:9/{name}",
            name=name,
            events=self._publisher.endpoint,
            replay=self._publisher.replay_endpoint,
        )

    def store(
        self, hasher: BlockHasher, tokens: list[int], *, lora: str | None = None, path: str = ""
    ) -> None:
        """Announce a prompt's blocks."""
        adapter = {"name": lora, "path": path} if lora else None
        chain = hasher.chain(tokens, lora=adapter)
        event = BlockStored(
            block_hashes=tuple(chain.external()),
            parent_block_hash=None,
            token_ids=tuple(tokens[: len(chain) * hasher.span]),
            block_size=hasher.span,
            lora_id=1 if lora else None,
            medium="GPU",
            lora_name=lora,
            extra_keys=tuple(chain.event_extra_keys()),  # type: ignore[arg-type]
            group_idx=0,
        )
        batch = EventBatch(ts=time.time(), events=(event,), data_parallel_rank=self._rank)
        self._publisher.publish(batch)

    def close(self) -> None:
        """Close the sockets."""
        self._publisher.close()


class Named:
    """What `router` takes as an engine: a configuration."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config


@pytest.fixture
def publishers() -> Iterator[list[Publisher]]:
    """Return two publishers."""
    pair = [Publisher(), Publisher()]
    yield pair
    for publisher in pair:
        publisher.close()


def test_adapter_is_looked_up_by_its_name_and_path(publishers: list[Publisher]) -> None:
    """A request of an adapter matches its own blocks, not the base model's, and the base model not the adapter's."""
    hasher = SETTINGS.hasher()
    model = ModelConfig(
        hash=SETTINGS,
        adapters={"sql": AdapterConfig(path="adapters/sql"), "bad": AdapterConfig(path="/not/it")},
    )
    served = [Named(one.engine(f"e{i}")) for i, one in enumerate(publishers)]
    with router(served, model=model) as running:
        publishers[0].store(hasher, PROMPT)
        publishers[1].store(hasher, PROMPT, lora="sql", path="adapters/sql")
        wait_for(lambda: running.where(PROMPT)["matched_tokens"] == {"e0": 192, "e1": 0}, "the base blocks")
        wait_for(
            lambda: running.where(PROMPT, model="sql")["matched_tokens"] == {"e0": 0, "e1": 192},
            "the adapter's",
        )
        # A path that is not the engine's is found out, and costs only that adapter its lookups.
        publishers[1].store(hasher, PROMPT, lora="bad", path="/the/real/one")
        wait_for(lambda: "bad" in running.state("e1")["hashes"]["faults"], "the mismatch")
        assert "adapter 'bad'" in running.state("e1")["hashes"]["faults"]["bad"]
        assert running.where(PROMPT, model="bad")["basis"] == "load"
        assert running.where(PROMPT, model="sql")["engine"] == "e1"
        assert [card["parent"] for card in running.client.get("/v1/models").json()["data"]] == [
            None,
            "demo",
            "demo",
        ]


def test_chat_is_hashed_as_the_template_renders_it(
    publishers: list[Publisher], tokenizer_folder: Path
) -> None:
    """A chat is looked up by the tokens of its rendered template; tools and template options change them."""
    tokenizer = Tokenizer(tokenizer_folder)
    messages = [
        {"role": "system", "content": "A router that knows the prefix sends the request where it is cached."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "The quick brown fox jumps over the lazy dog."}],
        },
    ]
    tokens = list(tokenizer.encode_chat(messages).tokens)
    matched = (len(tokens) - 1) // 16 * 16
    model = ModelConfig(hash=SETTINGS, tokenizer=str(tokenizer_folder))
    served = [Named(one.engine(f"e{i}")) for i, one in enumerate(publishers)]
    with router(served, model=model) as running:
        publishers[1].store(SETTINGS.hasher(), tokens)

        def ask(**fields: Any) -> dict[str, Any]:
            answer = running.client.post("/debug/residency", json={"messages": messages, **fields})
            return dict(answer.json())

        wait_for(lambda: ask()["matched_tokens"] == {"e0": 0, "e1": matched}, "the blocks")
        assert ask()["prompt_tokens"] == len(tokens)
        assert ask(chat_template_kwargs={"style": "x"})["matched_tokens"]["e1"] == 0
        image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
        assert ask(messages=[image])["unhashed"].startswith("invalid-request: only text parts")
        assert ask(messages=[image])["basis"] == "load"


@pytest.mark.parametrize("name", CAPTURES)
def test_prompts_are_hashed_as_a_recorded_vllm_hashed_them(name: str) -> None:
    """Every full block of every request that a real server got, by its body alone, is one that the server published."""
    recorded = capture(name)
    settings = HashSettings(
        vllm="0.32.0", algorithm=recorded["algo"], hash_seed=recorded["hash_seed"], block_size=32
    )
    config = ModelConfig(hash=settings, adapters={"sql": AdapterConfig(path="adapters/sql")})
    hasher = PromptHasher("demo", config)
    published = {
        hash_key(value)
        for _, _, payload in recorded["frames"]
        for event in decode_batch(bytes.fromhex(payload)).events
        if isinstance(event, BlockStored)
        for value in event.block_hashes
    }
    blocks = 0
    for request in recorded["requests"]:
        if "prompt" in request:
            body = {"prompt": request["prompt"], "cache_salt": request.get("cache_salt")}
            adapter = "sql" if request.get("model") == "sql" else None
            (prompt,) = hasher.plan(body, adapter, path="/v1/completions").prompts
            assert {hash_key(value) for value in prompt.hashes} <= published
            blocks += len(prompt.hashes)
    assert blocks > 20


def test_template_of_the_configuration_replaces_the_tokenizers(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    """A chat is rendered by the file that the engines got, with a newline at its end or not; a request's own wins."""
    template = "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"
    file = tmp_path / "chat.jinja"
    file.write_text(template)
    config = ModelConfig(hash=SETTINGS, tokenizer=str(tokenizer_folder), chat_template=str(file))
    messages = [{"role": "user", "content": "the quick brown fox " * 20}]
    expected = Tokenizer(tokenizer_folder).encode_chat(messages, chat_template=template).tokens
    assert expected != Tokenizer(tokenizer_folder).encode_chat(messages).tokens
    hasher = PromptHasher("demo", config)
    (prompt,) = hasher.plan({"messages": messages}, None).prompts
    assert prompt.request.tokens == expected
    other = template.replace("[", "<")
    (own,) = hasher.plan({"messages": messages, "chat_template": other}, None).prompts
    assert own.request.tokens == Tokenizer(tokenizer_folder).encode_chat(messages, chat_template=other).tokens


def test_each_model_has_its_engines(tmp_path: Path) -> None:
    """Of several models a request goes to the engines of its own; without a name, or of another, it goes nowhere."""

    async def answer(writer: Any, _: dict[str, Any]) -> None:
        whole(writer, 200, b"{}")

    file = tmp_path / "router.json"
    file.write_text("{}")
    with stubs(answer, answer) as served, router(served[:1], app={"config_file": file}) as running:
        models = {
            "a": {"hash": {"hash_seed": "0"}, "adapters": {"sql": {"path": "p"}}},
            "b": {"hash": {"hash_seed": "0"}},
            "c": {},
        }
        engines = [
            {"url": one.url, "name": one.name, "model": model}
            for one, model in zip(served, "ab", strict=True)
        ]
        file.write_text(json.dumps({"models": models, "engines": engines}))
        wait_for(lambda: running_pair(running) == {"s0", "s1"}, "the models")
        for model, status, engine in (
            ("a", 200, "s0"),
            ("sql", 200, "s0"),
            ("b", 200, "s1"),
            ("c", 503, None),
            ("d", 404, None),
            (None, 404, None),
            ("", 404, None),
        ):
            said = running.complete(PROMPT, model=model)
            if model is None:
                assert said.json()["error"]["message"] == "expected the name of a model: a, sql, b, c"
            assert (said.status_code, said.headers.get("x-kvhash-engine")) == (status, engine), model
        cards = running.client.get("/v1/models").json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("a", None),
            ("sql", "a"),
            ("b", None),
            ("c", None),
        ]


def test_events_that_were_missed_leave_degraded_knowledge() -> None:
    """What was published before the router came, and is replayed by nobody, is a loss: a match counts half."""
    publisher = Publisher(replay=False)
    try:
        with router([Named(publisher.engine("late"))]) as running:
            hasher = SETTINGS.hasher()
            # Nothing says when a subscription has reached the publisher, so it is announced until it has.
            wait_for(
                lambda: publisher.store(hasher, PROMPT) or running.state("late")["records"].get("Batch"),
                "a batch",
            )
        publisher.store(hasher, PROMPT)
        with router([Named(publisher.engine("late"))]) as running:
            wait_for(
                lambda: publisher.store(hasher, PROMPT) or running.state("late")["records"].get("Lost"),
                "the loss",
            )
            wait_for(lambda: running.state("late")["knowledge"] == "degraded", "the knowledge")
            wait_for(lambda: running.where(PROMPT)["matched_tokens"] == {"late": 192}, "the blocks")
    finally:
        publisher.close()


def test_engine_without_events_is_routed_to_by_load() -> None:
    """An engine that sends no events is a candidate all the same; the reason is said."""

    async def answer(writer: Any, _: dict[str, Any]) -> None:
        whole(writer, 200, b'{"usage":{"prompt_tokens":3,"completion_tokens":1}}')

    with stubs(answer) as served, router(served) as running:
        assert running.complete(PROMPT).status_code == 200
        assert running.state("s0")["reason"].startswith("no-events")
        assert served[0].requests[0][1]["prompt"] == PROMPT


def test_rank_that_holds_the_prefix_is_asked_for() -> None:
    """Behind one address with two data parallel ranks, the request carries the rank that its prefix is on."""

    async def answer(writer: Any, _: dict[str, Any]) -> None:
        whole(writer, 200, b'{"usage":{"prompt_tokens":3,"completion_tokens":1}}')

    base = free_base(1)
    ranks = [Publisher(replay=False, endpoint=f"tcp://127.0.0.1:{base + i}", rank=i) for i in range(2)]
    try:
        with stubs(answer) as served:
            config = EngineConfig(url=served[0].url, name="dp", events=f"tcp://127.0.0.1:{base}", ranks=2)
            with router([Named(config)]) as running:
                wait_for(
                    lambda: (
                        ranks[1].store(SETTINGS.hasher(), PROMPT)
                        or running.where(PROMPT)["matched_tokens"] == {"dp": 192}
                    ),
                    "the blocks",
                )
                assert running.complete(PROMPT).status_code == 200
                assert running.complete([1, 2, 3]).status_code == 200
            assert [head.get("x-data-parallel-rank") for head in served[0].headers] == ["1", None]
    finally:
        for rank in ranks:
            rank.close()


def test_unfinished_requests_count_as_held_and_as_load() -> None:
    """While a prompt is being computed a second one with its prefix goes there, and others go where less is queued."""

    async def hang(writer: Any, _: dict[str, Any]) -> None:
        stream_head(writer)
        chunk(writer, event("a"))
        await writer.drain()
        import asyncio

        await asyncio.sleep(60)

    publishers = [Publisher(), Publisher()]
    try:
        with stubs(hang, hang) as stub_engines:
            served = [
                Named(p.engine(f"e{i}", s.url))
                for i, (p, s) in enumerate(zip(publishers, stub_engines, strict=True))
            ]
            with router(served) as running:
                with running.client.stream(
                    "POST", "/v1/completions", json={"prompt": PROMPT, "max_tokens": 50, "stream": True}
                ) as answer:
                    engine = answer.headers["x-kvhash-engine"]
                    assert running.where(PROMPT)["matched_tokens"] == {engine: 192, other(engine): 0}
                    assert running.where([1, 2, 3])["engine"] == other(engine)
                    assert 0 < running.state(engine)["queued_tokens"] <= 50
                wait_for(lambda: running.state(engine)["in_flight"] == 0, "the request's end")
                assert running.where(PROMPT)["matched_tokens"] == {engine: 0, other(engine): 0}
    finally:
        for publisher in publishers:
            publisher.close()


def diff(left: Any, right: Any) -> tuple[int, dict[str, Any]]:
    """Run `kvhash diff` on two values of the log."""
    program = "import sys; from kvhash_cli.entry import kvhash_main; sys.exit(kvhash_main())"
    done = subprocess.run(
        [sys.executable, "-c", program, "diff", "-o", "jsonl", json.dumps(left), json.dumps(right)],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def logged(file: Path, count: int) -> list[dict[str, Any]]:
    """Return the log's lines, once there are so many."""
    wait_for(lambda: file.exists() and file.read_text().count("\n") >= count, "the log")
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]]


@pytest.mark.parametrize("with_tokens", [False, True])
def test_kvhash_diff_explains_a_miss_from_the_log(
    fleet: list[EngineProcess], tmp_path: Path, with_tokens: bool
) -> None:
    """Two lines' prompts given to `kvhash diff` say why the second did not hit: the salt, or where tokens part."""
    file = tmp_path / "decisions.jsonl"
    log = DecisionLog(str(file), with_tokens=with_tokens)
    seen = 40 + with_tokens
    with router(fleet, app={"decision_log": log}) as running:
        first, second = [seen, *range(200)], [seen, *range(100), 5, *range(101, 200)]
        engine = running.complete(first).headers["x-kvhash-engine"]
        wait_for(lambda: running.where(first)["matched_tokens"][engine] == 192, "the blocks")
        running.complete(first, cache_salt="t")
        running.complete(second)
        lines = logged(file, 3)
    assert [line["cached_tokens"] for line in lines] == [0, 0, 96]
    assert [line["outcome"] for line in lines] == ["ok"] * 3
    hit = next(one for one in lines[2]["candidates"] if one["engine"] == engine)
    assert (hit["matched_tokens"], hit["knowledge"]) == (96, "exact")
    prompts = [line["prompts"][0] for line in lines]
    code, salted = diff(prompts[0], prompts[1])
    assert (code, salted["common_blocks"]) == (1, 0)
    code, parted = diff(prompts[0], prompts[2])
    assert (code, parted["common_blocks"], parted["first_block"]) == (1, 6, 6)
    if with_tokens:
        assert salted["reasons"][0]["code"] == "cache-salt"
        assert parted["reasons"][0]["message"].startswith("token 101 (block 6) is 100 on one side, 5 on")
    else:
        assert "tokens" not in prompts[0]
        assert parted["reasons"][0]["code"] == "from-the-middle"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"settings": {"hash_seed": "1"}}, "root"),
        ({"settings": {"algorithm": "sha256"}}, "algorithm"),
        ({"settings": {"block_size": 32}}, "block-size"),
        ({"body": {"cache_salt": "t"}}, "cache-salt"),
        ({"adapter": "sql"}, "lora-name"),
        ({"adapter": "sql", "path": "/not/it", "both": {"adapter": "sql"}}, "lora-path"),
        ({"body": {"prompt": [1, *PROMPT]}}, "leading-token"),
        ({"body": {"prompt": [*PROMPT[:50], 7, *PROMPT[50:]]}}, "token"),
    ],
)
def test_lines_of_the_log_say_what_was_wrong(changed: dict[str, Any], reason: str) -> None:
    """Two request lines of the log, one of them with a setting that is not the engine's: the difference is named."""

    def line(
        *, settings: dict[str, Any] | None = None, body: dict[str, Any] | None = None, adapter: str | None = None,
        path: str = "p", both: dict[str, Any] | None = None,
    ) -> HashRequest:  # fmt: skip
        del both
        model = ModelConfig(
            hash=msgspec.structs.replace(SETTINGS, **(settings or {})),
            adapters={"sql": AdapterConfig(path=path)},
        )
        plan = PromptHasher("demo", model).plan({"prompt": PROMPT, **(body or {})}, adapter)
        return HashRequest.of(prompt_json(plan.prompts[0], with_tokens=True))

    found = diff_requests(line(**changed.get("both", {})), line(**changed))
    assert not found.equal
    assert found.reasons[0][0] == reason, found.reasons


def test_other_template_of_an_engine_is_said(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """An engine that counts other prompt tokens than were hashed makes other ones: counted, logged, and said once."""

    async def answer(writer: Any, body: dict[str, Any]) -> None:
        counted = len(body["prompt"]) + body.get("more", 0)
        whole(writer, 200, b'{"usage":{"prompt_tokens":%d,"completion_tokens":1}}' % counted)

    file = tmp_path / "log"
    with stubs(answer) as served, router(served, app={"decision_log": DecisionLog(str(file))}) as running:
        running.complete(PROMPT)
        assert running.metric("kvhash_router_other_prompts_total") == 0
        for _ in range(2):
            running.complete(PROMPT, more=3)
        running.complete(PROMPT, more=3, truncate_prompt_tokens=5)  # not hashed: nothing to compare with
        assert running.metric('kvhash_router_other_prompts_total{engine="s0"}') == 2
    said = [record.getMessage() for record in caplog.records if "were hashed" in record.message]
    assert [text.partition(":")[0] for text in said] == [
        "engine s0 counted 203 prompt tokens where 200 were hashed"
    ]
    numbers = [(one["prompt_tokens"], one["reported_prompt_tokens"]) for one in logged(file, 4)][:3]
    assert numbers == [(200, 200), (200, 203), (200, 203)]


def test_endpoints_of_another_engine_are_told_by_what_does_not_come_true(
    publishers: list[Publisher], caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that reports none of the cached tokens that its events promise is said, once; one that does is not."""

    async def answer(writer: Any, body: dict[str, Any]) -> None:
        said = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": body["say"]}}
        whole(writer, 200, json.dumps({"usage": said}).encode())

    with stubs(answer) as served, router([Named(publishers[0].engine("swapped", served[0].url))]) as running:
        publishers[0].store(SETTINGS.hasher(), PROMPT)
        wait_for(lambda: running.where(PROMPT)["matched_tokens"] == {"swapped": 192}, "the blocks")
        for say, times in ((192, 25), (0, 40), (192, 20)):
            for _ in range(times):
                assert running.complete(PROMPT, say=say).status_code == 200
    said = [record.getMessage() for record in caplog.records if "promise" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("engine swapped reports 2")


def running_pair(running: RunningRouter) -> set[str]:
    """Return the names of the engines that are routed to."""
    return set(running.client.get("/debug/residency").json()["engines"])


def test_engines_come_and_go_with_the_file(fleet: list[EngineProcess], tmp_path: Path) -> None:
    """The watched file adds, removes and re-adds engines; one that cannot be used changes nothing and is counted."""
    file = tmp_path / "router.json"

    def write(*names: str, **fields: Any) -> None:
        listed = [msgspec.to_builtins(one.config) for one in fleet if one.name in names]
        models = {"demo": {"hash": {"algorithm": "sha256_cbor", "hash_seed": "0"}}}
        temporary = tmp_path / "new"
        temporary.write_text(json.dumps({"models": models, "engines": listed, **fields}))
        temporary.replace(file)

    write("e0")
    prompt = [11, *range(4000, 4200)]
    with router(fleet[:1], app={"config_file": file}) as running:
        assert running_pair(running) == {"e0"}
        running.complete(prompt)
        write("e0", "e1")
        wait_for(lambda: running_pair(running) == {"e0", "e1"}, "e1 to come")
        wait_for(lambda: running.where(prompt)["matched_tokens"] == {"e0": 192, "e1": 0}, "the blocks")
        file.write_text('{"models": {"demo": {"hash": {"algorithm": "md5"}}}}')
        wait_for(lambda: running.metric("kvhash_router_config_errors_total") == 1, "the refusal")
        assert running_pair(running) == {"e0", "e1"}
        write("e1", index="http://x")
        wait_for(lambda: running.metric("kvhash_router_config_errors_total") == 2, "the index's refusal")
        assert running_pair(running) == {"e0", "e1"}
        write("e1")
        wait_for(lambda: running_pair(running) == {"e1"}, "e0 to go")
        assert running.where(prompt)["matched_tokens"] == {"e1": 0}
        write("e0", "e1")
        wait_for(lambda: running_pair(running) == {"e0", "e1"}, "e0 to come back")
        wait_for(lambda: running.where(prompt)["matched_tokens"] == {"e0": 192, "e1": 0}, "e0's replay")


def test_watching_outlives_any_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A name with a NUL, endless nesting and an unforeseen error are counted; the next file is read."""
    file = tmp_path / "router.json"
    good: dict[str, Any] = {"models": {"demo": {"hash": {"algorithm": "sha256_cbor", "hash_seed": "0"}}}}
    bad = {"models": {"demo": {"chat_template": "a\0b"}}}
    file.write_text(json.dumps(good))
    engine = {"url": "http://127.0.0.1:1", "name": "late"}
    with router([], app={"config_file": file}) as running:

        def errors() -> float:
            return running.metric("kvhash_router_config_errors_total")

        file.write_text(json.dumps(bad))
        wait_for(lambda: errors() == 1, "the name to be refused")
        file.write_bytes(b'{"models":{"demo":' + b'{"hash":' * 100_000)
        wait_for(lambda: errors() == 2, "the nested file to be refused")
        with monkeypatch.context() as patched:

            def breaks(_: Any) -> RouterConfig:
                raise ZeroDivisionError

            patched.setattr(RouterConfig, "load", breaks)
            file.write_text(json.dumps(good) + " ")
            wait_for(lambda: errors() == 3, "the error to be counted")
        file.write_text(json.dumps({**good, "engines": [engine]}))
        wait_for(lambda: running_pair(running) == {"late"}, "the good file")
