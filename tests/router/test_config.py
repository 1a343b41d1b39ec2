"""Configuration: everything wrong is said before anything starts, with its place; and the command line as a process."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvhash_router.cli import main
from kvhash_router.config import (
    AdapterConfig,
    ConfigError,
    EngineConfig,
    HashSettings,
    HealthConfig,
    ModelConfig,
    ProxyConfig,
    RouterConfig,
    parse_engine_flag,
)
from kvhash_router.decision import Policy
from kvhash_router.metrics import RouterMetrics
from kvhash_router.prompts import PromptHasher
from kvhash_router.sse import EventCutter, usage_in

from .running import DEADLINE_S, ROOT, engines, router_process, wait_for

MODELS: dict[str, Any] = {"m": {"hash": {"hash_seed": "0"}}}
ENGINE: dict[str, Any] = {"url": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"models": {}}, "at least one model - at $.models"),
        ({"models": MODELS, "engines": [{"url": "10.0.0.1:80"}]}, "$.engines[0].url"),
        (
            {"models": MODELS, "engines": [{**ENGINE, "model": "x"}]},
            "expected one of: m - at $.engines[0].model",
        ),
        ({"models": MODELS, "engines": [ENGINE, ENGINE]}, "two engines are named '127.0.0.1:1'"),
        (
            {
                "models": MODELS,
                "engines": [{**ENGINE, "name": "a"}, {"url": "http://127.0.0.1:1/", "name": "b"}],
            },
            "engine 'a' has http://127.0.0.1:1 already - at $.engines[1].url",
        ),
        *(
            (
                {
                    "models": MODELS,
                    "engines": [
                        {**ENGINE, "events": "tcp://h:5", "replay": "tcp://h:9", "ranks": 2},
                        {"url": "http://h:2", "events": "tcp://i:5", **taken},
                    ],
                },
                f"already - at $.engines[1].{next(iter(taken))}",
            )
            for taken in ({"events": "tcp://h:6"}, {"replay": "tcp://h:10"}, {"replay": "tcp://h:5"})
        ),
        ({"models": MODELS, "engines": [{**ENGINE, "events": "tcp://*:5557"}]}, "$.engines[0]"),
        (
            {"models": MODELS, "engines": [{**ENGINE, "replay": "tcp://127.0.0.1:1"}]},
            "without an endpoint of events",
        ),
        ({"models": MODELS, "engines": [{**ENGINE, "ranks": 0}]}, "at least 1 rank"),
        ({"models": MODELS, "engines": [{**ENGINE, "ranks": 10**9}]}, "$.engines[0].ranks"),
        *(
            ({"models": MODELS, "engines": [{"url": url}]}, "$.engines[0].url")
            for url in (
                "http://",
                "http://[::1",
                "http://h:99999",
                "http://h:abc",
                "http://a b",
                "http://h?x=1",
                "http://user:secret@h:1",
                "http://user@h:1",
                "http://:@h",
            )
        ),
        *(
            ({"models": MODELS, "engines": [{**ENGINE, "name": name}]}, "$.engines[0].name")
            for name in ("\u65e5\u672c", "caf\u00e9", "a\nb", "a ")
        ),
        *(
            ({"models": {"m": {"hash": {"hash_seed": seed}}}}, "$.models.m.hash.hash_seed")
            for seed in ("abc", "-1", "4294967296", "1.0", "Random")
        ),
        ({"models": MODELS, "proxy": {"max_body_bytes": -1}}, "$.proxy.max_body_bytes"),
        *(
            ({"models": MODELS, section: {name: seconds}}, f"$.{section}.{name}")
            for section, name in (
                ("proxy", "connect_timeout_s"),
                ("proxy", "read_timeout_s"),
                ("proxy", "stream_idle_s"),
                ("health", "interval_s"),
                ("health", "timeout_s"),
            )
            for seconds in (1e300, 0, -1, 1e-320)
        ),
        *(
            ({"models": MODELS, "policy": {name: value}}, f"$.policy.{name}")
            for name in ("output_weight", "overhead_tokens", "recent_weight", "tie_share", "tie_tokens")
            for value in (1e308, -1)
        ),
        *(
            ({"models": MODELS, "engines": [{**ENGINE, **endpoints}]}, "a path of at most")
            for endpoints in (
                {"events": f"ipc://{'x' * 500}"},
                {"events": "ipc:///tmp/x", "replay": f"ipc:///tmp/{chr(0xE9) * 54}"},
            )
        ),
        ({"models": MODELS, "engine": []}, "unknown field `engine`"),
        ({"models": {"m": {"hash": {"algorithm": "md5"}}}}, "$.models.m.hash"),
        ({"models": {"m": {"hash": {"algorithm": "xxhash"}}}}, "random"),
        ({"models": {"m": {"hash": {"block_size": 0}}}}, "$.models.m.hash.block_size"),
        ({"models": {"m": {"adapters": {"sql": {}}}}}, "path"),
        ({"models": {"m": {"adapters": {"m": {"path": "p"}}}}}, "two models or adapters"),
        ({"models": MODELS, "policy": {"degraded_trust": 2}}, "$.policy.degraded_trust"),
        ({"models": MODELS, "policy": {"tie_tokens": -1}}, "$.policy.tie_tokens"),
        ({"models": MODELS, "policy": {"strategy": "best"}}, "$.policy.strategy"),
        ({"models": MODELS, "proxy": {"retries": -1}}, "$.proxy"),
        ({"models": MODELS, "health": {"failures": 0}}, "$.health"),
        ({"models": MODELS, "max_blocks": 0}, "$.max_blocks"),
        *(
            ({"models": MODELS, "index": index}, "$.index")
            for index in (
                "http://x",
                "",
                "redis",
                "redis://h:abc",
                "redis://h?db=x",
                "redis://h?foo=1",
                "redis://a:1/abc",
                "redis://a:1/1/2",
                "redis://a:1/-1",
                "redis://h?decode_responses=1",
                [],
            )
        ),
        *(
            ({"models": MODELS, "index": ["redis://h", index]}, "$.index[1]")
            for index in (
                "http://x",
                "unix:///s",
                "redis://i/1",
                "rediss://i",
                "redis://u:p@i",
                "redis://h:abc",
            )
        ),
    ],
)
def test_wrong_configuration_is_refused_with_its_place(
    value: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Each mistake is a ConfigError that names the field or says what would be right."""
    file = tmp_path / "router.json"
    file.write_text(json.dumps(value))
    with pytest.raises(ConfigError) as caught:
        RouterConfig.load(file)
    assert said in str(caught.value)


def test_names_are_filled_in_and_requests_find_their_model() -> None:
    """An engine is named by its address, and serves the only model; adapters lead to their model."""
    config = RouterConfig(
        models={"m": ModelConfig(adapters={"sql": AdapterConfig(path="p")})},
        engines=(EngineConfig(url="http://h:1/"),),
    ).checked()
    assert (config.engines[0].name, config.engines[0].url, config.engines[0].model) == (
        "h:1",
        "http://h:1",
        "m",
    )
    assert config.model_of("sql") == ("m", "sql")
    assert config.model_of(None) == ("m", None)
    assert config.model_of("x") is None


def test_one_address_is_a_server_and_a_list_a_cluster() -> None:
    """A file's text or list, and one flag or several, name the same; no message repeats a password."""
    for index in (None, "redis://h/1", "unix:///s", ("redis://h",), ("redis://u:p@h", "redis://u:p@i:7/0")):
        assert RouterConfig(models={"m": ModelConfig()}, index=index).checked().index == index
    for index in ("http://u:secret@h", ("redis://h", "x://u:secret@h"), ("redis://h", "redis://:secret@i")):
        with pytest.raises(ConfigError) as caught:
            RouterConfig(models={"m": ModelConfig()}, index=index).checked()
        assert "secret" not in str(caught.value)


def test_times_that_are_no_numbers_are_refused() -> None:
    """NaN is neither above nor below a bound; it is no time, and no weight, for all that."""
    for wrong in (
        {"proxy": ProxyConfig(stream_idle_s=math.nan)},
        {"health": HealthConfig(interval_s=math.nan)},
        {"health": HealthConfig(timeout_s=math.inf)},
        {"policy": Policy(output_weight=math.nan)},
        {"policy": Policy(degraded_trust=math.nan)},
    ):
        with pytest.raises(ConfigError):
            RouterConfig(models={"m": ModelConfig()}, **wrong).checked()


def test_an_engines_credentials_are_not_taken_and_not_repeated() -> None:
    """They would be in the engine's name, in every answer, and instead of the client's own; no message has them."""
    with pytest.raises(ConfigError) as caught:
        RouterConfig(models={"m": ModelConfig()}, engines=(EngineConfig(url="http://u:secret@h"),)).checked()
    assert "secret" not in str(caught.value)


def test_a_path_that_a_unix_socket_can_have() -> None:
    """A path of exactly the longest length is taken."""
    path = "x" * zmq.IPC_PATH_MAX_LEN
    engine = EngineConfig(url="http://h", events=f"ipc://{path}")
    RouterConfig(models={"m": ModelConfig()}, engines=(engine,)).checked()


def test_seeds_that_an_environment_can_have() -> None:
    """`random`, and every integer of 32 bits, however it is written."""
    for seed in (None, "", "random", "0", "007", "4294967295"):
        RouterConfig(models={"m": ModelConfig(hash=HashSettings(hash_seed=seed))}).checked()


def test_engine_flag() -> None:
    """A flag says all that the file says of an engine; what it does not know is refused."""
    flag = "http://h:1,events=tcp://h:2,replay=tcp://h:3,name=a,ranks=2"
    expected = EngineConfig(url="http://h:1", events="tcp://h:2", replay="tcp://h:3", name="a", ranks=2)
    assert parse_engine_flag(flag) == expected
    assert [source.endpoint for source in expected.sources()] == ["tcp://h:2", "tcp://h:3"]
    for wrong in ("http://h:1,event=x", "http://h:1,ranks=two", "http://h:1,events"):
        with pytest.raises(ConfigError):
            parse_engine_flag(wrong)


def plan(body: dict[str, Any], **model: Any) -> Any:
    """Return the plan of a body."""
    config = ModelConfig(hash=HashSettings(hash_seed="0", block_size=4), **model)
    return PromptHasher("m", config).plan(body, None, body_bytes=400)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": "text"}, "invalid-request: a text prompt needs a tokenizer"),
        ({"messages": [{"role": "user", "content": "x"}]}, "invalid-request: a chat needs a tokenizer"),
        ({"prompt": [1, -1]}, "invalid-token"),
        ({"prompt": [1, 2], "cache_salt": 3}, "invalid-salt"),
        ({"prompt": [1, 2], "prompt_logprobs": 1}, "prompt-logprobs"),
        ({"prompt_embeds": "AAAA"}, "prompt-embeds"),
        ({"prompt": [1, 2], "prompt_embeds": ["AAAA"]}, "prompt-embeds"),
        (
            {"prompt": [1, 2], "multimodal": [{"identifier": "a", "offset": 0, "length": 2}]},
            "multimodal: the items",
        ),
        ({"prompt": [1, 2], "mm_processor_kwargs": {"num_crops": 4}}, "multimodal: the engine's processor"),
        ({"prompt": [1, 2], "media_io_kwargs": {"video": {}}}, "multimodal: the engine's processor"),
        ({"prompt": [1, 2], "truncate_prompt_tokens": 1}, "truncated"),
        ({"prompt": [1, 2], "truncate_prompt_tokens": 0}, "truncated"),
        ({"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "low"}, "reasoning-effort"),
        ({"input": "an embedding"}, "invalid-request"),
    ],
)
def test_what_cannot_be_looked_up_says_why(body: dict[str, Any], reason: str) -> None:
    """Such a request has no hashes and an estimated length; it is no error here."""
    made = plan(body)
    assert made.prompts == ()
    assert made.unhashed.startswith(reason)
    assert made.prompt_tokens == 100


@given(
    body=st.fixed_dictionaries(
        {},
        optional={
            name: st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                lambda inner: (
                    st.lists(inner, max_size=3)
                    | st.dictionaries(
                        st.sampled_from(["role", "content", "function", "name"]), inner, max_size=3
                    )
                ),
                max_leaves=8,
            )
            for name in (
                "prompt",
                "messages",
                "tools",
                "chat_template",
                "documents",
                "cache_salt",
                "max_tokens",
            )
        },
    )
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_body_breaks_the_planning(body: dict[str, Any], hasher: PromptHasher) -> None:
    """Whatever JSON a body holds, it gets a plan: hashed, or with the reason why not. The engine judges it."""
    made = hasher.plan(body, None, body_bytes=100)
    assert (made.unhashed is None) == bool(made.prompts)


@pytest.fixture(scope="module")
def hasher(tokenizer_folder: Path) -> PromptHasher:
    """Return the planner of a model with a tokenizer."""
    return PromptHasher("m", ModelConfig(hash=HashSettings(hash_seed="0"), tokenizer=str(tokenizer_folder)))


def test_fields_that_say_nothing_leave_a_prompt_hashed() -> None:
    """A null, an empty list or an empty object is as if the field were not there."""
    nulls = dict.fromkeys(("prompt_embeds", "multimodal", "mm_processor_kwargs", "truncate_prompt_tokens"))
    for said in (nulls, {"multimodal": [], "mm_processor_kwargs": {}, "reasoning_effort": None}):
        made = plan({"prompt": [1, 2, 3, 4, 5], **said})
        assert (made.unhashed, len(made.prompts[0].hashes)) == (None, 1)


def test_several_prompts_are_hashed_each() -> None:
    """A completions request of several prompts is planned as all of them."""
    made = plan({"prompt": [[1, 2, 3, 4, 5], [6, 7, 8]], "max_tokens": 7})
    assert [len(one.hashes) for one in made.prompts] == [1, 0]
    assert (made.prompt_tokens, made.max_tokens, made.unhashed) == (8, 7, None)


def test_salt_and_adapter_enter_the_hash() -> None:
    """The same tokens with a salt, or an adapter, have other hashes; an empty salt is none."""
    config = ModelConfig(
        hash=HashSettings(hash_seed="0", block_size=4), adapters={"sql": AdapterConfig(path="p")}
    )
    hasher = PromptHasher("m", config)

    def first(adapter: str | None = None, **fields: Any) -> Any:
        return hasher.plan({"prompt": [1, 2, 3, 4, 5], **fields}, adapter).prompts[0].hashes[0]

    assert first() == first(cache_salt="") == config.hash.hasher().hash_tokens([1, 2, 3, 4])[0]
    assert len({first(), first(cache_salt="a"), first(cache_salt="b"), first("sql")}) == 4


@given(text=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200)))
@settings(max_examples=200, deadline=None)
def test_cut_streams_are_whole_events_and_lose_nothing(text: bytes, cuts: list[int]) -> None:
    """However a stream is cut into pieces, what is passed on ends with an event, and with the rest it is the stream."""
    stream = b"data: a\n\n" + text + b"\n\nrest"
    places = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    cutter, passed = EventCutter(), b""
    for start, end in itertools.pairwise(places):
        events = cutter.feed(stream[start:end])
        assert events == b"" or events.endswith((b"\n\n", b"\r\n\r\n"))
        passed += events
    assert passed + cutter.rest == stream


def test_usage_is_read_from_the_last_event_that_has_one() -> None:
    """Usage may be null, absent, or in a chunk of its own; broken events are passed over."""
    events = b'data: {"usage":{"a":1}}\n\ndata: {"usage":null}\n\ndata: {"usage"\n\n'
    assert usage_in(events) == {"a": 1}
    assert usage_in(b'data: {"choices":[]}\n\n') is None
    assert usage_in(b'data: [1,"usage"]\n\n') is None


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--config", "/nonexistent.json"),
        ("--engine", "nowhere"),
        ("--engine", "http://h:1", "--prefix-caching-hash-algo", "md5"),
        ("--engine", "http://h:1", "--lora", "x"),
        ("--engine", "http://h:1", "--lora", "a=1", "--lora", "a=2"),
        ("--engine", "http://h:1", "--stream-idle-timeout", "nan"),
        ("--engine", "http://h:1", "--drain-timeout", "9" * 400),
        ("--engine", "http://user:secret@h:1"),
        ("--engine", "http://h:1", "--index", "redis://a:1/abc"),
        ("--engine", "http://h:1", "--tokenizer", "/nonexistent"),
        ("--engine", "http://h:1", "--index", "mongodb://x"),
        ("--engine", "http://h:1", "--index", "redis://a", "--index", "redis://b/1"),
        ("--engine", "http://h:1", "--decision-log", "/nonexistent/log"),
        ("--engine", "http://h:1", "--host", "203.0.113.1"),
        ("--port", "x"),
        ("--engine", "http://h:1", "--port", "99999"),
        ("--engine", "http://h:1", "--port", "-1"),
        ("--engine", "http://h:1", "--host", "a" * 70),
        ("--engine", "http://h:1", "--host", "\u65e5\u672c.."),
        ("--engine", "http://h:1", "--host", "a\0b"),
        ("--engine", "http://h:1,name=\u65e5\u672c"),
    ],
)
def test_command_line_refuses_in_one_line(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, a sentence on stderr, nothing on stdout."""
    monkeypatch.setattr(sys, "argv", ["kvhash-router", *arguments])
    assert main() == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert "rror: " in written.err


def test_command_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    """From flags: serves, logs a request line, and ends with code 0 on SIGTERM."""
    log = tmp_path / "log.jsonl"
    with engines(1) as started:
        process = router_process(started, "--decision-log", str(log), "--log-tokens")
        assert process.stderr is not None
        url = process.stderr.readline().split()[-1]
        with httpx.Client(base_url=url, trust_env=False, timeout=DEADLINE_S) as client:
            body = {"model": "demo", "prompt": list(range(40)), "max_tokens": 2}
            assert client.post("/v1/completions", json=body).status_code == 200

            def held() -> bool:
                return bool(client.post("/debug/residency", json=body).json()["matched_tokens"] == {"e0": 32})

            wait_for(held, "the blocks")
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
        assert "Traceback" not in process.stderr.read()
        process.stderr.close()
    line = json.loads(log.read_text())
    assert line["prompts"][0]["tokens"] == list(range(40))
    assert (line["engine"], line["outcome"], line["basis"]) == ("e0", "ok", "load")


@pytest.mark.parametrize("field", ["tokenizer", "chat_template"])
def test_names_that_no_file_can_have_are_refused(field: str) -> None:
    """A NUL in the name of a tokenizer or template is an error of the configuration, with its place."""
    with pytest.raises(ConfigError) as caught:
        PromptHasher("m", ModelConfig(hash=HashSettings(hash_seed="0"), **{field: "a\0b"}))
    assert caught.value.at == f"$.models.m.{field}"


def test_metrics_and_options_are_documented() -> None:
    """Every metric, and every field of the configuration that stands in the documentation, is the program's."""
    text = (ROOT / "docs" / "router.md").read_text()
    names = {metric.name for metric in RouterMetrics().registry.collect()}
    counters = {metric.name for metric in RouterMetrics().registry.collect() if metric.type == "counter"}
    documented = set(re.findall(r"`(kvhash_router_\w+)`", text))
    assert documented == {f"{name}_total" if name in counters else name for name in names}
    example = re.search(r"```json\n(.*?)```", text, re.DOTALL)
    assert example is not None
    config = msgspec.json.decode(example[1], type=RouterConfig).checked()
    assert config.policy == Policy()
    assert (config.health, config.proxy) == (HealthConfig(), ProxyConfig())


def test_demonstration_runs() -> None:
    """The README's command finds in the second turns what the first ones left."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "router" / "demo.py")],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" prefix ") == 3
