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

import pytest
from kvhash_router.decision import Candidate, Knowledge, Policy, decide

from .other_programs import assert_follows_real_engines, assert_goes_on_after_a_line_that_is_not_text
from .running import ROOT

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
            recent_weight=generator.choice((0.0, 0.2)),
            tie_share=generator.choice((0.0, 0.02, 0.5)),
            tie_tokens=generator.choice((0.0, 8.0)),
        )
        candidates = [
            Candidate(
                engine=f"e{i}",
                matched_tokens=generator.choice((0, 16 * generator.randrange(400))),
                knowledge=generator.choice(list(Knowledge)),
                queued_tokens=generator.choice((0.0, float(generator.randrange(3000)))),
                recent_tokens=generator.choice((0.0, float(generator.randrange(20_000)))),
                speed=generator.choice((1000.0, 3000.0)),
            )
            for i in range(generator.randrange(1, 6))
        ]
        draws = [generator.randrange(60), generator.randrange(60)]
        decision = decide(prompt, candidates, policy=policy, draw=_of(draws))
        assert decision is not None
        weights = ("degraded_trust", "overhead_tokens", "recent_weight", "tie_share", "tie_tokens")
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
    assert_follows_real_engines(program, "-")
    assert_goes_on_after_a_line_that_is_not_text([str(program), "-hash-seed", "0", "-wait", "0s"], "-")
    wrong = [str(program), "-hash-seed", "0", "-wait", "-1s", "-engine", "a=tcp://127.0.0.1:1"]
    refused = subprocess.run(wrong, input="", capture_output=True, text=True)
    assert (refused.returncode, "-wait" in refused.stderr) == (2, True)
