"""What the router's forms in other languages must do: one story with real engines, told to each program."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from .running import engines, wait_for

__all__ = ["Ask", "assert_follows_real_engines", "assert_goes_on_after_a_line_that_is_not_text", "running"]

#: What changes an engine's hashes or tokens, and is not evaluated by a program that is given token ids.
ENGINE_ONLY: dict[str, Any] = {
    "multimodal": [{"identifier": "a", "offset": 0, "length": 2}],
    "prompt_embeds": "AAAA",
    "mm_processor_kwargs": {"num_crops": 4},
    "media_io_kwargs": {"video": {}},
    "truncate_prompt_tokens": 8,
    "reasoning_effort": "low",
    "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
}

#: Asks where tokens should go, with further fields of the question; returns the answer.
Ask = Callable[..., dict[str, Any]]


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[Ask]:
    """Run a program that answers questions line by line; it ends well when its input does."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        reader, writer = process.stdout, process.stdin

        def ask(tokens: Any, **fields: Any) -> dict[str, Any]:
            writer.write(json.dumps({"tokens": tokens, **fields}) + "\n")
            writer.flush()
            return dict(json.loads(reader.readline()))

        try:
            yield ask
            writer.close()
            assert process.wait(10) == 0
        finally:
            process.kill()


def _complete(url: str, prompt: list[int]) -> None:
    body = {"prompt": prompt, "max_tokens": 1}
    assert httpx.post(f"{url}/v1/completions", json=body, trust_env=False).status_code == 200


def assert_follows_real_engines(program: Path, dashes: str) -> None:
    """What was stored before it came, what is stored after, and a restart: it knows where a prompt is held.

    `dashes`: what its flags begin with.
    """
    early, late = [1, *range(100)], [2, *range(100)]
    with engines(2) as started:
        _complete(started[0].url, early)
        flags = [f"{dashes}hash-seed", "0", f"{dashes}prefix-caching-hash-algo", "sha256_cbor"]
        for one in started:
            flags += [f"{dashes}engine", f"{one.name}={one.events},{one.replay}"]
        with running([str(program), *flags]) as ask:
            # The first answer waits for the replays.
            assert ask(early)["matched_tokens"] == {"e0": 96, "e1": 0}
            assert ask(early)["engine"] == "e0"
            assert ask(early)["knowledge"]["e0"] == "exact"
            assert ask(early, cache_salt="x")["matched_tokens"] == {"e0": 0, "e1": 0}
            _complete(started[1].url, late)
            wait_for(lambda: ask(late)["matched_tokens"] == {"e0": 0, "e1": 96}, "the live events")
            assert ask(late)["engine"] == "e1"
            assert ask(late, queued={"e1": 1000.0})["engine"] == "e0"
            assert "error" in ask("x")
            for field, value in ENGINE_ONLY.items():
                assert field in ask(early, **{field: value})["error"]
            started[1].kill()
            started[1].restart()

            # Its first life's blocks are gone once the second one's first event is there.
            def again() -> bool:
                _complete(started[1].url, [3, *range(100)])
                return bool(
                    ask(late)["matched_tokens"]["e1"] == 0 and ask([3, *range(100)])["engine"] == "e1"
                )

            wait_for(again, "the restart to be seen")


def assert_goes_on_after_a_line_that_is_not_text(command: list[str], dashes: str) -> None:
    """Bytes that are no UTF-8 do not end a program: each line has its answer, in order."""
    question = b'{"tokens":[1,2,3]}\n'
    done = subprocess.run(
        [*command, f"{dashes}engine", "a=tcp://127.0.0.1:1"],
        input=b'{"tokens":"\xff"}\n' + question,
        stdout=subprocess.PIPE,
        timeout=30,
    )
    assert done.returncode == 0
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert "error" in first
    assert second["engine"] == "a"
