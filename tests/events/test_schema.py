"""Events as values: hash keys and what a field may hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhash.contract import Contract
from kvhash.events import AllBlocksCleared, BlockRemoved, BlockStored, hash_key

DIGEST = bytes(range(8)) + bytes(16) + bytes(range(0xF8, 0x100))


def test_low_64_bits_not_the_head() -> None:
    """The key of a digest is its last eight bytes big-endian, not its first."""
    assert hash_key(DIGEST) == 17940646550795321087
    assert hash_key(DIGEST) != 283686952306183


@given(st.binary(min_size=32, max_size=32))
def test_every_wire_form_gives_one_key(digest: bytes) -> None:
    """Unsigned, signed, 8-byte and whole-digest forms of one hash have the same key."""
    unsigned = int.from_bytes(digest[-8:], "big")
    signed = unsigned - (1 << 64) if unsigned >> 63 else unsigned
    assert {hash_key(form) for form in (unsigned, signed, digest, digest[-8:])} == {unsigned}


@pytest.mark.parametrize("event", [BlockStored, BlockRemoved])
def test_fields_are_those_of_the_newest_release_in_wire_order(event: type) -> None:
    """A field that the table of releases gains must be gained here, in its place."""
    names = [field.name for field in Contract.events_for_vllm("latest").fields(event.__name__)]
    assert list(event.__struct_fields__)[: len(names)] == names


def test_events_are_values() -> None:
    """Events compare by content, cannot be changed, and hash."""
    event = BlockRemoved((1, 2), medium="GPU")
    assert event == BlockRemoved((1, 2), medium="GPU")
    assert len({event, BlockRemoved((1, 2), medium="GPU"), AllBlocksCleared()}) == 2
    with pytest.raises(AttributeError):
        event.medium = "CPU"  # type: ignore[misc]
