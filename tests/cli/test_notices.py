"""What commands print of the records that are no batches."""

from __future__ import annotations

import json

import pytest

from kvhash.events import records
from kvhash.events.records import (
    BadMessage,
    Confirmed,
    Gap,
    Lost,
    Record,
    Recovered,
    Restart,
    Stale,
    Unconfirmed,
)
from kvhash_cli.stream import notice_record, notice_text

BIG = (1 << 64) - 2
NOTICES: list[Record] = [
    Gap("e", 1, 3, BIG),
    Recovered("e", 1, 3, BIG),
    Lost("e", 1, 3, BIG, "no-replay"),
    Restart("e", 1, BIG),
    Stale("e", 1, BIG),
    Confirmed("e", 1, BIG),
    Unconfirmed("e", 1),
    BadMessage("e", 1, BIG, 5, "a message of 2 frames", ()),
]


@pytest.mark.parametrize("notice", NOTICES, ids=lambda notice: type(notice).__name__)
def test_a_notice_has_words_and_a_line(notice: Record) -> None:
    """The words name the publisher; the line names the kind, and its numbers are strings, as they have 64 bits."""
    assert notice_text(notice).startswith("e rank 1: ")
    line = json.loads(json.dumps(notice_record(notice)))
    assert line.pop("record") == type(notice).__name__.lower()
    assert (line.pop("v"), line.pop("endpoint"), line.pop("rank")) == (1, "e", 1)
    assert str(BIG) in line.values() or isinstance(notice, Unconfirmed)
    assert all(isinstance(value, str) for value in line.values())


def test_no_kind_of_notice_is_missing() -> None:
    """Every record but a batch stands above, and each has words of its own."""
    kinds = {type(notice).__name__ for notice in NOTICES}
    assert kinds == set(records.__all__) - {"Batch", "Record"}
    assert len({notice_text(notice) for notice in NOTICES}) == len(NOTICES)
