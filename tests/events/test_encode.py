"""Writing batches byte for byte as each release does."""

from __future__ import annotations

from typing import Any

import pytest

from kvhash.events import (
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventEncodeError,
    batch_from_json,
    batch_to_json,
    decode_batch,
    encode_batch,
)

from .wire import CAPTURES, RELEASES, frames, wire_lines


@pytest.mark.parametrize("release", RELEASES)
def test_reencoding_gives_the_same_bytes(release: str) -> None:
    """Each release's recorded batches are written again byte for byte."""
    for line in wire_lines(release):
        payload = bytes.fromhex(line["payload"])
        assert encode_batch(decode_batch(payload), release) == payload


@pytest.mark.parametrize("name", CAPTURES)
def test_reencoding_a_live_servers_frames(name: str) -> None:
    """A live server's messages are written again byte for byte."""
    for _, _, payload in frames(name):
        assert encode_batch(decode_batch(payload), "0.32.0") == payload


@pytest.mark.parametrize("release", RELEASES)
def test_json_and_back_loses_nothing(release: str) -> None:
    """A batch as JSON reads back as the same batch (its layout becomes the map's)."""
    for line in wire_lines(release):
        payload = bytes.fromhex(line["payload"])
        assert encode_batch(batch_from_json(batch_to_json(decode_batch(payload))), release) == payload


def stored(**fields: Any) -> EventBatch:
    """Return a batch of one store."""
    values: dict[str, Any] = {"block_hashes": (1,), "parent_block_hash": None, "token_ids": (1,)}
    return EventBatch(1.0, (BlockStored(**{**values, "block_size": 1, **fields}),))


@pytest.mark.parametrize(
    ("batch", "release", "code", "at"),
    [
        (stored(block_hashes=(1 << 200,)), "0.10.1", "integer-too-large", "$.events[0].block_hashes"),
        (stored(block_hashes=(b"a" * 32,)), "0.10.1", "hash-form-not-in-release", "$.events[0].block_hashes"),
        (stored(session_id="s"), "0.29.0", "field-not-in-release", "$.events[0].session_id"),
        (stored(cache_salt="s"), "latest", "field-not-in-release", "$.events[0].cache_salt"),
        (EventBatch(1.0, ("x",)), "latest", "invalid-event", "$.events[0]"),  # type: ignore[arg-type]
    ],
)
def test_what_a_release_cannot_write_is_refused(batch: EventBatch, release: str, code: str, at: str) -> None:
    """What that release could not publish is an error that says where, never other bytes."""
    with pytest.raises(EventEncodeError) as caught:
        encode_batch(batch, release)
    assert (caught.value.code, caught.value.at) == (code, at)


def test_newer_fields_can_be_dropped_on_purpose() -> None:
    """With `drop_fields` an older release's shape comes out without them."""
    payload = encode_batch(stored(session_id="s", medium="GPU"), "0.9.2", drop_fields=True)
    assert decode_batch(payload).events[0] == stored().events[0]


@pytest.mark.parametrize("count", [15, 16, 70_000])
def test_many_events_get_wider_heads(count: int) -> None:
    """The list of events reads back at every width of its head."""
    batch = EventBatch(1.0, (BlockRemoved((1,)),) * count, 0, "array")
    assert decode_batch(encode_batch(batch, "0.9.2")) == batch


def test_unknown_and_bad_events_are_written_as_read() -> None:
    """What could not be read goes out as it came."""
    payload = encode_batch(stored(), "0.9.2").replace(b"BlockStored", b"BlockStoreX")
    assert encode_batch(decode_batch(payload), "0.9.2") == payload
