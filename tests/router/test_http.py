"""HTTP as clients and engines speak it, well or not: what is passed on, what is not, and what a stream's end is."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from kvhash_router.config import HashSettings, ModelConfig, ProxyConfig
from kvhash_router.prompts import PromptHasher
from kvhash_router.sse import EventCutter, is_done

from .running import DEADLINE_S, RunningRouter, StubEngine, event, router, stubs, whole

OK = b'{"choices":[{"index":0,"text":"ok"}],"usage":{"prompt_tokens":3,"completion_tokens":1}}'
BODY = b'{"model":"demo","prompt":[1,2,3],"max_tokens":2}'
DONE = b"data: [DONE]\n\n"
STREAM = b"Content-Type: text/event-stream"


async def answers(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
    """Answer."""
    whole(writer, 200, OK)


@contextlib.contextmanager
def one_engine(**config: Any) -> Iterator[tuple[StubEngine, RunningRouter]]:
    """Run a router in front of an engine that answers."""
    with stubs(answers) as served, router(served, **config) as running:
        yield served[0], running


def talk(running: RunningRouter, *pieces: bytes) -> bytes:
    """Send bytes as they are, piece by piece; return all that is answered until the connection is closed."""
    host, _, port = running.url.rpartition("//")[2].partition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            connection.sendall(piece)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def post(path: str, *fields: str, body: bytes = BODY, version: str = "1.1") -> bytes:
    """Return a request as bytes, after which the connection is closed."""
    head = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(body)}", *fields]
    if not any(field.lower().startswith("connection") for field in fields):
        head.append("Connection: close")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def status(answer: bytes) -> int:
    """Return an answer's status."""
    return int(answer.split(b" ", 2)[1])


def test_every_form_of_a_request_is_passed_on_whole() -> None:
    """HTTP/1.0, chunks, single bytes, a wrong content type, a body that is waited for: the engine gets the same."""
    chunked = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    )
    half = len(BODY) // 2
    parts = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (BODY[:half], BODY[half:]))
    waits = post("/v1/completions", "Expect: 100-continue", body=b"").replace(
        b": 0\r\n", b": %d\r\n" % len(BODY)
    )
    plain = post("/v1/completions", "Content-Type: text/plain")
    with one_engine() as (engine, running):
        for pieces in (
            [post("/v1/completions", version="1.0")],
            [chunked + parts + b"0\r\n\r\n"],
            [plain[i : i + 1] for i in range(len(plain))],
            [waits, BODY],
        ):
            answer = talk(running, *pieces)
            assert status(answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")) == 200
            assert answer.endswith(OK)
        assert engine.requests == [("/v1/completions", json.loads(BODY))] * 4


_NOT_FOR_CLIENTS = (
    "/reset_prefix_cache",
    "/sleep",
    "/abort_requests",
    "/health",
    "/metrics",
    "/v1/../sleep",
    "/v1/%2e%2e/sleep",
    "/v1/x/..%2f..%2fsleep",
    "/v1/x/%2E%2E",
    "/v1/..\\sleep",
    "/v1//sleep",
    "//host/v1/completions",
    "/v1",
    "/V1/completions",
    "/v1/load_lora_adapter",
    "/v1/unload%5flora_adapter",
)


def test_what_is_one_engines_own_is_not_passed_on() -> None:
    """A client reaches no endpoint that pauses or empties an engine, or changes one of several: 404."""
    with one_engine() as (engine, running):
        for path in _NOT_FOR_CLIENTS:
            answer = talk(running, post(path))
            assert status(answer) == 404, path
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "NotFoundError"
        assert engine.requests == []


def test_methods_that_are_none_are_refused_in_the_apis_form() -> None:
    """GET, PUT and OPTIONS of what only takes a body: 405, which method it is, and JSON."""
    with one_engine() as (engine, running):
        for method in ("GET", "PUT", "DELETE", "OPTIONS"):
            answer = running.client.request(method, "/v1/completions")
            assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
            assert answer.json()["error"]["code"] == 405
        assert running.client.head("/v1/models").status_code == 200
        assert engine.requests == []


def test_fields_of_one_connection_end_there() -> None:
    """Hop-by-hop fields, and those that Connection names, are passed on neither way; others are, given twice or not."""
    said = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Hop: 1\r\nKeep-Alive: 5\r\nSet-Cookie: a\r\nSet-Cookie: b\r\n"

    async def hops(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
        writer.write(said + b"Connection: x-hop, close\r\n\r\n{}")

    with stubs(hops) as served, router(served) as running:
        fields = ["Connection: close, X-Secret", "X-Secret: 1", "TE: trailers", "Upgrade: h2c", "X-Kept: 2"]
        head = talk(running, post("/v1/completions", *fields)).partition(b"\r\n\r\n")[0].lower()
        assert head.count(b"set-cookie: ") == 2
        assert b"x-hop" not in head
        assert b"keep-alive" not in head
        got = served[0].headers[0]
        assert got["x-kept"] == "2"
        assert not {"x-secret", "te", "upgrade", "connection"} & set(got)


def test_compressed_bodies_are_refused_as_such() -> None:
    """No engine reads one, and the router does not say that it is no JSON."""
    with one_engine() as (engine, running):
        body = gzip.compress(BODY)
        answer = running.client.post("/v1/completions", content=body, headers={"Content-Encoding": "gzip"})
        assert (answer.status_code, "compressed (gzip)" in answer.text) == (415, True)
        assert engine.requests == []


def test_a_body_that_stops_is_not_waited_for() -> None:
    """A client that promises more than it sends is told so, and its connection is closed."""
    with one_engine(proxy=ProxyConfig(stream_idle_s=0.2)) as (engine, running):
        answer = talk(running, post("/v1/completions").replace(b": 48\r\n", b": 100\r\n"))
        assert status(answer) == 408
        assert b"nothing of the body came for 0.2 s" in answer
        assert engine.requests == []


def raw(status_line: str, body: bytes, *fields: bytes) -> bytes:
    """Return an engine's answer as bytes."""
    head = f"HTTP/1.1 {status_line}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n".encode()
    return head + b"".join(field + b"\r\n" for field in fields) + b"\r\n" + body


CRLF = (event("x") + DONE).replace(b"\n", b"\r\n")
ENDS = {
    "mark-in-text": (raw("200 OK", event("data: [DONE]"), STREAM), 200, b'"engine_error"'),
    "mark-without-empty-line": (raw("200 OK", event("x") + b"data: [DONE]\n", STREAM), 200, DONE),
    "mark-alone-without-empty-line": (raw("200 OK", b"data: [DONE]\n", STREAM), 502, b"without its end mark"),
    "crlf": (raw("200 OK", CRLF, STREAM), 200, CRLF),
    "cr": (raw("200 OK", CRLF.replace(b"\n", b""), STREAM), 200, CRLF.replace(b"\n", b"")),
    "capitals": (raw("200 OK", event("x") + DONE, b"Content-Type: Text/Event-Stream"), 200, DONE),
    "compressed": (
        raw("200 OK", gzip.compress(event("x") + DONE, mtime=0), STREAM, b"Content-Encoding: gzip"),
        200,
        gzip.compress(event("x") + DONE, mtime=0),
    ),
    "error-400": (raw("400 X", b'data: {"error":1}\n\n', STREAM), 400, b'data: {"error":1}\n\n'),
    "error-500": (raw("500 X", b'{"error":1}', STREAM), 500, b'{"error":1}'),
    "redirect": (raw("307 X", b"", b"Location: /v1/x"), 307, b""),
    "no-content": (b"HTTP/1.1 204 X\r\nConnection: close\r\n\r\n", 204, b""),
    "too-many": (raw("429 X", b"{}", b"Retry-After: 3"), 429, b"{}"),
    "garbage": (b"\x00\xff\x13garbage\r\n\r\n", 502, b"not HTTP"),
    "too-short": (b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nabc", 502, b"not completed"),
    "bad-chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc", 502, b"not HTTP"),
    "long-field": (raw("200 OK", b"{}", b"X-A: " + b"a" * 20_000), 502, b"not HTTP"),
    "nothing": (b"", 502, b"isconnected"),
}


@pytest.fixture(scope="module")
def odd_engine() -> Iterator[tuple[StubEngine, RunningRouter]]:
    """Run a router in front of an engine that answers as the request's `case` says."""

    async def odd(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
        writer.write(ENDS[value["case"]][0])

    with stubs(odd) as served, router(served) as running:
        yield served[0], running


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_an_answer_is_what_it_is(odd_engine: tuple[StubEngine, RunningRouter], name: str) -> None:
    """A stream that was cut short is never taken for a whole one, nor an error for a stream; addresses stay here."""
    engine, running = odd_engine
    _, expected, part = ENDS[name]
    before = len(engine.requests)
    body = {"prompt": [1, 2, 3], "stream": True, "case": name}
    with running.client.stream("POST", "/v1/completions", json=body) as answer:
        content = b"".join(answer.iter_raw())
    assert answer.status_code == expected, content
    assert part in content
    assert b"127.0.0.1" not in content
    assert running.state("s0")["in_flight"] == 0
    assert len(engine.requests) == before + 1


def test_cut_at_every_byte_a_stream_is_the_same() -> None:
    """Multi-byte text and every kind of empty line, one byte at a time: events come whole, and the end mark is seen."""
    for end in ("\n\n", "\r\n\r\n", "\r\r", "\n\r\n"):
        stream = "".join(f"data: {text}{end}" for text in ('{"text":"日本\U0001f600"}', "[DONE]")).encode()
        cutter, passed = EventCutter(), []
        for at in range(len(stream)):
            passed.append(cutter.feed(stream[at : at + 1]))
        events = [piece for piece in passed if piece]
        assert (len(events), b"".join(events)) == (2, stream)
        assert [is_done(piece) for piece in events] == [False, True]


def test_only_what_an_endpoint_reads_is_hashed() -> None:
    """A completion's prompt, not messages beside it; what another endpoint makes of a body is not guessed."""
    hasher = PromptHasher("m", ModelConfig(hash=HashSettings(hash_seed="0", block_size=4)))
    body = {"prompt": [1, 2, 3, 4, 5], "messages": [{"role": "user", "content": "x"}]}
    assert len(hasher.plan(body, None, path="/v1/completions").prompts[0].hashes) == 1
    chat = hasher.plan(body, None, path="/v1/chat/completions").unhashed
    assert chat is not None
    assert chat.startswith("invalid-request: a chat needs a tokenizer")
    for path in ("/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/chat/completions/batch"):
        made = hasher.plan(body, None, path=path)
        assert made.unhashed is not None
        assert made.unhashed.startswith("other-endpoint")
        assert not made.prompts
