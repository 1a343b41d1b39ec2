"""Fuzz decode_batch: any bytes give a batch or EventDecodeError, and a batch can be written again or is refused.

Run as ``python tests/fuzz/fuzz_decode.py CORPUS_FOLDER -max_total_time=60``; needs atheris.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["kvhash"]):
    from kvhash.contract import Contract
    from kvhash.events import EventDecodeError, EventEncodeError, UndecodableEvent, UnknownEvent
    from kvhash.events.decode import decode_batch
    from kvhash.events.encode import encode_batch

NEWEST = Contract.events_for_vllm("latest")


def one(data: bytes) -> None:
    """Decode, and what was decoded whole must mean the same after it was written and read again."""
    try:
        batch = decode_batch(data)
    except EventDecodeError:
        return
    if batch.extra or any(
        isinstance(event, (UnknownEvent, UndecodableEvent)) or event.extra for event in batch.events
    ):
        return
    try:
        again = decode_batch(encode_batch(batch, NEWEST))
    except EventEncodeError:
        return  # SGLang's own field
    if batch.ts == batch.ts:  # not NaN
        assert again.events == batch.events, (batch, again)
        assert (again.ts, again.data_parallel_rank) == (batch.ts, batch.data_parallel_rank)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
