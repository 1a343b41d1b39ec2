"""The SDK against what vLLM's own functions and a real vLLM server computed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvhash import KvHashError, answer, parse_request
from kvhash.extra_keys import json_keys

from ..data_files import CAPTURES, RELEASES, capture, hash_cases, hash_results, request_of

ANSWERED = ("none_hash", "block_hashes", "external", "extra_keys")


def test_all_recorded_releases_are_here() -> None:
    """The recorded data covers 19 releases and 357 cases; a lost file would make the tests below pass by absence."""
    assert len(RELEASES) == 19
    assert len(hash_cases()) == 357
    assert len(CAPTURES) == 4


@pytest.mark.parametrize("release", RELEASES)
def test_every_case_of_a_release_is_equal(release: str) -> None:
    """NONE_HASH, block hashes, published values and extra keys equal vLLM's; what it cannot hash is a typed error."""
    rows = hash_results(release)
    assert len(rows) == 357
    answered = 0
    for row in rows:
        request = request_of(hash_cases()[row["id"]], release)
        if "error" in row or row.get("random_root"):
            with pytest.raises(KvHashError) as caught:
                answer(parse_request(request))
            expected = (
                {"unknown-root"}
                if row.get("random_root")
                else {"algorithm-not-in-release", "feature-not-in-release"}
            )
            assert caught.value.code in expected, (row["id"], caught.value)
            continue
        got = answer(parse_request(request))
        assert got == {name: row[name] for name in ANSWERED}, row["id"]
        answered += 1
    assert answered > 50


@pytest.mark.parametrize("release", RELEASES[RELEASES.index("0.31.0") :])
def test_event_extra_keys_are_untagged(release: str) -> None:
    """The keys that events publish equal vLLM's own conversion, from 0.31 where they differ from the hashed ones."""
    compared = 0
    for row in hash_results(release):
        if not row.get("event_extra_keys"):
            continue
        chain = parse_request(request_of(hash_cases()[row["id"]], release)).chain()
        assert [json_keys(keys) for keys in chain.event_extra_keys()] == row["event_extra_keys"], row["id"]
        compared += 1
    assert compared > 100


def _published(run: dict[str, Any]) -> set[str]:
    hashes = set()
    for _topic, _seq, payload in run["frames"]:
        for event in msgspec.msgpack.decode(bytes.fromhex(payload))[1]:
            if event["type"] == "BlockStored":
                hashes |= {
                    value.hex() if isinstance(value, bytes) else str(value) for value in event["block_hashes"]
                }
    return hashes


@pytest.mark.parametrize("name", CAPTURES)
def test_every_published_hash_is_reproduced_from_the_requests(name: str) -> None:
    """Prompt and generated tokens, salt and adapter give every hash that the real server published."""
    run = capture(name)
    ours: set[str] = set()
    for request in run["requests"]:
        if "prompt" not in request:
            continue
        line = {
            "vllm": "0.32.0",
            "algorithm": run["algo"],
            "hash_seed": run["hash_seed"],
            "block_size": run["block_size"],
            "tokens": request["prompt"] + (request["out"] or []),
        }
        if request.get("cache_salt"):
            line["cache_salt"] = request["cache_salt"]
        if request.get("model"):
            line["lora"] = run["lora"]
        result = answer(parse_request(line))
        ours |= {*result["external"], *result["block_hashes"]}
    published = _published(run)
    assert len(published) > 10
    assert published <= ours
