"""The Java hasher answers request lines exactly as Python does."""

from __future__ import annotations

import json
import subprocess

import pytest

from ..data_files import RELEASES
from . import built
from .lines_program import (
    ROOT,
    assert_recorded_answers,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::kvhash.contract.NewerReleaseWarning"),
    pytest.mark.timeout(900),  # the program is built first
]


@pytest.fixture(scope="module")
def program() -> list[str]:
    """Return the request-line program, built and unit-tested by Maven: from its local store where that suffices."""
    return built.java()


@pytest.mark.parametrize("release", RELEASES)
def test_every_recorded_case_is_equal(program: list[str], release: str) -> None:
    """NONE_HASH, hashes, published values and extra keys equal vLLM's; what it cannot hash is refused."""
    assert_recorded_answers(program, release)


def test_answers_come_line_by_line(program: list[str]) -> None:
    """A line is answered before the next one is sent: the program can be used in dialogue."""
    with subprocess.Popen(program, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for i in range(3):
            process.stdin.write(b'{"id":%d,"tokens":[1]}\n' % i)
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["id"] == i
        process.stdin.close()
        assert process.wait(timeout=20) == 0
