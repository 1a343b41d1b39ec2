"""Every language's program passes the whole corpus, with nothing skipped but what the manifest says."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvhash.vectors import load_corpus
from kvhash.vectors.conformance import CAPABILITIES, run, select
from kvhash.vectors.report import FORMATS

from .built import PROGRAMS
from .lines_program import ROOT
from .toolchain import need

pytestmark = pytest.mark.timeout(900)  # the programs are built first
CORPUS = ROOT / "vectors"
CLAIMS: list[dict[str, Any]] = json.loads((CORPUS / "manifest.json").read_text())["programs"]


@pytest.mark.parametrize("program", CLAIMS, ids=lambda program: str(program["name"]))
def test_a_program_passes_the_corpus(program: dict[str, Any]) -> None:
    """Every case of every capability that the manifest does not except is answered rightly."""
    corpus = load_corpus(CORPUS)
    command = shlex.join(
        str(ROOT / word) if (ROOT / word).is_file() else word for word in PROGRAMS[program["name"]]()
    )
    report = run(command, corpus, select(corpus, without=program["without"]))
    assert report.passed, FORMATS["text"](report)
    assert set(report.counts()) == set(CAPABILITIES) - set(program["without"])
    assert {outcome.status for outcome in report.outcomes} == {"passed"}


def test_every_program_is_in_the_manifest() -> None:
    """No language is left out, and none but the Java example does without a capability."""
    assert {program["name"] for program in CLAIMS} == set(PROGRAMS)
    assert [program["name"] for program in CLAIMS if program["without"]] == ["java"]


def _go_test(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [need("go"), "test", "-count=1", "-run", tests, "."],
        cwd=ROOT / "sdk" / "go",
        env={**os.environ, "KVHASH_VECTORS": str(folder)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


def test_the_corpus_can_be_vendored_alone(tmp_path: Path) -> None:
    """With only a copy of vectors/ elsewhere the Go tests pass, and they fail when that copy is changed."""
    copy = tmp_path / "third_party" / "kvhash-vectors"
    shutil.copytree(CORPUS, copy)
    done = _go_test(copy, "Vectors$")
    assert done.returncode == 0, done.stdout[-3000:]
    changed = (copy / "external.json").read_text().replace("17940646550795321087", "17940646550795321086")
    (copy / "external.json").write_text(changed)
    done = _go_test(copy, "TestExternalVectors")
    assert done.returncode == 1
    assert "external/counting/0.10.2" in done.stdout
