"""The subscriber over a faulty line of real sockets: what it finally says is the truth, whatever happened."""

from __future__ import annotations

import pytest

from kvhash.events.records import Batch, Lost

from ..data_files import CAPTURES, capture
from .relay import last_life, run_story

PAYLOADS = [bytes.fromhex(payload) for _t, _s, payload in capture(CAPTURES[1])["frames"]]


def _check(seed: int) -> None:
    truth, records = run_story(seed, PAYLOADS)
    delivered: dict[int, bytes] = {}
    lost: set[int] = set()
    last = -1
    for record in last_life(records):
        if isinstance(record, Batch):
            assert record.seq > last, f"seed {seed}: {record.seq} after {last}"
            last = record.seq
            delivered[record.seq] = record.payload
        elif isinstance(record, Lost):
            numbers = set(range(record.first, record.last + 1))
            assert not numbers & (lost | set(delivered)), f"seed {seed}: {record}"
            lost |= numbers
    final = dict(enumerate(truth[-1]))
    assert all(final.get(seq) == payload for seq, payload in delivered.items()), (
        f"seed {seed}: a former life's batch"
    )
    assert set(delivered) | lost == set(final), f"seed {seed}"


@pytest.mark.parametrize("seed", range(8))
def test_a_faulty_line(seed: int) -> None:
    """Drops, repeats, delays, cuts, stalls and restarts: each batch is delivered once, or lost by name."""
    _check(seed)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_two_hundred_faulty_lines() -> None:
    """The same, 200 times."""
    for seed in range(100, 300):
        _check(seed)
