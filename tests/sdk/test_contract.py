"""The table of releases."""

from __future__ import annotations

import dataclasses
import warnings
from itertools import pairwise

import pytest

from kvhash import Contract, NewerReleaseWarning, Release, UnknownReleaseError, changes_between
from kvhash.contract import ALGORITHMS, CHANGES, NEWEST, OLDEST


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.31.0", (0, 31, 0)),
        ("v0.31", (0, 31, 0)),
        ("0.10.1.1", (0, 10, 1)),
        ("0.31.0rc1", (0, 31, 0)),
        ("0.31.1.dev12+g0abc123", (0, 31, 1)),
        ("0.11.0.post1", (0, 11, 0)),
        (" 0.9.2 ", (0, 9, 2)),
    ],
)
def test_releases_are_read(text: str, expected: tuple[int, int, int]) -> None:
    """Patch, pre-release, development and local versions name a release."""
    assert Release.parse(text) == Release(*expected)


@pytest.mark.parametrize("text", ["", "0", "latest?", "0.x", "1,2", "0.31.0-foo bar", "９.9.9x", None, 31])
def test_what_is_no_release_is_refused(text: object) -> None:
    """Anything else is an unknown release, never guessed."""
    with pytest.raises(UnknownReleaseError) as caught:
        Contract.for_vllm(text)  # type: ignore[arg-type]
    assert caught.value.code == "unknown-release"


@pytest.mark.parametrize("text", ["0.9.1", "0.8.5", "0.9.1.post1"])
def test_below_the_oldest_is_refused(text: str) -> None:
    """Before 0.9.2 no hash can be reproduced, and the error says which releases can."""
    with pytest.raises(UnknownReleaseError, match=r"0\.9\.2 to 0\.33\.0"):
        Contract.for_vllm(text)


def test_a_newer_release_works_as_the_newest_and_says_so() -> None:
    """An unknown newer release is hashed as the newest known one, with a warning."""
    with pytest.warns(NewerReleaseWarning, match=r"0\.34\.0 is newer than 0\.33\.0"):
        newer = Contract.for_vllm("0.34.0")
    assert newer.hash_fields() == Contract.for_vllm("latest").hash_fields()
    assert newer.release == Release(0, 34, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Contract.for_vllm("0.33.7").hash_fields() == Contract.for_vllm("0.33.0").hash_fields()


def test_rows_are_in_order_and_change_something() -> None:
    """Rows ascend, none repeats a release, and every row but the first changes the contract before it."""
    since = [change.since for change in CHANGES]
    assert since == sorted(set(since))
    assert since[0] == OLDEST
    assert since[-1] <= NEWEST
    for before, change in pairwise(CHANGES):
        old, new = Contract.for_vllm(before.since), Contract.for_vllm(change.since)
        assert (old.hash_fields(), old.events) != (new.hash_fields(), new.events), change.since


def test_rows_name_real_fields() -> None:
    """A misspelt field of a row would be silently without effect."""
    contract = Contract.for_vllm("latest")
    for change in CHANGES:
        assert set(change.hashes) <= set(contract.hash_fields())
        assert set(change.events) <= {field.name for field in dataclasses.fields(contract.events)}
        assert set(change.hashes.get("algorithms", ())) <= set(ALGORITHMS)


def test_changes_between_releases() -> None:
    """What lies between two releases, in either order; nothing between equal ones."""
    rows = changes_between("0.30.0", "0.33.0")
    assert [str(row.since) for row in rows] == ["0.31.0", "0.33.0"]
    assert changes_between("0.33.0", "0.30.0") == rows
    assert changes_between("0.31.0", "0.31.2") == ()


def test_a_contract_is_a_value() -> None:
    """Contracts compare and hash by what they say, and cannot be changed."""
    assert Contract.for_vllm("0.31.0") == Contract.for_vllm("v0.31")
    assert len({Contract.for_vllm("0.31.0"), Contract.for_vllm("0.31.0"), Contract.for_vllm("0.30.0")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Contract.for_vllm("latest").lookahead = False  # type: ignore[misc]
