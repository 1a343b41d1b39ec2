"""What fails stays small: engines that refuse, die or come back, clients that hang up, a store that stops."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import json
import signal
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from kvhash_router import upstream
from kvhash_router.bodies import RefusedError, parse_body, usage_of
from kvhash_router.config import HealthConfig, ProxyConfig
from kvhash_router.decision_log import DecisionLog
from kvhash_router.prompts import PromptHasher
from kvhash_router.residency import StoreUnavailableError
from kvhash_router.sse import EventCutter

from kvhash.index import ResidencyIndex

from .running import (
    DEADLINE_S,
    chunk,
    engines,
    event,
    router,
    router_process,
    stream_head,
    stubs,
    wait_for,
    whole,
)

PROMPT = list(range(200))
OK = b'{"choices":[{"index":0,"text":"ok"}],"usage":{"prompt_tokens":3,"completion_tokens":1}}'


async def answers(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
    """Answer."""
    whole(writer, 200, OK)


async def unavailable(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
    """Say that another engine should be asked."""
    whole(writer, 503, b'{"error":{"message":"overloaded"}}')


async def dies_before_a_byte(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
    """Accept the request and die."""
    writer.transport.abort()


async def dies_after_the_head(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
    """Promise a stream and die."""
    stream_head(writer)
    await writer.drain()
    writer.transport.abort()


async def dies_within_an_event(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
    """Send an event and a half and die."""
    stream_head(writer)
    chunk(writer, event("one") + b'data: {"choices": [{"ind')
    await writer.drain()
    writer.transport.abort()


async def ends_without_done(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
    """End a stream properly, but without its end mark, as an engine does that is shut down."""
    stream_head(writer)
    chunk(writer, event("one"))
    chunk(writer, b"")


async def hangs(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
    """Send one event, then nothing."""
    stream_head(writer)
    chunk(writer, event("one"))
    await writer.drain()
    await asyncio.sleep(600)


@pytest.mark.parametrize("first", [unavailable, dies_before_a_byte, dies_after_the_head])
@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_byte_is_retried(first: Any, stream: bool) -> None:
    """Whatever an engine does before its answer begins, the next one answers and the client does not notice."""
    with stubs(first, answers) as served:
        turns = {"strategy": "round-robin"}
        with router(served, policy=policy(**turns)) as running:
            for _ in range(4):
                answer = running.complete(PROMPT, stream=stream)
                assert answer.status_code == 200
                assert answer.headers["x-kvhash-engine"] == "s1"
        assert len(served[0].requests) >= 1
        assert served[0].requests[0] == served[1].requests[0]


def policy(**fields: Any) -> Any:
    """Return a policy."""
    from kvhash_router.decision import Policy

    return Policy(**fields)


def test_engine_that_is_not_there_is_retried_and_taken_out() -> None:
    """A refused connection is retried at once, and the engine gets no more requests until it is back."""
    with engines(2) as started:
        started[0].kill()
        with router(started, policy=policy(strategy="round-robin")) as running:
            for _ in range(6):
                assert running.complete(PROMPT).headers["x-kvhash-engine"] == "e1"
            assert running.state("e0")["up"] is False
            assert running.metric("kvhash_router_retries_total") <= 1


@pytest.mark.parametrize("strategy", ["round-robin", "prefix"])
def test_request_that_finds_its_engine_dead_is_answered_by_the_next(
    strategy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The request that is the first to be refused a connection is made elsewhere, by itself or among many."""
    checked = threading.Event()

    def healthy() -> bool:
        checked.set()
        return True

    with stubs(answers, answers) as served:
        served[0].healthy = healthy
        health = HealthConfig(interval_s=600)
        with router(served, health=health, policy=policy(strategy=strategy)) as running:
            assert checked.wait(DEADLINE_S)
            served[0].close()
            with ThreadPoolExecutor(12) as pool:
                answered = list(pool.map(lambda _: running.complete(PROMPT), range(12)))
            assert [one.status_code for one in answered] == [200] * 12
            assert {one.headers["x-kvhash-engine"] for one in answered} == {"s1"}
            assert running.state("s0")["up"] is False
            assert running.metric('kvhash_router_requests_total{engine="s1",outcome="ok"}') == 12
    assert not [record for record in caplog.records if record.exc_info]


def test_when_every_engine_fails_the_client_is_told_why() -> None:
    """No engine, no answer: an error in the API's form that names every attempt, and no more than allowed."""
    with stubs(unavailable, dies_before_a_byte, unavailable, unavailable) as served:
        with router(served, proxy=ProxyConfig(retries=2)) as running:
            answer = running.complete(PROMPT)
            assert answer.status_code == 502
            error = answer.json()["error"]
            assert error["type"] == "engine_error"
            tried = [name for name in ("s0", "s1", "s2", "s3") if f"{name}: " in error["message"]]
            assert len(tried) == 3
        assert sum(len(one.requests) for one in served) == 3


def test_an_engines_own_error_is_passed_on_and_not_retried() -> None:
    """Status 500 may be the request's own doing: it is not carried from engine to engine."""

    async def broken(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
        whole(writer, 500, b'{"error":{"message":"my own"}}')

    with stubs(broken, broken) as served, router(served) as running:
        answer = running.complete(PROMPT)
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "my own")
        assert sum(len(one.requests) for one in served) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_requests_at_an_engine_that_goes_down_are_made_elsewhere(stream: bool) -> None:
    """Health checks that fail take an engine's unanswered requests from it at once; it is said to be down."""
    health = HealthConfig(interval_s=0.1, timeout_s=0.2)
    healthy = threading.Event()
    healthy.set()

    async def silent(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
        healthy.clear()
        await asyncio.sleep(600)

    with stubs(silent, answers) as served:
        served[0].healthy = healthy.is_set
        with router(served, health=health, policy=policy(strategy="round-robin")) as running:
            began = time.monotonic()
            first = [running.complete(PROMPT, stream=stream) for _ in range(2)]
            assert [answer.headers["x-kvhash-engine"] for answer in first] == ["s1", "s1"]
            assert time.monotonic() - began < 10
            state = running.state("s0")
            assert not state["up"]
            assert state["down"].startswith("health check")
            assert running.where(PROMPT)["down"] == ["s0"]
            assert served[0].hung_up.wait(DEADLINE_S)
            healthy.set()
            wait_for(lambda: running.state("s0")["up"], "the engine to be back")


def test_request_stays_where_no_other_engine_is_up() -> None:
    """An engine that seems down but is the only one keeps its requests: the check may be wrong."""
    healthy = threading.Event()
    healthy.set()

    async def slow(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
        healthy.clear()
        await asyncio.sleep(1)
        await answers(writer, value)

    with stubs(slow) as served:
        served[0].healthy = healthy.is_set
        with router(served, health=HealthConfig(interval_s=0.1, timeout_s=0.2)) as running:
            assert running.complete(PROMPT).status_code == 200
            assert not running.state("s0")["up"]


def raw(status: str, body: bytes, *fields: bytes) -> bytes:
    """Return an answer as bytes, whatever they are."""
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n".encode()
    return head + b"".join(field + b"\r\n" for field in fields) + b"\r\n" + body


DEEP = b"[" * 100_000
HUGE = b"9" * 400
STREAM = b"Content-Type: text/event-stream"
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("said", "status", "stream"),
    [
        (raw("200 OK", b"{}", b"X-A: \xe6\x97\xa5\xe6\x9c\xac"), 200, False),
        (raw("200 OK", b"{}", b"X-A: \xe9"), 200, False),
        (raw("200 OK", DEEP), 200, False),
        (raw("200 OK", b'{"usage":{"prompt_tokens":%s,"completion_tokens":%s}}' % (HUGE, HUGE)), 200, False),
        (
            raw("200 OK", b'{"usage":{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":-5}}}'),
            200,
            False,
        ),
        (
            raw(
                "200 OK", b'{"usage":{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":%s}}}' % HUGE
            ),
            200,
            False,
        ),
        (raw("999 X", b"{}"), 502, False),
        (raw("099 X", b"{}"), 502, False),
        (raw("200 OK", event("x") + b'data: {"usage":' + DEEP + b"\n\n" + DONE, STREAM), 200, True),
        (raw("200 OK", event("x") + DONE, STREAM, b"X-A: \xe6\x97\xa5"), 200, True),
        (
            raw("200 OK", event("x") + b'data: {"usage":{"completion_tokens":%s}}\n\n' % HUGE + DONE, STREAM),
            200,
            True,
        ),
    ],
    ids=[
        "header-utf-8",
        "header-latin-1",
        "nested",
        "huge-numbers",
        "negative-cached",
        "huge-cached",
        "status-999",
        "status-099",
        "stream-nested",
        "stream-header",
        "stream-huge",
    ],
)
def test_whatever_an_engine_answers_is_passed_on_or_a_clear_error(
    said: bytes, status: int, stream: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Odd headers, numbers, nesting and statuses: no exception, the body is whole, and the log has its line."""

    async def odd(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
        writer.write(said)

    file = tmp_path / "log"
    with stubs(odd) as served, router(served, app={"decision_log": DecisionLog(str(file))}) as running:
        answer = running.complete([1, 2, 3], stream=stream)
        assert answer.status_code == status
        if status == 200:
            assert answer.content == said.partition(b"\r\n\r\n")[2]
            field = next((one for one in said.split(b"\r\n") if one.startswith(b"X-A: ")), b"X-A: ")
            assert dict(answer.headers.raw).get(b"X-A", b"") == field[5:]
        else:
            assert answer.json()["error"]["type"] == "engine_error"
    (line,) = file.read_text().splitlines()
    assert json.loads(line)["status"] == status
    assert json.loads(line)["cached_tokens"] is None
    assert not [record for record in caplog.records if record.exc_info]


def test_whatever_a_client_sends_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    """Numbers that no float holds, nesting without end and bodies above the limit are no error of the router."""
    huge = b'{"prompt":[1,2,3],"max_tokens":1%s}' % (b"0" * 400)
    with stubs(answers) as served, router(served, proxy=ProxyConfig(max_body_bytes=150_000)) as running:
        for path, body, status in (
            ("/v1/completions", huge, 200),
            ("/debug/residency", huge, 200),
            ("/v1/completions", DEEP, 400),
            ("/debug/residency", DEEP, 400),
            ("/debug/residency", b'{"prompt":' + DEEP, 400),
            ("/v1/completions", b" " * 150_001, 413),
            ("/debug/residency", b" " * 150_001, 413),
        ):
            answer = running.client.post(path, content=body)
            assert answer.status_code == status, (path, body[:20])
    assert not [record for record in caplog.records if record.exc_info]


def test_a_body_of_too_many_values_is_refused_before_they_are_made() -> None:
    """To make millions of objects would hold up everybody; tokens, texts and pictures of any real length are read."""
    real = (
        {"prompt": [150_000] * 1_900_000},
        {"messages": [{"role": "user", "content": "a text, as long: as {others} " * 150_000}]},
        {"messages": [{"role": "user", "content": "QUJD" * 4_000_000}]},
    )
    for body in real:
        assert parse_body(json.dumps(body).encode()) == body
    many = b"{" + b",".join(b'"%d":[]' % number for number in range(250_000)) + b"}"
    for body in (many, b'{"prompt":[' + b'{"a":1},' * 300_000 + b"1]}", b"[" + b"1," * 2_100_000 + b"1]"):
        with pytest.raises(RefusedError) as caught:
            parse_body(body)
        assert caught.value.status == 413
    with pytest.raises(RefusedError) as caught:
        parse_body(b'{"prompt":"' + b"x" * 300_000)
    assert caught.value.status == 400


def test_a_where_request_has_the_limits_of_others(caplog: pytest.LogCaptureFixture) -> None:
    """POST /debug/residency waits for a body no longer than others do, and a client that hangs up is no error."""
    with stubs(answers) as served, router(served, proxy=ProxyConfig(stream_idle_s=0.1)) as running:
        host, port = running.url[7:].split(":")
        head = b"POST /debug/residency HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        with socket.create_connection((host, int(port)), DEADLINE_S) as stuck:
            stuck.sendall(head)
            assert stuck.recv(100).startswith(b"HTTP/1.1 408 ")
        with socket.create_connection((host, int(port)), DEADLINE_S) as leaving:
            leaving.sendall(head)
        assert running.client.get("/health").status_code == 200
    assert not [record for record in caplog.records if record.exc_info]


def test_headers_reach_the_engine_byte_for_byte_or_not_at_all() -> None:
    """What is UTF-8 is passed on as it came; what is not cannot be, and is said to be wrong."""
    with stubs(answers) as served, router(served) as running:
        body = b'{"prompt":[1,2,3]}'
        for name in ("x-a", "x-request-id"):
            value = "caf\u00e9 \u65e5".encode()
            said = running.client.post("/v1/completions", content=body, headers=[(name.encode(), value)])
            assert said.status_code == 200
            assert served[0].headers[-1][name] == "caf\u00e9 \u65e5"
            said = running.client.post("/v1/completions", content=body, headers=[(name.encode(), b"caf\xe9")])
            assert (said.status_code, name in said.json()["error"]["message"]) == (400, True)
        assert len(served[0].requests) == 2


async def never_ends_an_event(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
    """Send an event, then one that has no end."""
    stream_head(writer)
    chunk(writer, event("one"))
    while True:
        chunk(writer, b"x" * 65_536)
        await writer.drain()


def test_an_event_without_end_is_an_error_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not collected for ever: the client gets what came before, and the error; the engine is let go."""
    monkeypatch.setattr(upstream, "EventCutter", lambda: EventCutter(100_000))
    with stubs(never_ends_an_event) as served, router(served) as running:
        answer = running.complete(PROMPT, stream=True)
        values = [json.loads(one[6:]) for one in answer.text.split("\n\n") if one]
        assert values[0]["choices"][0]["text"] == "one"
        assert "an event has more than 100000 bytes" in values[1]["error"]["message"]
        assert served[0].hung_up.wait(DEADLINE_S)
        assert running.metric('kvhash_router_requests_total{engine="s0",outcome="engine-died"}') == 1


def test_events_are_cut_alike_in_any_pieces_and_not_looked_at_again() -> None:
    """Byte by byte or at once, the same events come; an event's bytes are searched when they come, not each time."""
    stream = b": a\n\ndata: 1\r\n\r\ndata: 2\r\rdata: 3\n\r\ndata: rest\n"
    for size in range(1, len(stream)):
        cutter = EventCutter()
        pieces = [cutter.feed(stream[at : at + size]) for at in range(0, len(stream), size)]
        assert b"".join(pieces) == stream[: -len(b"data: rest\n")]
        assert cutter.rest == b"data: rest\n"
    searched: list[int] = []

    class Counting(bytearray):
        def rfind(self, mark: Any, start: Any = 0, *_: Any) -> int:
            searched.append(len(self) - start)
            return super().rfind(mark, start)

    cutter = EventCutter()
    cutter._rest = Counting()
    for _ in range(100):
        assert cutter.feed(b"x" * 1000) == b""
    assert max(searched) <= 1002


@pytest.mark.parametrize("chunked", [False, True])
def test_a_long_answer_is_passed_on_as_it_comes(chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what is kept of an answer its bytes go to the client, whole and unread."""
    monkeypatch.setattr(upstream, "_MAX_WHOLE_BYTES", 100_000)
    body = b'{"x":"' + bytes(97 + number % 26 for number in range(1_000_000)) + b'"}'

    async def long(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
        if not chunked:
            whole(writer, 200, body)
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk(writer, body)
        chunk(writer, b"")

    with stubs(long) as served, router(served) as running:
        answer = running.complete(PROMPT)
        assert answer.content == body
        assert answer.headers["x-kvhash-engine"] == "s0"
        assert ("content-length" in answer.headers) is not chunked
        assert running.metric('kvhash_router_requests_total{engine="s0",outcome="ok"}') == 1
        assert running.state("s0")["in_flight"] == 0


@pytest.mark.parametrize("chunked", [False, True])
def test_a_long_answer_that_breaks_off_is_not_taken_for_whole(
    chunked: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a part was passed on, and the engine died, the client's connection is broken off too."""
    monkeypatch.setattr(upstream, "_MAX_WHOLE_BYTES", 100_000)

    async def dies(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
        field = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 1000000"
        writer.write(b"HTTP/1.1 200 OK\r\n" + field + b"\r\n\r\n")
        if chunked:
            chunk(writer, b"x" * 500_000)
        else:
            writer.write(b"x" * 500_000)
        await writer.drain()
        writer.close()

    with stubs(dies) as served, router(served) as running:
        with pytest.raises(httpx.RemoteProtocolError):
            running.complete(PROMPT)
        assert running.metric('kvhash_router_requests_total{engine="s0",outcome="engine-died"}') == 1
        assert running.state("s0")["in_flight"] == 0
    assert not [record for record in caplog.records if record.exc_info]


def test_usage_is_read_in_any_answer_that_has_one() -> None:
    """Whatever else an answer holds; one that is no JSON, or nests without end, says nothing."""
    assert usage_of(OK) == {"prompt_tokens": 3, "completion_tokens": 1}
    assert usage_of(b'{"a":[{"b":"\\u00e9"}],"usage":{"x":1}}') == {"x": 1}
    for nothing in (
        b"",
        b"{}",
        b"[]",
        b'{"usage":null}',
        b'{"usage":3}',
        DEEP,
        b'{"a":' + DEEP,
        b"\xff",
        b"{",
    ):
        assert usage_of(nothing) is None


def test_an_unknown_model_is_not_found_wherever_it_is_asked_for() -> None:
    """A request that is passed on and one that only asks where it would go get the same error."""
    with stubs(answers) as served, router(served) as running:
        for path in ("/v1/completions", "/debug/residency"):
            answer = running.client.post(path, json={"model": "nope", "prompt": [1, 2, 3]})
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["code"]) == (404, "NotFoundError", 404), path
            assert "'nope' does not exist" in error["message"]


@pytest.mark.parametrize("behaviour", [dies_within_an_event, ends_without_done])
def test_stream_that_breaks_off_ends_with_an_error_event(behaviour: Any) -> None:
    """After the first byte nothing is retried: whole events, an error that OpenAI's clients raise, no end mark."""
    with stubs(behaviour) as served, router(served) as running:
        answer = running.complete(PROMPT, stream=True)
        assert answer.status_code == 200
        events = [one for one in answer.text.split("\n\n") if one]
        assert [one[:6] for one in events] == ["data: "] * 2
        values = [json.loads(one[6:]) for one in events]
        assert values[0]["choices"][0]["text"] == "one"
        assert values[1]["error"]["type"] == "engine_error"
        assert values[1]["error"]["code"] == 502
        assert "incomplete" in values[1]["error"]["message"]
        assert running.metric('kvhash_router_requests_total{engine="s0",outcome="engine-died"}') == 1
        assert running.state("s0")["in_flight"] == 0


async def hangs_within_an_event(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
    """Send an event and a half, then nothing."""
    stream_head(writer)
    chunk(writer, event("one") + b'data: {"choices": [{"ind')
    await writer.drain()
    await asyncio.sleep(600)


@pytest.mark.parametrize("behaviour", [hangs, hangs_within_an_event])
def test_stream_of_an_engine_that_hangs_ends_with_an_error_event(behaviour: Any) -> None:
    """A stream that has begun and goes on no longer is not kept for ever: the client is told, the engine let go."""
    with stubs(behaviour) as served, router(served, proxy=ProxyConfig(stream_idle_s=0.3)) as running:
        answer = running.complete(PROMPT, stream=True)
        values = [json.loads(one[6:]) for one in answer.text.split("\n\n") if one]
        assert values[0]["choices"][0]["text"] == "one"
        assert "sent nothing for 0.3 s" in values[1]["error"]["message"]
        assert served[0].hung_up.wait(DEADLINE_S)
        assert running.state("s0")["in_flight"] == 0
        assert running.metric('kvhash_router_requests_total{engine="s0",outcome="engine-died"}') == 1


def test_a_second_interrupt_ends_what_is_under_way(tmp_path: Path) -> None:
    """Ctrl-C waits for requests under way; pressed again it ends their streams with an error, and nothing is raised."""
    file = tmp_path / "router.json"
    with stubs(hangs) as served:
        engines_ = [{"url": served[0].url}]
        file.write_text(json.dumps({"models": {"demo": {"hash": {"hash_seed": "0"}}}, "engines": engines_}))
        process = router_process([], "--drain-timeout", "600", config=file)
        assert process.stderr is not None
        try:
            url = process.stderr.readline().split()[-1]
            address = ("127.0.0.1", int(url.rpartition(":")[2]))
            body = {"prompt": PROMPT, "stream": True}
            with (
                httpx.Client(timeout=DEADLINE_S, trust_env=False) as client,
                client.stream("POST", f"{url}/v1/completions", json=body) as answer,
            ):
                lines = (line for line in answer.iter_lines() if line)
                assert "one" in next(lines)
                process.send_signal(signal.SIGINT)
                wait_for(lambda: _refuses(address), "the router to take no more connections")
                assert process.poll() is None
                process.send_signal(signal.SIGINT)
                assert json.loads(next(lines)[6:])["error"]["type"] == "router_stopped"
                assert next(lines, None) is None
            assert process.wait(DEADLINE_S) == 130
            assert process.stderr.read().count("Traceback") == 0
        finally:
            process.kill()
            process.wait(DEADLINE_S)
            process.stderr.close()


def _refuses(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, DEADLINE_S).close()
    except ConnectionRefusedError:
        return True
    return False


async def thinks_between_events(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
    """Begin late, and pause between events."""
    await asyncio.sleep(1.2)
    stream_head(writer)
    for text in ("one", "two", "three"):
        chunk(writer, event(text))
        await writer.drain()
        await asyncio.sleep(0.4)
    chunk(writer, b"data: [DONE]\n\n")
    chunk(writer, b"")


def test_stream_of_a_slow_engine_is_not_broken_off() -> None:
    """Neither a long time to the first token nor pauses that add up to more than the limit are silence."""
    with (
        stubs(thinks_between_events) as served,
        router(served, proxy=ProxyConfig(stream_idle_s=1.0)) as running,
    ):
        answer = running.complete(PROMPT, stream=True)
        assert answer.text.endswith("data: [DONE]\n\n")
        assert "error" not in answer.text


class Streaming(threading.Thread):
    """A client that reads one stream, noting when events came."""

    def __init__(self, url: str, prompt: list[int], max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._url, self._body = url, {"prompt": prompt, "max_tokens": max_tokens, "stream": True}
        self.lines: list[str] = []
        self.engine = ""
        self.start()

    def run(self) -> None:
        """Read to the end."""
        with (
            httpx.Client(timeout=DEADLINE_S, trust_env=False) as client,
            client.stream("POST", f"{self._url}/v1/completions", json=self._body) as answer,
        ):
            self.engine = answer.headers["x-kvhash-engine"]
            self.lines.extend(line for line in answer.iter_lines() if line)


def test_engine_that_dies_within_streams_fails_only_those() -> None:
    """When an engine is killed its streams end with the error; those of others go on, and new requests go there."""
    with (
        engines(2, "--step-ms", "15") as started,
        router(started, health=HealthConfig(interval_s=0.2)) as running,
    ):
        streams = [Streaming(running.url, [i, *range(100)], 150) for i in range(8)]
        wait_for(lambda: all(len(one.lines) > 3 for one in streams), "all streams to run")
        assert {one.engine for one in streams} == {"e0", "e1"}
        started[0].kill()
        for one in streams:
            one.join(DEADLINE_S)
        for one in streams:
            if one.engine == "e0":
                assert json.loads(one.lines[-1][6:])["error"]["type"] == "engine_error"
            else:
                assert one.lines[-1] == "data: [DONE]"
                assert len(one.lines) == 152
        wait_for(lambda: not running.state("e0")["up"], "the engine to be taken out")
        assert all(running.complete([i, *PROMPT]).headers["x-kvhash-engine"] == "e1" for i in range(4))


def test_engine_that_comes_back_is_learned_anew() -> None:
    """A restarted engine is routed to again, and what its former life held is not claimed of it."""
    with engines(1) as started, router(started, health=HealthConfig(interval_s=0.1)) as running:
        running.complete(PROMPT)
        wait_for(lambda: running.where(PROMPT)["matched_tokens"] == {"e0": 192}, "the blocks")
        started[0].kill()
        wait_for(lambda: not running.state("e0")["up"], "the engine to be taken out")
        started[0].restart()
        wait_for(lambda: running.state("e0")["up"], "the engine to be back")
        wait_for(lambda: running.where(PROMPT)["matched_tokens"] == {"e0": 0}, "its cache to be forgotten")
        running.complete(PROMPT)
        wait_for(lambda: running.where(PROMPT)["matched_tokens"] == {"e0": 192}, "the blocks, again")


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_hangs_up_cancels_its_request(stream: bool) -> None:
    """A client that goes away ends its request at the engine, streamed or not, and its load is gone."""
    with engines(1, "--step-ms", "10") as started, router(started) as running:
        engine = started[0]
        body = {"prompt": PROMPT, "max_tokens": 4000, "stream": stream}
        client = httpx.Client(base_url=running.url, timeout=httpx.Timeout(5, read=0.4), trust_env=False)
        if stream:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=body)
        client.close()
        wait_for(lambda: engine.counts()["aborted"] == 1, "the abort", seconds=10)
        wait_for(lambda: running.state("e0")["in_flight"] == 0, "the router's end of it")
        assert running.state("e0")["queued_tokens"] == 0
        assert running.metric('kvhash_router_requests_total{engine="e0",outcome="client-gone"}') == 1


def test_long_texts_do_not_hold_up_short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many long texts are being tokenized, a short prompt, and a long one of token ids, are planned at once."""
    let_go, begun = threading.Event(), threading.Semaphore(0)
    plan = PromptHasher.plan

    def slow(self: PromptHasher, body: Any, adapter: Any, **options: Any) -> Any:
        if isinstance(body["prompt"], str):
            begun.release()
            assert let_go.wait(DEADLINE_S)
        return plan(self, body, adapter, **options)

    monkeypatch.setattr(PromptHasher, "plan", slow)
    with stubs(answers) as served, router(served) as running:
        statuses: list[int] = []
        long = [
            threading.Thread(target=lambda: statuses.append(running.complete("x" * 300_000).status_code))
            for _ in range(8)
        ]
        for one in long:
            one.start()
        assert begun.acquire(timeout=DEADLINE_S)
        assert running.complete(PROMPT).status_code == 200
        assert running.complete(list(range(10_000, 70_000))).status_code == 200
        assert statuses == []
        let_go.set()
        for one in long:
            one.join(DEADLINE_S)
        assert statuses == [200] * 8


def left_behind(streams: list[tuple[str, list[float]]], number: int) -> float:
    """Return how many events the streams of its engine got in the worst wait of one stream, the median of them.

    `streams`: engine, and when the request was made and each event came. The wait for the first event is left out: it
    is the engine's queue.
    """
    engine, times = streams[number]
    others = [other for at, (name, other) in enumerate(streams) if name == engine and at != number]
    worst = 0.0
    for began, ended in itertools.pairwise(times[1:]):
        running = [other for other in others if other[1] <= began and other[-1] >= began]
        if running:
            counts = [
                bisect.bisect_left(other, ended) - bisect.bisect_right(other, began) for other in running
            ]
            worst = max(worst, statistics.median(counts))
    return worst


def test_a_stream_that_stalls_is_told_by_the_others_progress() -> None:
    """The measure of the next test: one that waits while the others go on is left behind, on however slow a machine."""
    steady = [("e", [0.0, *(1 + step / 10 for step in range(30))]) for _ in range(5)]
    slow = [("e", [time * 40 for time in times]) for _, times in steady]
    assert left_behind(steady, 0) == left_behind(slow, 0) <= 1
    stalled = [0.0, *(1 + step / 10 for step in range(5)), *(3 + step / 10 for step in range(25))]
    assert left_behind([*steady, ("e", stalled)], 5) > 10
    assert left_behind([*steady, ("f", stalled)], 5) == 0  # of another engine


def test_two_hundred_streams_at_once() -> None:
    """200 streams run at the same time, every one whole and in order, none starved; and the router still answers."""
    count, tokens = 200, 30
    results: list[tuple[str, list[float], list[bytes]]] = []
    waits: list[float] = []

    async def one(client: aiohttp.ClientSession, number: int) -> None:
        body = {"model": "demo", "prompt": [number, *range(100)], "max_tokens": tokens, "stream": True}
        times, lines = [time.monotonic()], []
        async with client.post("/v1/completions", json=body) as answer:
            assert answer.status == 200
            async for line in answer.content:
                if line != b"\n":
                    times.append(time.monotonic())
                    lines.append(line)
        results.append((answer.headers["x-kvhash-engine"], times, lines))

    async def check(client: aiohttp.ClientSession) -> None:
        while len(results) < count:
            began = time.monotonic()
            async with client.get("/health") as answer:
                assert answer.status == 200
            waits.append(time.monotonic() - began)
            await asyncio.sleep(0.05)

    async def run(url: str) -> str:
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as client:
            await asyncio.gather(check(client), *(one(client, i) for i in range(count)))
            async with client.get("/metrics") as answer:
                return await answer.text()

    with engines(4, "--step-ms", "20") as started, router_process(started) as process:
        assert process.stderr is not None
        try:
            metrics = asyncio.run(run(process.stderr.readline().split()[-1]))
        finally:
            process.terminate()
            process.wait(DEADLINE_S)
            process.stderr.close()
    assert len(results) == count
    for _, times, lines in results:
        assert lines[-1] == b"data: [DONE]\n"
        assert len(lines) == tokens + 2
        # Nobody at all goes on for so long only where something stalls all; the machine may be busy.
        assert max(b - a for a, b in itertools.pairwise(times)) < 5
    all_times = [(engine, times) for engine, times, _ in results]
    assert max(left_behind(all_times, number) for number in range(count)) <= tokens * 2 / 3
    by_engine = [sum(engine == name for engine, _, _ in results) for name in ("e0", "e1", "e2", "e3")]
    assert min(by_engine) >= count / 8  # load is shared
    assert max(waits) < 5
    for name in ("e0", "e1", "e2", "e3"):
        assert f'kvhash_router_in_flight_requests{{engine="{name}"}} 0.0' in metrics


class FailingIndex(ResidencyIndex):
    """An index whose store can stop: ``fails`` is then raised by all that the router calls."""

    fails: Exception | None = None

    def _check(self) -> None:
        if self.fails is not None:
            raise self.fails

    def apply_record(self, engine: str, record: Any) -> None:
        """Fail, or take a record in."""
        self._check()
        super().apply_record(engine, record)

    def longest_prefix(self, *arguments: Any, **options: Any) -> Any:
        """Fail, or answer."""
        self._check()
        return super().longest_prefix(*arguments, **options)

    def knowledge(self, *arguments: Any) -> Any:
        """Fail, or answer."""
        self._check()
        return super().knowledge(*arguments)

    def remove(self, engine: str) -> bool:
        """Fail, or forget."""
        self._check()
        return super().remove(engine)


def test_store_that_stops_costs_hits_and_no_request() -> None:
    """While the index's store does not answer, load decides; when it does, every engine is learned again."""
    index = FailingIndex()
    with engines(2) as started, router(started, index=index) as running:
        engine = running.complete(PROMPT).headers["x-kvhash-engine"]
        wait_for(lambda: running.where(PROMPT)["matched_tokens"][engine] == 192, "the blocks")
        index.fails = StoreUnavailableError("no store")
        wait_for(lambda: running.where(PROMPT)["basis"] == "load", "the fall back")
        for i in range(20):
            assert running.complete([i, *PROMPT]).status_code == 200
        # An engine that got none of them, and so has no record that the store refused, is learned again too.
        assert running.state(engine)["knowledge"] == "unknown"
        assert running.state(engine)["reason"] == "store-unavailable"
        assert running.metric("kvhash_router_store_up") == 0
        for name in index.engines():
            ResidencyIndex.remove(index, name)  # the store comes back empty
        index.fails = None
        wait_for(lambda: running.where(PROMPT)["matched_tokens"][engine] == 192, "the blocks, again")
        wait_for(
            lambda: all(
                max(running.where([i, *PROMPT])["matched_tokens"].values()) == 192 for i in range(20)
            ),
            "what was stored meanwhile",
        )
        assert running.metric("kvhash_router_store_up") == 1
