"""Write docs/events.md: the wire format of every release, from the contract table, and how streams behave."""

from __future__ import annotations

from pathlib import Path

from kvhash.contract import CHANGES, Contract, EventContract, EventField

HEAD = """# KV events

Written by `python docs/make_events_page.py` from the contract table.

## On the wire

A publisher sends messages of three frames: topic, sequence number (8 bytes, big-endian), payload. The payload is msgpack:
`[ts, [event, ...], data_parallel_rank]`, one batch an engine step; the rank may be missing or nil. Each event is an array
whose first element is its tag, every field of the release following in order, or a map with a `type` key in which optional
fields that are nil are left out. `AllBlocksCleared` has no fields.

A block hash is an unsigned 64-bit integer (the low 64 bits of the digest), or the digest's bytes where the engine runs with
`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0` (from 0.10.2). `kvhash.events.hash_key` makes one comparable key of each form.

| from vLLM | layout | BlockStored | BlockRemoved | replay reply |
|---|---|---|---|---|
"""

TAIL = """
Fields in *italics* are optional: a map leaves them out when they are nil.

kvhash decodes all of these, mixtures of them in one batch, and SGLang's shapes (a `cache_salt` field, token pairs of EAGLE,
a metadata map). Unknown fields and tags are kept. An event that cannot be read becomes an `UndecodableEvent` in its place,
with the path of what was wrong; the rest of the batch is not lost. A field is never guessed from its value's type.

## Replay

A client sends the first sequence number that it wants (8 bytes, big-endian) to the replay socket, behind an empty delimiter
frame (DEALER: `["", start]`). The answers come in order and end with the number -1; see the table for their frames. The
publisher keeps the last `buffer_steps` batches. kvhash reads both framings, whatever the release.

## Who binds

A publisher binds to an endpoint with a wildcard (`tcp://*:5557`, `tcp://[::]:5557`), to `ipc://` and `inproc://`, and
connects to any other (`tcp://127.0.0.1:5557`): a subscriber that connects there too meets nobody. Data parallel rank r
publishes on the port plus r, and replays likewise; `inproc://name` becomes `inproc://name_dp<r>`.

## What a subscriber yields

| record | meaning |
|---|---|
| `Batch` | one batch, in order of its publisher's numbers; `replayed` says that it came by replay |
| `Gap` | numbers `first` to `last` are missing; newer batches are held back meanwhile |
| `Recovered` | the missing batches were delivered, just before this record |
| `Lost` | they will not come, and why: `no-replay`, `not-in-buffer`, `no-answer`, `overflow` |
| `Restart` | the publisher began anew; what it held before is gone |
| `Stale` | a message came after it was given up, or is of a former life; it is not delivered. Where there is a replay the publisher is asked, and what comes meanwhile waits for the answer |
| `Confirmed` | the publisher was asked and is in the life that is followed; numbers of a `Gap` that are still missing were never published |
| `Unconfirmed` | the publisher may be in another life: it was asked and did not answer, or its answer lacked what had come from it; batches are delivered all the same, it is asked again after ever longer pauses (what comes waits up to `replay_timeout` for the answer), and `Confirmed` or `Restart` follows |
| `BadMessage` | a message that is no batch |

A replayed batch is delivered before newer live ones, so a block that was removed meanwhile is never resurrected. A publisher
is known by its endpoint and the rank in its batches, so two behind one socket are told apart. A restart is told from a late or
repeated message by the batches' own times and contents, and where there is a replay by what the publisher has: an answer is of one life, so one
with a batch that was delivered is of the life that is followed, whatever the times in it (a clock may be set back), and one that ends before what
was delivered is of another. After ten
seconds of silence, and after every new connection, the replay socket is asked whether the newest messages were missed and whether
the publisher is still in the life that is followed.

`AllBlocksCleared` is published at the engine's next step, so an idle engine that was reset says so only then.

## Reading batches fast

`kvhash.events.decode_batch` gives frozen values that can be compared, changed and written again. A consumer that sees every event
of a fleet and needs few of its fields takes `decode_raw` (in a loop: `decode = raw_decoder()`): with the native module a `RawBatch` is
the payload, checked as a whole, and fields, hashes and token ids are decoded when they are looked at; token ids are never copied
unasked. It is a type beside `EventBatch` because that is msgspec's own, with msgspec's equality, `replace` and encoding, which a lazy type in
its place would not have. Both read the same from every payload and refuse the same ones in the same words; `decode()` of a raw batch or
event gives the other form. Their `repr` puts `Raw` before the decoded type's
name: a `RawBatch` shows as `RawEventBatch(...)`, a `RawStored` as `RawBlockStored(...)`. `benchmarks/bench_events.py` compares.

```python
from kvhash.events import RawStored, raw_decoder

decode = raw_decoder()
for event in decode(payload).events:
    if isinstance(event, RawStored):
        for block_hash, parent, tokens in event.blocks():  # tokens: a view
            ...
```

## Recordings

`kvevents record` appends raw messages with their receive time, endpoint and rank to a file; every record is checksummed, a
file cut at any byte loses at most the cut record, and a small index beside it lets `--from-seq` pass over what it does not
need. The format is described in `sdk/python/kvhash/events/recording.py`.
"""


def _fields(fields: tuple[EventField, ...], before: tuple[EventField, ...]) -> str:
    new = fields[len(before) :]
    names = ", ".join(f"*{field.name}*" if field.optional else field.name for field in new)
    return names if not before else (f"+ {names}" if new else "〃")


def _replay(contract: EventContract) -> str:
    return '`["", topic, seq, payload]`' if contract.replay_topic_frame else '`["", seq, payload]`'


def page() -> str:
    """Return the page."""
    rows = []
    before: EventContract | None = None
    for change in CHANGES:
        events = Contract.events_for_vllm(change.since)
        if before is not None and (events.layout, events.block_stored, events.block_removed) == (
            before.layout,
            before.block_stored,
            before.block_removed,
        ):
            continue
        stored = _fields(events.block_stored, before.block_stored if before else ())
        removed = _fields(events.block_removed, before.block_removed if before else ())
        since = f"{change.since} and older" if before is None else str(change.since)
        rows.append(f"| {since} | {events.layout} | {stored} | {removed} | {_replay(events)} |")
        before = events
    return HEAD + "\n".join(rows) + "\n" + TAIL


if __name__ == "__main__":
    Path(__file__).with_name("events.md").write_text(page())
