"""The page about events is the contract table's; the examples run as real programs."""

from __future__ import annotations

import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvhash.events.publisher import Publisher
from kvhash.events.schema import BlockRemoved, BlockStored, EventBatch

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date() -> None:
    """docs/events.md is what its program writes."""
    page = runpy.run_path(str(ROOT / "docs" / "make_events_page.py"))["page"]()
    assert (ROOT / "docs" / "events.md").read_text() == page, "run python docs/make_events_page.py"


@pytest.mark.parametrize("name", ["subscriber.py", "subscriber_async.py"])
def test_the_examples_follow_an_engine(name: str) -> None:
    """Each example, as a child process, fetches what was published before and tells how many blocks are held."""
    with Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", release="0.33.0") as publisher:
        for number in range(5):
            event = BlockRemoved((2,)) if number == 4 else BlockStored((number,), None, (), 0)
            publisher.publish(EventBatch(time.time(), (event,)))
        assert publisher.replay_endpoint is not None
        script = str(ROOT / "examples" / "subscriber" / name)
        with subprocess.Popen(
            [sys.executable, script, publisher.endpoint, publisher.replay_endpoint],
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline().strip() for _ in range(5)]
            process.kill()
    assert lines == [
        "#0: 1 blocks held",
        "#1: 2 blocks held",
        "#2: 3 blocks held",
        "#3: 4 blocks held",
        "#4: 3 blocks held",
    ]
