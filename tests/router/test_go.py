"""The Go form of the router decides as the Python one does, and follows real engines."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvhash_router.decision import Candidate, Knowledge, Policy, decide

from .running import ROOT, engines, wait_for

MODULE = ROOT / "examples" / "router-go"
CASES = MODULE / "testdata" / "decisions.json"


@pytest.fixture(scope="module")
def go() -> str:
    """Return the Go command; without one, fail where everything is required, else skip loudly."""
    found = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if found is None:
        if os.environ.get("KVHASH_REQUIRE_ALL") == "1":
            pytest.fail("the Go toolchain is missing, and KVHASH_REQUIRE_ALL=1")
        pytest.skip("the Go toolchain is missing; the Go router is NOT tested")
    return found


def _of(draws: list[int]) -> Callable[[int], int]:
    left = iter(draws)
    return lambda count: next(left) % count


def _cases() -> list[dict[str, Any]]:
    """Return decisions of the Python router, always the same."""
    generator = random.Random(8)
    cases = []
    for _ in range(200):
        prompt = generator.randrange(1, 5000)
        policy = Policy(
            degraded_trust=generator.choice((0.0, 0.5, 1.0)),
            overhead_tokens=generator.choice((0.0, 32.0)),
            tie_share=generator.choice((0.0, 0.02, 0.5)),
            tie_tokens=generator.choice((0.0, 8.0)),
        )
        candidates = [
            Candidate(
                engine=f"e{i}",
                matched_tokens=generator.choice((0, 16 * generator.randrange(400))),
                knowledge=generator.choice(list(Knowledge)),
                queued_tokens=generator.choice((0.0, float(generator.randrange(3000)))),
                speed=generator.choice((1000.0, 3000.0)),
            )
            for i in range(generator.randrange(1, 6))
        ]
        draws = [generator.randrange(60), generator.randrange(60)]
        decision = decide(prompt, candidates, policy=policy, draw=_of(draws))
        assert decision is not None
        weights = ("degraded_trust", "overhead_tokens", "tie_share", "tie_tokens")
        cases.append(
            {
                "prompt_tokens": prompt,
                "policy": {name: getattr(policy, name) for name in weights},
                "candidates": [
                    {name: getattr(one, name) for name in one.__struct_fields__ if name != "knowledge"}
                    | {"knowledge": one.knowledge.value}
                    for one in candidates
                ],
                "draws": draws,
                "engines": [one.candidate.engine for one in decision.scored],
                "costs": [one.cost for one in decision.scored],
            }
        )
    return cases


def test_cases_for_go_are_the_python_routers_decisions() -> None:
    """The file that the Go test reads holds what the Python router decides now (KVHASH_WRITE_CASES=1 writes it)."""
    text = "[\n" + ",\n".join(json.dumps(case) for case in _cases()) + "\n]\n"
    if os.environ.get("KVHASH_WRITE_CASES") == "1":
        CASES.parent.mkdir(exist_ok=True)
        CASES.write_text(text)
    assert CASES.read_text() == text


def test_go_tests_pass(go: str) -> None:
    """The module is formatted, vetted, and its own tests pass: the decisions, and the index's rules."""
    for arguments in (("vet", "./..."), ("test", "./...")):
        done = subprocess.run([go, *arguments], cwd=MODULE, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
    format_tool = Path(go).with_name("gofmt")
    done = subprocess.run([str(format_tool), "-l", "."], cwd=MODULE, capture_output=True, text=True)
    assert done.stdout == ""


def test_go_program_follows_real_engines(go: str, tmp_path: Path) -> None:
    """What was stored before it came, what is stored after, and a restart: the program knows where a prompt is held."""
    program = tmp_path / "kvhash-route"
    built = subprocess.run(
        [go, "build", "-o", str(program), "./cmd/kvhash-route"], cwd=MODULE, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    early, late = [1, *range(100)], [2, *range(100)]

    def complete(url: str, prompt: list[int]) -> None:
        body = {"prompt": prompt, "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=body, trust_env=False).status_code == 200

    with engines(2) as started:
        complete(started[0].url, early)
        flags = ["-hash-seed", "0", "-prefix-caching-hash-algo", "sha256_cbor"]
        for one in started:
            flags += ["-engine", f"{one.name}={one.events},{one.replay}"]
        with subprocess.Popen(
            [str(program), *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None

            def ask(tokens: list[int], **fields: Any) -> dict[str, Any]:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(json.dumps({"tokens": tokens, **fields}) + "\n")
                process.stdin.flush()
                return dict(json.loads(process.stdout.readline()))

            # The first answer waits for the replays.
            assert ask(early)["matched_tokens"] == {"e0": 96, "e1": 0}
            assert ask(early)["engine"] == "e0"
            assert ask(early)["knowledge"]["e0"] == "exact"
            assert ask(early, cache_salt="x")["matched_tokens"] == {"e0": 0, "e1": 0}
            complete(started[1].url, late)
            wait_for(lambda: ask(late)["matched_tokens"] == {"e0": 0, "e1": 96}, "the live events")
            assert ask(late)["engine"] == "e1"
            assert ask(late, queued={"e1": 1000.0})["engine"] == "e0"
            assert "error" in ask(tokens="x")  # type: ignore[arg-type]
            started[1].kill()
            started[1].restart()

            # Its first life's blocks are gone once the second one's first event is there.
            def again() -> bool:
                complete(started[1].url, [3, *range(100)])
                return bool(
                    ask(late)["matched_tokens"]["e1"] == 0 and ask([3, *range(100)])["engine"] == "e1"
                )

            wait_for(again, "the restart to be seen")
            process.stdin.close()
            assert process.wait(10) == 0
