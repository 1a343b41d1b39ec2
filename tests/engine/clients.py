"""Many clients at once, each over a connection of its own: what they sent and what became of it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from engine_ref.runner import NullRunner

__all__ = ["Tally", "run_clients"]


@dataclass
class Tally:
    """What the clients saw."""

    answered: int = 0
    hung_up: int = 0
    cached_tokens: int = 0
    wrong: list[str] = field(default_factory=list)


def run_clients(url: str, *, clients: int, seconds: float, seed: int = 0) -> Tally:
    """Let `clients` send one request after the other for `seconds`; returns what came of it.

    Prompts share prefixes, some stream, some hang up in the middle. Each answer's tokens are compared.
    """
    tally = Tally()
    end = time.monotonic() + seconds

    async def run() -> None:
        await asyncio.gather(*(_client(url, tally, end, seed * 1000 + number) for number in range(clients)))

    asyncio.run(run())
    return tally


async def _client(url: str, tally: Tally, end: float, seed: int) -> None:
    draw = random.Random(seed)
    runner = NullRunner()
    parts = urlsplit(url)
    while time.monotonic() < end:
        prompt = [draw.randrange(4)] * draw.randrange(1, 80) + [draw.randrange(1000) for _ in range(8)]
        count = draw.randrange(1, 40)
        stream = draw.random() < 0.5
        body = json.dumps({"prompt": prompt, "max_tokens": count, "stream": stream}).encode()
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            head += f"Content-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
            if draw.random() < 0.05:
                tally.hung_up += 1
                continue
            answer = await asyncio.wait_for(reader.read(), 120)
        finally:
            writer.close()
        tokens, cached = _tokens(answer, stream)
        if tokens != _expected(runner, prompt, count):
            tally.wrong.append(f"{prompt} {count}: {answer[-300:]!r}")
        tally.answered += 1
        tally.cached_tokens += cached


def _tokens(answer: bytes, stream: bool) -> tuple[list[int], int]:
    head, _, rest = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        return [], 0
    if not stream:
        value: dict[str, Any] = json.loads(rest)
        return value["choices"][0]["token_ids"], value["usage"]["prompt_tokens_details"]["cached_tokens"]
    lines = [line for line in rest.split(b"\n") if line.startswith(b"data: {")]
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    return [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]], 0


def _expected(runner: NullRunner, prompt: list[int], count: int) -> list[int]:
    known = list(prompt)
    for _ in range(count):
        known.append(runner.next_token(known[-8:], len(known)))
    return known[len(prompt) :]
