"""Two engines, a router, three chats: shows where each turn goes and why. Needs no GPU and no model.

python examples/router/demo.py
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def main() -> int:
    """Run the demonstration; 0 when the second turns found what the first ones left."""
    missing = [
        name for name in ("aiohttp", "msgspec", "starlette", "uvicorn", "zmq") if find_spec(name) is None
    ]
    if missing:
        print(f"{', '.join(missing)}: not installed; pip install . ./examples/router", file=sys.stderr)
        return 2
    paths = [str(HERE), str(ROOT), str(ROOT / "sdk" / "python")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags: list[str] = []
        for name in ("a", "b"):
            command = [sys.executable, str(HERE / "demo_engine.py")]
            engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            stack.callback(_end, engine)
            assert engine.stdout is not None
            url, events, replay = engine.stdout.readline().split()
            flags += ["--engine", f"{url},events={events},replay={replay},name={name}"]
            print(f"engine {name}: {url}, events at {events}")
        log = folder / "decisions.jsonl"
        command = [
            sys.executable,
            "-m",
            "kvhash_router",
            "--port",
            "0",
            "--model",
            "demo",
            "--hash-seed",
            "0",
        ]
        command += ["--prefix-caching-hash-algo", "sha256_cbor", "--decision-log", str(log), *flags]
        router = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        stack.callback(_end, router)
        assert router.stderr is not None
        url = router.stderr.readline().split()[-1]
        print(f"router:   {url}\n")
        history = {chat: [number, *range(400)] for number, chat in enumerate(("first", "second", "third"))}
        print(f"{'chat':<7} {'turn':>4} {'engine':>6} {'basis':<8} {'prompt':>6} {'said':>5} {'cached':>6}")
        hits = 0
        for turn in (1, 2):
            for chat, tokens in history.items():
                answer = _complete(url, tokens)
                tokens += [*answer["choices"][0]["token_ids"], *range(50)]
                decision = _last(log, turn, list(history).index(chat))
                print(
                    f"{chat:<7} {turn:>4} {decision['engine']:>6} {decision['basis']:<8} "
                    f"{decision['prompt_tokens']:>6} {decision['matched_tokens']:>5} {decision['cached_tokens']:>6}"
                )
                hits += turn == 2 and decision["cached_tokens"] >= 400 == decision["matched_tokens"]
    print("\n'said' is what the index knew of the engine's cache, 'cached' what the engine then reported.")
    return 0 if hits == 3 else 1


def _complete(url: str, tokens: list[int]) -> dict[str, Any]:
    body = json.dumps({"model": "demo", "prompt": tokens, "max_tokens": 8}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as answer:
        return dict(json.load(answer))


def _last(log: Path, turn: int, place: int) -> dict[str, Any]:
    """Return a request's line of the decision log, once it is there."""
    wanted = (turn - 1) * 3 + place + 1
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        # What follows the last line end is still being written.
        lines = log.read_text().split("\n")[:-1] if log.exists() else []
        if len(lines) >= wanted:
            return dict(json.loads(lines[wanted - 1]))
        time.sleep(0.01)
    raise SystemExit("the decision log lacks a line")


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
