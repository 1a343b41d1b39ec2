"""Granularities with several KV cache groups and context parallelism; forms of a hash."""

from __future__ import annotations

from typing import Any

import pytest

from kvhash import (
    BlockHashView,
    InvalidBlockSizeError,
    InvalidHashError,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
    parse_hash,
    resolve_block_sizes,
)
from kvhash.block_hash import external_hash, to_signed, to_unsigned


@pytest.mark.parametrize(
    ("groups", "options", "hash_size", "scheduler_size"),
    [
        ([16], {}, 16, 16),
        ([16], {"decode_context_parallel_size": 2}, 32, 32),
        ([16, 64], {}, 16, 64),
        ([32, 48], {}, 16, 96),
        ([32, 48], {"hash_block_size": 8}, 8, 96),
        ([16, 768], {}, 16, 768),
        ([16, 64], {"decode_context_parallel_size": 2, "unscaled_groups": [1]}, 32, 64),
    ],
)
def test_hashes_at_the_gcd_hits_at_the_lcm(
    groups: list[int], options: dict[str, Any], hash_size: int, scheduler_size: int
) -> None:
    """VLLM's rules for one group, several, an override, and groups that context parallelism leaves alone."""
    sizes = resolve_block_sizes(groups, **options)
    assert (sizes.hash_block_size, sizes.scheduler_block_size) == (hash_size, scheduler_size)
    assert all(sizes.factor(i) * hash_size == size for i, size in enumerate(sizes.groups))


@pytest.mark.parametrize(
    ("groups", "options"),
    [
        ([], {}),
        ([0], {}),
        ([16, -16], {}),
        ([16, 24], {"hash_block_size": 16}),
        ([32], {"hash_block_size": 16}),
        ([True], {}),
    ],
)
def test_sizes_that_do_not_fit_are_refused(groups: list[int], options: dict[str, Any]) -> None:
    """No group, a size of none, an override that divides not all: typed errors."""
    with pytest.raises(InvalidBlockSizeError):
        resolve_block_sizes(groups, **options)


def test_a_view_behaves_as_a_list() -> None:
    """Indexing, slices, negative indices and bounds of a coarser view."""
    view = BlockHashView([bytes([i]) * 32 for i in range(7)], 2)
    assert [value[0] for value in view] == [1, 3, 5]
    assert view[-1] == view[2] == bytes([5]) * 32
    assert view[0:2] == [bytes([1]) * 32, bytes([3]) * 32]
    assert bytes([5]) * 32 in view
    for index in (3, -4):
        with pytest.raises(IndexError):
            view[index]
    for factor in (0, True, 1.5):
        with pytest.raises(InvalidBlockSizeError):
            BlockHashView([], factor)  # type: ignore[arg-type]


def test_group_ids_are_four_bytes_behind_the_digest() -> None:
    """BlockHashWithGroupId is the digest and the group id, big-endian; two groups share the digest."""
    digest = bytes(range(32))
    key = make_block_hash_with_group_id(digest, 258)
    assert key == digest + b"\x00\x00\x01\x02"
    assert (get_block_hash(key), get_group_id(key)) == (digest, 258)
    assert key != make_block_hash_with_group_id(digest, 0)
    for group in (-1, 1 << 32):
        with pytest.raises(InvalidHashError):
            make_block_hash_with_group_id(digest, group)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10362225831949560093", 10362225831949560093),
        (str(10362225831949560093 - (1 << 64)), 10362225831949560093),
        (-1, (1 << 64) - 1),
        ({"int": "42"}, 42),
        ({"bytes": "00" * 16}, bytes(16)),
        ("ab" * 32, b"\xab" * 32),
        ("0x" + "00" * 16, bytes(16)),
        ("00" * 32, bytes(32)),
        (b"\x01" * 16, b"\x01" * 16),
    ],
)
def test_observed_hashes_are_read(text: Any, expected: int | bytes) -> None:
    """Decimal, signed decimal, hex, and the JSON forms of request lines."""
    assert parse_hash(text) == expected


@pytest.mark.parametrize(
    "text", ["", "xyz", "abc", True, None, 1.5, b"1", [], {"int": "x"}, "-9223372036854775809"]
)
def test_what_is_no_hash_is_refused(text: Any) -> None:
    """Anything else is a typed error."""
    with pytest.raises(InvalidHashError):
        parse_hash(text)


def test_signed_and_unsigned_are_one_key() -> None:
    """A consumer's int64 and vLLM's uint64 convert into each other without loss."""
    for value in (0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1):
        assert to_unsigned(to_signed(value)) == value
        assert -(1 << 63) <= to_signed(value) < 1 << 63


def test_an_integer_chain_has_no_bytes_form() -> None:
    """Before 0.10.2 vLLM publishes its integer as it is, and nothing else."""
    assert external_hash(1 << 200) == 1 << 200
    with pytest.raises(InvalidHashError):
        external_hash(5, "bytes")
