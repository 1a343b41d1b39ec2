"""The HTTP front answers as OpenAI's API does and tells the cache's truth."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine_ref.loop import EngineLoop
from engine_ref.metrics import EngineMetrics
from engine_ref.server import make_app

from .test_publish import HASHER, core


class Client:
    """Calls an ASGI application in this process."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send one request and return the whole answer."""

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())

    def get(self, path: str) -> httpx.Response:
        """GET."""
        return self.request("GET", path)

    def post(self, path: str, **options: Any) -> httpx.Response:
        """POST."""
        return self.request("POST", path, **options)


@pytest.fixture
def client() -> Iterator[Any]:
    """Return a client of a running engine in dev mode."""
    metrics = EngineMetrics("null")
    loop = EngineLoop(core(), metrics)
    loop.start()
    app = make_app(
        loop, metrics, hasher=HASHER, model_name="null", max_model_len=64, vocab_size=32000, dev_mode=True
    )
    yield Client(app)
    assert loop.close()


def test_completion_says_what_was_cached(client: Any) -> None:
    """The same prompt again gives the same tokens, and its usage says how many were cached."""
    body = {"model": "null", "prompt": list(range(17)), "max_tokens": 3}
    first, second = (client.post("/v1/completions", json=body).json() for _ in range(2))
    assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]
    assert first["choices"][0]["finish_reason"] == "length"
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    assert client.post("/reset_prefix_cache").json() == {"success": True}
    assert client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 0
    }
    assert "vllm:prefix_cache_hits_total" in client.get("/metrics").text
    assert client.get("/health").status_code == 200


def test_stream_ends_with_usage_and_done(client: Any) -> None:
    """A stream carries a chunk for each step, then the usage, then the end mark."""
    body = {"prompt": [1, 2, 3], "max_tokens": 3, "stream": True}
    lines = [line for line in client.post("/v1/completions", json=body).text.split("\n\n") if line]
    assert len(lines) == 5
    assert lines[-1] == "data: [DONE]"


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'{"prompt":"text"}',
        b'{"prompt":[]}',
        b'{"prompt":[99999]}',
        b'{"prompt":[1],"max_tokens":0}',
        b'{"prompt":[1],"max_tokens":64}',
        b'{"prompt":[1],"model":"other"}',
        b'{"prompt":[1],"cache_salt":5}',
    ],
)
def test_bad_request_is_a_400_with_a_message(client: Any, body: bytes) -> None:
    """What cannot be served is said in OpenAI's form."""
    answer = client.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
