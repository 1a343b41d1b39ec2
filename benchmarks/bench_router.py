"""What prefix-aware routing saves: 4 engines, 64 chat sessions with one system prompt, the same chats for every router.

Compared are round-robin, `kvhash-router`, and an oracle: the same decision, but every engine is asked for its own map
at every request. Then once more with one engine three times slower, for latency. Engines, router and clients are
processes of their own and talk over sockets; the engines are the reference engine with a clock and small pools.

    python benchmarks/bench_router.py
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROUTER = ROOT / "examples" / "router"
sys.path[:0] = [str(ROUTER), str(ROOT), str(ROOT / "sdk" / "python")]

import aiohttp  # noqa: E402

BLOCK = 16
ENGINES = 4
SESSIONS = 64
TURNS = 5
SYSTEM = 384
USER = 48
ANSWER = 16
#: Blocks of one engine's pool: its share of the sessions fits, all of them do not.
POOL = 640
SPEED = 8_000.0
STEP_MS = 5.0
THINK_S = 1.5


def environment() -> dict[str, str]:
    """Return the children's environment."""
    paths = [str(ROUTER), str(ROOT), str(ROOT / "sdk" / "python")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}


@contextlib.contextmanager
def engines(speeds: Sequence[float]) -> Iterator[list[dict[str, str]]]:
    """Run an engine for each speed; yields what a router's configuration says of them."""
    processes = []
    try:
        for speed in speeds:
            slower = SPEED / speed
            options = [
                "--num-blocks",
                str(POOL),
                "--tokens-per-second",
                str(speed),
                "--step-ms",
                str(STEP_MS * slower),
            ]
            command = [sys.executable, str(ROUTER / "demo_engine.py"), *options]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()))
        described = []
        for number, process in enumerate(processes):
            assert process.stdout is not None
            url, events, replay = process.stdout.readline().split()
            described.append({"name": f"e{number}", "url": url, "events": events, "replay": replay})
        yield described
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def router(kind: str, fleet: list[dict[str, str]]) -> Iterator[str]:
    """Run a router of a kind; yields its address."""
    strategy = "prefix" if kind == "oracle" else kind
    config = {
        "models": {"demo": {"hash": {"algorithm": "sha256_cbor", "hash_seed": "0", "block_size": BLOCK}}},
        "engines": fleet,
        "policy": {"strategy": strategy},
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "router.json"
        file.write_text(json.dumps(config))
        command = [sys.executable, "-m", "kvhash_router", "--config", str(file), "--port", "0"]
        if kind == "oracle":
            command = [sys.executable, __file__, "--serve-oracle", str(file)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if "listens on " in line:
                    break
            else:
                raise SystemExit("the router did not start")
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield line.rpartition(" ")[2].strip()
        finally:
            process.terminate()
            process.wait()


# --- the oracle -------------------------------------------------------------------------------------------------


class OracleIndex:
    """In the place of the residency index: asks every engine for its own map."""

    def __init__(self, fleet: Sequence[Any]) -> None:
        self._hosts = {engine.name: engine.url.partition("://")[2] for engine in fleet}
        self._local = threading.local()

    def longest_prefix(
        self, hashes: Sequence[Any], engines: Any = None, *, num_tokens: int | None = None
    ) -> dict[str, Any]:
        """Ask each engine."""
        from kvhash.index import PrefixMatch

        body = json.dumps({"hashes": [bytes(value).hex() for value in hashes]})
        most = ((num_tokens or 0) - 1) // BLOCK * BLOCK
        found = {}
        for name in engines or self._hosts:
            blocks = self._ask(name, body)
            found[name] = PrefixMatch(
                blocks=blocks, tokens=blocks * BLOCK, usable_tokens=min(blocks * BLOCK, most)
            )
        return found

    def _ask(self, name: str, body: str) -> int:
        connections = self._local.__dict__.setdefault("connections", {})
        for last in (False, True):
            connection = connections.setdefault(
                name, http.client.HTTPConnection(self._hosts[name], timeout=10)
            )
            try:
                connection.request(
                    "POST", "/debug/longest_prefix", body, {"Content-Type": "application/json"}
                )
                return int(json.loads(connection.getresponse().read())["blocks"])
            except (http.client.HTTPException, OSError):
                connection.close()
                del connections[name]
                if last:
                    raise
        raise AssertionError

    def knowledge(self, engine: str) -> Any:
        """Exact."""
        from kvhash.index import Knowledge, State

        return Knowledge(State.EXACT)

    def configure(self, engine: str, settings: Any) -> None:
        """Nothing to be told."""

    def apply_record(self, engine: str, record: Any) -> None:
        """Nothing to learn."""

    def remove(self, engine: str) -> None:
        """Nothing to forget."""

    def stats(self) -> dict[str, int]:
        """Nothing to count."""
        return {}


def serve_oracle(file: str) -> None:
    """Serve the router with the oracle for an index."""
    import socket

    import uvicorn
    from kvhash_router.app import make_app
    from kvhash_router.config import RouterConfig
    from kvhash_router.residency import Residency

    config = RouterConfig.load(file)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    app = make_app(config, residency=Residency(OracleIndex(config.engines)))
    print(f"oracle listens on http://127.0.0.1:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listener])


# --- the chats --------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What one run gave; latencies in seconds, a request each."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    engines: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


async def chat(
    http_client: aiohttp.ClientSession, url: str, number: int, think_s: float, result: Result
) -> None:
    """Hold one session: each turn's prompt is the whole chat so far."""
    generator = random.Random(number)
    system = random.Random("system")
    history = [system.randrange(32_000) for _ in range(SYSTEM)]
    await asyncio.sleep(generator.uniform(0, 2 * think_s))
    for _ in range(TURNS):
        history += [generator.randrange(32_000) for _ in range(USER)]
        body = {"model": "demo", "prompt": history, "max_tokens": ANSWER, "stream": True}
        began = time.monotonic()
        first = 0.0
        async with http_client.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise SystemExit(f"status {answer.status}: {await answer.text()}")
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    first = first or time.monotonic() - began
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise SystemExit(str(chunk))
                    for choice in chunk["choices"]:
                        history += choice["token_ids"]
            name = answer.headers["x-kvhash-engine"]
        result.whole.append(time.monotonic() - began)
        result.first.append(first)
        result.engines[name] = result.engines.get(name, 0) + 1
        await asyncio.sleep(generator.expovariate(1 / think_s))


async def drive(url: str, fleet: list[dict[str, str]], think_s: float) -> Result:
    """Hold all sessions at the same time, then ask the engines what they computed."""
    result = Result()
    began = time.monotonic()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as client:
        await asyncio.gather(*(chat(client, url, number, think_s, result) for number in range(SESSIONS)))
        result.seconds = time.monotonic() - began
        for engine in fleet:
            async with client.get(f"{engine['url']}/debug/counts") as answer:
                counts = await answer.json()
            result.prompt_tokens += counts["prompt_tokens"]
            result.computed_tokens += counts["computed_prompt_tokens"]
    return result


def run(kind: str, speeds: Sequence[float], think_s: float) -> Result:
    """Run fresh engines and a router, and all chats through it."""
    with engines(speeds) as fleet, router(kind, fleet) as url:
        return asyncio.run(drive(url, fleet, think_s))


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the values are."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def line(name: str, result: Result) -> str:
    """Return a run's numbers."""
    spread = " ".join(f"{count:4d}" for _, count in sorted(result.engines.items()))
    cached = 1 - result.computed_tokens / result.prompt_tokens
    return (
        f"{name:<22} {result.computed_tokens:>9,} {cached:>7.1%} "
        f"{1000 * quantile(result.first, 0.5):>7.0f} {1000 * quantile(result.first, 0.95):>7.0f} "
        f"{1000 * quantile(result.whole, 0.5):>7.0f} {1000 * quantile(result.whole, 0.95):>7.0f}   {spread}"
    )


def main() -> int:
    """Run all and print the ratios; 1 when one is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--serve-oracle", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--think-s", type=float, default=THINK_S, help="mean seconds between a user's turns")
    options = parser.parse_args()
    if options.serve_oracle:
        serve_oracle(options.serve_oracle)
        return 0
    print(
        f"{ENGINES} engines of {POOL} blocks, {SESSIONS} sessions of {TURNS} turns: {SYSTEM} system tokens, then "
        f"{USER} + {ANSWER} a turn; latencies in ms"
    )
    print(
        f"{'':<22} {'computed':>9} {'cached':>7} {'first50':>7} {'first95':>7} {'whole50':>7} {'whole95':>7}   requests"
    )
    equal = [SPEED] * ENGINES
    slow = [SPEED] * (ENGINES - 1) + [SPEED / 3]
    results = {}
    for kind in ("round-robin", "prefix", "oracle"):
        results[kind] = run(kind, equal, options.think_s)
        print(line(kind, results[kind]), flush=True)
    for kind in ("round-robin", "prefix"):
        results[f"{kind}, one slow"] = run(kind, slow, options.think_s)
        print(line(f"{kind}, one slow", results[f"{kind}, one slow"]), flush=True)
    aware = results["prefix"].computed_tokens
    checks = [
        ("prompt tokens computed / round-robin's", aware / results["round-robin"].computed_tokens, 0.60),
        ("prompt tokens computed / the oracle's", aware / results["oracle"].computed_tokens, 1.10),
        (
            "p95 latency / round-robin's, one engine 3x slower",
            quantile(results["prefix, one slow"].whole, 0.95)
            / quantile(results["round-robin, one slow"].whole, 0.95),
            1.0,
        ),
    ]
    for name, ratio, most in checks:
        print(f"{name:<54} {ratio:5.2f}  (at most {most:.2f}: {'ok' if ratio <= most else 'MISSED'})")
    for what, which in (("", ""), (", one engine 3x slower", ", one slow")):
        first, whole = (
            quantile(getattr(results[f"prefix{which}"], times), 0.95)
            / quantile(getattr(results[f"round-robin{which}"], times), 0.95)
            for times in ("first", "whole")
        )
        print(f"{'p95 first token / round-robin' + what:<54} {first:5.2f}")
        if not which:
            print(f"{'p95 latency / round-robin':<54} {whole:5.2f}")
    return 0 if all(ratio <= most for _, ratio, most in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
