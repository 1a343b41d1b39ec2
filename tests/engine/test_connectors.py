"""KV comes back from host memory and disk as it was saved, or not at all; the scheduler copes with both."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine_ref.connectors import DiskTier, HostTier, Tier, TierConnector, ValkeyTier, make_connector
from engine_ref.connectors.envelope import BadPageError, fingerprint_digest, open_page, seal_page
from engine_ref.core import EngineCore
from engine_ref.events import KVEvent
from engine_ref.request import Request, RequestStatus
from engine_ref.runner import NullRunner, PageMismatchError, ScriptedRunner
from engine_ref.scheduler import SchedulerConfig
from engine_ref.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    GroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kvhash import KvHashError
from kvhash.events.schema import AllBlocksCleared, BlockRemoved, BlockStored

from .connector_engine import HASHER, alone, engine, finish, send, until

PROMPT = list(range(160))
GROUPS: dict[str, tuple[GroupSpec, ...]] = {
    "full": (FullAttentionSpec(block_size=16),),
    "window": (FullAttentionSpec(block_size=16), SlidingWindowSpec(block_size=16, sliding_window=40)),
    "chunked": (
        FullAttentionSpec(block_size=16),
        ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64),
    ),
    "state": (FullAttentionSpec(block_size=16), MambaSpec(block_size=16)),
}


def host(**options: Any) -> TierConnector:
    """Return a connector to host memory."""
    return TierConnector([HostTier(max_bytes=1 << 20)], **options)


def forget(core: EngineCore) -> None:
    """Make the pool forget everything, so that what is hit comes from the connector."""
    assert core.reset_prefix_cache()


# ---- loads


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("load_async", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_the_pool_forgot_is_loaded(
    groups: tuple[GroupSpec, ...], load_async: bool, asynchronous: bool
) -> None:
    """A prefix that the pool has evicted is loaded, not computed, and gives the same tokens."""
    core = engine(host(load_async=load_async), groups=groups, asynchronous=asynchronous)
    first = send(core, "a", PROMPT)
    forget(core)
    second = send(core, "b", PROMPT)
    assert second.output_token_ids == first.output_token_ids == alone(PROMPT)
    assert (second.num_cached_tokens, second.num_external_tokens) == (144, 144)
    stats = core.scheduler.remote.stats
    assert (stats.requests, stats.queries, stats.hits) == (2, 320, 144)
    assert core.scheduler.remote.hits_by_source == {"host": 144}
    assert core.scheduler.cache.pool.num_free_blocks == 79
    core.close()


def test_local_hit_comes_first() -> None:
    """The connector is asked for what follows the local hit, and that is what its metrics count."""
    core = engine(host())
    send(core, "a", PROMPT)
    forget(core)
    send(core, "b", PROMPT[:80], max_tokens=1)
    third = send(core, "c", PROMPT)
    assert (third.num_cached_tokens, third.num_external_tokens) == (144, 64)
    stats = core.scheduler.remote.stats
    assert (stats.queries, stats.hits) == (160 + 80 + 80, 64 + 64)


def test_request_that_skips_the_cache_gets_no_external_tokens() -> None:
    """Prompt logprobs need every token computed: no hit, no external hit, nothing counted; but it is saved."""
    connector = host()
    core = engine(connector)
    send(core, "a", PROMPT, skip_reading_prefix_cache=True)
    forget(core)
    again = send(core, "b", PROMPT, skip_reading_prefix_cache=True)
    assert (again.num_cached_tokens, again.num_external_tokens) == (0, 0)
    assert core.scheduler.remote.stats.queries == core.scheduler.cache.stats.queries == 0
    assert connector.tiers[0].counters["stores"] == 10


def test_whole_prompt_of_4096_tokens_is_loaded_but_for_its_last_block() -> None:
    """Of 4,096 tokens 4,080 are hits, be they local or external."""
    core = engine(host(), num_blocks=300)
    prompt = list(range(4096))
    send(core, "a", prompt)
    assert send(core, "b", prompt).num_cached_tokens == 4080
    forget(core)
    third = send(core, "c", prompt)
    assert (third.num_cached_tokens, third.num_external_tokens) == (4080, 4080)


def test_other_salt_and_other_adapter_load_nothing() -> None:
    """The key of a page is the whole block hash, so what isolates requests isolates their pages."""
    core = engine(host())
    send(core, "a", PROMPT, cache_salt="one")
    forget(core)
    assert send(core, "b", PROMPT, cache_salt="two").num_external_tokens == 0
    assert send(core, "c", PROMPT, lora={"name": "sql", "path": "sql", "id": 1}).num_external_tokens == 0
    forget(core)
    assert send(core, "d", PROMPT, cache_salt="one").num_external_tokens == 144


def test_nothing_is_cached_while_a_load_is_under_way() -> None:
    """The blocks of an asynchronous load can be hit once they are loaded, and the request waits apart till then."""
    core = engine(host(load_async=True))
    send(core, "a", PROMPT)
    forget(core)
    request = Request("b", PROMPT, hasher=HASHER)
    core.add_request(request)
    plan = core.scheduler.schedule()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert plan.total_tokens == 0
    assert core.scheduler.cache.pool.cached_keys == {}
    assert core.scheduler.cache.pool.num_free_blocks == 79 - 9
    core._in_flight.append(plan)
    finish(core)
    assert request.num_external_tokens == 144


def test_long_load_does_not_hold_up_who_is_running() -> None:
    """The pages of a long load are written over several steps, in which another request goes on."""
    core = engine(host(load_async=True), num_blocks=900)
    prompt = list(range(8000))
    send(core, "a", prompt)
    forget(core)
    running = Request("r", [7] * 40, hasher=HASHER, max_tokens=400)
    loading = Request("l", prompt, hasher=HASHER, max_tokens=2)
    core.add_request(running)
    core.step()
    core.add_request(loading)
    written: list[int] = []
    loaded = core.connector.counters  # type: ignore[union-attr]
    while not loading.status.is_finished:
        before = core.runner.pages.writes  # type: ignore[attr-defined]
        core.step()
        written.append(core.runner.pages.writes - before)  # type: ignore[attr-defined]
    assert loaded["loaded_blocks"] == sum(written) == 499
    assert max(written) <= 256
    assert running.num_output_tokens >= len(written) - 1
    assert loading.num_external_tokens == 7984
    core.abort(["r"])
    core.close()


def test_loads_leave_each_other_the_blocks_to_go_on() -> None:
    """A load holds its blocks for good, so others that begin in the same step must leave it what it still needs."""
    core = engine(host(load_async=True), num_blocks=23)
    for number in range(6):
        send(core, f"save{number}", [number] * 17, max_tokens=1)
    forget(core)
    large = Request("large", [0] * 16 + [9] * 310, hasher=HASHER, max_tokens=2)
    small = [Request(f"r{i}", [i] * 16 + [9] * 9, hasher=HASHER, max_tokens=2) for i in range(1, 6)]
    for request in (large, *small):
        core.add_request(request)
    finish(core)
    assert [request.num_external_tokens for request in (large, *small)] == [16] * 6


def test_load_that_is_cut_off_frees_its_blocks() -> None:
    """A client that hangs up during a load leaves nothing behind."""
    core = engine(host(load_async=True))
    send(core, "a", PROMPT)
    forget(core)
    request = Request("b", PROMPT, hasher=HASHER)
    core.add_request(request)
    core._in_flight.append(core.scheduler.schedule())
    assert core.abort(["b"]) == [request]
    assert core.scheduler.cache.pool.num_free_blocks == 79
    finish(core)
    assert core.scheduler.cache.pool.num_free_blocks == 79


@pytest.mark.parametrize("external", [False, True])
def test_reset_says_once_that_all_is_gone(external: bool) -> None:
    """One AllBlocksCleared; with `reset_external` nothing can be loaded afterwards, without it everything."""
    told: list[KVEvent] = []
    core = engine(host(), publish=told.extend)
    send(core, "a", PROMPT)
    assert core.reset_prefix_cache(reset_external=external)
    core.publish_events()
    assert told.count(AllBlocksCleared()) == 1
    assert send(core, "b", PROMPT).num_external_tokens == (0 if external else 144)


def test_reset_under_load() -> None:
    """Refused while a request holds blocks, running or loading; with the running requests both start again."""
    core = engine(host(load_async=True))
    send(core, "a", PROMPT)
    forget(core)
    running = Request("r", [7] * 100, hasher=HASHER, max_tokens=30)
    loading = Request("l", PROMPT, hasher=HASHER)
    core.add_request(running)
    core.step()
    core.add_request(loading)
    core._in_flight.append(core.scheduler.schedule())
    assert loading.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    core.scheduler.take_events()
    assert not core.reset_prefix_cache()
    assert core.reset_prefix_cache(reset_running_requests=True, reset_external=True)
    assert core.scheduler.take_events().count(AllBlocksCleared()) == 1
    finish(core)
    assert loading.num_external_tokens == 0
    assert loading.output_token_ids == alone(PROMPT, max_tokens=16)
    assert running.output_token_ids == alone([7] * 100, max_tokens=30)


# ---- loads that fail


class Lossy(HostTier):
    """Says that it has pages which it then does not give."""

    def __init__(self, lost: Sequence[int], *, fast: bool) -> None:
        super().__init__(max_bytes=1 << 20)
        self.fast = fast  # type: ignore[misc]
        self.lost = set(lost)
        self.asked = 0

    def get(self, key: bytes) -> bytes | None:
        """Lose the pages of these turns."""
        turn, self.asked = self.asked, self.asked + 1
        return None if turn in self.lost else super().get(key)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("load_async", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_failed_load_is_computed_instead(
    groups: tuple[GroupSpec, ...], load_async: bool, asynchronous: bool
) -> None:
    """A page that does not come costs its recomputation: hashes of what was not loaded go, all tokens are right."""
    tier = Lossy([3], fast=not load_async)
    connector = TierConnector([tier], load_async=load_async)
    told: list[KVEvent] = []
    core = engine(connector, groups=groups, asynchronous=asynchronous, publish=told.extend)
    send(core, "a", PROMPT)
    assert connector.flush(timeout=10)
    forget(core)
    requests = [Request(f"r{i}", PROMPT + [i] * 9, hasher=HASHER, max_tokens=20) for i in range(3)]
    for request in requests:
        core.add_request(request)
    finish(core)
    for i, request in enumerate(requests):
        assert request.output_token_ids == alone(PROMPT + [i] * 9, max_tokens=20)
    assert core.scheduler.remote.load_stats.failed_requests > 0
    assert connector.counters["failed_loads"] == 1
    remote = core.scheduler.remote
    assert remote.stats.requests == 4
    assert (
        sum(remote.hits_by_source.values())
        == remote.stats.hits
        <= sum(r.num_external_tokens for r in requests)
    )
    assert not remote._lookups
    assert core.scheduler.cache.pool.num_free_blocks == 79
    gpu = [event for event in told if not isinstance(event, AllBlocksCleared) and event.medium == "GPU"]
    assert any(isinstance(event, BlockRemoved) for event in gpu) is not load_async
    core.close()


@pytest.mark.parametrize("load_async", [False, True])
def test_failed_load_can_end_the_request(load_async: bool) -> None:
    """With vLLM's policy ``fail`` the request ends with an error; the step that finds out says so."""
    tier = Lossy([3], fast=not load_async)
    connector = TierConnector([tier], load_async=load_async, kv_load_failure_policy="fail")
    core = engine(connector)
    send(core, "a", PROMPT)
    assert connector.flush(timeout=10)
    forget(core)
    request = Request("b", PROMPT, hasher=HASHER)
    core.add_request(request)
    ended: list[Request] = []
    while core.has_work:
        result = core.step()
        ended += result.finished
        assert all(r.request_id in result.tokens for r in result.finished)
    assert ended == [request]
    assert request.status is RequestStatus.FINISHED_ERROR
    assert core.scheduler.cache.pool.num_free_blocks == 79


def test_page_of_another_block_is_noticed() -> None:
    """The runner used here refuses KV of other tokens, so these tests cannot pass on pages mixed up."""
    tier = HostTier(max_bytes=1 << 20)
    core = engine(TierConnector([tier]))
    send(core, "a", PROMPT)
    forget(core)
    keys = list(tier._pages)
    tier._pages[keys[0]] = tier._pages[keys[1]]
    with pytest.raises(PageMismatchError, match="group 0 does not hold the KV of its tokens 0 to 16"):
        send(core, "b", PROMPT)


def test_aborted_request_still_fills_the_blocks_that_others_hit() -> None:
    """With async scheduling a request may end before its step has run; who hit its blocks finds them filled."""
    core = engine(asynchronous=True)
    core.add_request(Request("a", PROMPT, hasher=HASHER))
    core.step()
    follower = Request("b", PROMPT, hasher=HASHER, max_tokens=4)
    core.add_request(follower)
    plan = core.scheduler.schedule()
    core._in_flight.append(plan)
    assert plan.new_requests[0].num_computed_tokens == 144
    core.abort(["a"])
    finish(core)
    assert follower.output_token_ids == alone(PROMPT)


# ---- tiers


def test_host_tier_drops_what_was_used_least() -> None:
    """The bound is in bytes, a hit makes a page young again, and what goes is told."""
    tier = HostTier(max_bytes=30)
    tier.bind(b"")
    assert [tier.put(bytes([i]), bytes(10)) for i in range(3)] == [True] * 3
    assert tier.get(b"\0") == bytes(10)
    assert tier.put(b"\3", bytes(10)) is True
    assert tier.put(b"\4", bytes(31)) is None
    assert tier.contains([bytes([i]) for i in range(5)]) == {b"\0", b"\2", b"\3"}
    assert tier.take_changes()[-1] == (b"\1", False)
    assert tier.num_bytes == 30


@pytest.fixture
def disk(tmp_path: Path) -> DiskTier:
    """Return a bound disk tier."""
    tier = DiskTier(path=tmp_path, max_bytes=10_000)
    tier.bind(b"f" * 16)
    return tier


def key(number: int) -> bytes:
    """Return a key of the right length."""
    return number.to_bytes(36, "big")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda data: data[:-1], "truncated"),
        (lambda data: data[:30], "truncated"),
        (lambda data: b"", "truncated"),
        (lambda data: bytes(len(data)), "corrupt"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "corrupt"),
        (lambda data: data + b"x", "corrupt"),
        (lambda data: b"#!/bin/sh\n" + data, "corrupt"),
        (lambda data: seal_page(key(2), b"page", fingerprint=b"f" * 16), "foreign"),
        (lambda data: seal_page(key(1), b"page", fingerprint=b"g" * 16), "foreign"),
    ],
)
def test_bad_file_is_never_loaded(disk: DiskTier, spoil: Any, reason: str) -> None:
    """A truncated, corrupt or foreign file is a miss, counted as what it is, removed, and told."""
    assert disk.put(key(1), b"page" * 100) is True
    path = next(disk.path.rglob("*.kv"))
    path.write_bytes(spoil(path.read_bytes()))
    assert disk.get(key(1)) is None
    assert disk.counters[reason] == 1
    assert not path.exists()
    assert disk.take_changes() == [(key(1), True), (key(1), False)]
    assert disk.num_bytes == 0
    assert disk.put(key(1), b"page") is True
    assert disk.get(key(1)) == b"page"


def test_file_that_vanished_is_a_miss(disk: DiskTier) -> None:
    """Somebody may clean the directory while the engine runs."""
    disk.put(key(1), b"page")
    next(disk.path.rglob("*.kv")).unlink()
    assert disk.get(key(1)) is None
    assert disk.counters["vanished"] == 1


def test_restart_finds_whole_blocks_only(tmp_path: Path) -> None:
    """After a crash the files are there, what was being written is not, and the bound still holds."""
    tier = DiskTier(path=tmp_path, max_bytes=1200)
    tier.bind(b"f" * 16)
    for number in range(3):
        tier.put(key(number), bytes(300))
        os.utime(next(tmp_path.rglob(f"{key(number).hex()}.kv")), (number, number))
    leftover = tmp_path / (b"f" * 16).hex() / f"{key(9).hex()}.7.tmp"
    leftover.write_bytes(b"half")
    tier.close()
    again = DiskTier(path=tmp_path, max_bytes=900)
    assert again.bind(b"f" * 16) == [key(1), key(2)]  # the oldest went
    assert not leftover.exists()
    assert again.counters["leftovers"] == 1
    assert again.get(key(2)) == bytes(300)
    other = DiskTier(path=tmp_path, max_bytes=900)
    assert other.bind(b"g" * 16) == []
    with pytest.raises(KvHashError, match="another engine"):
        DiskTier(path=tmp_path, max_bytes=900).bind(b"f" * 16)


def test_killed_engine_leaves_whole_blocks_only(tmp_path: Path) -> None:
    """After kill -9 in the middle of writing every file that is found is whole, and the directory is free again."""
    code = (
        "import itertools, sys\n"
        "from engine_ref.connectors import DiskTier\n"
        "tier = DiskTier(path=sys.argv[1], max_bytes=10**9)\n"
        "tier.bind(b'f' * 16)\n"
        "for number in itertools.count():\n"
        "    tier.put(number.to_bytes(36, 'big'), number.to_bytes(8, 'big') * 20_000)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    try:
        until(lambda: len(list(tmp_path.rglob("*.kv"))) >= 20)
    finally:
        writer.kill()
        writer.wait(10)
    tier = DiskTier(path=tmp_path, max_bytes=10**9)
    found = tier.bind(b"f" * 16)
    assert len(found) >= 20
    for name in found:
        assert tier.get(name) == name[-8:] * 20_000
    assert not list(tmp_path.rglob("*.tmp"))


def test_disk_that_is_full_costs_hits_only(disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """No space: room is made once; if that does not help the disk is left alone, and nothing half-written stays."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    disk.put(key(1), bytes(100))
    monkeypatch.setattr(os, "fsync", full)
    assert disk.put(key(2), bytes(100)) is None
    assert disk.counters["no_space"] == 2
    assert disk.counters["evictions"] == 1
    assert disk.put(key(3), bytes(100)) is None
    assert disk.counters["skipped"] == 1
    assert [path.name for path in disk.path.rglob("*.*")] == []


def test_file_size_limit_of_the_system_is_a_full_disk(tmp_path: Path) -> None:
    """A real refusal of the kernel in the middle of a file: nothing of it stays, and the tier says why."""
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from engine_ref.connectors import DiskTier\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "tier = DiskTier(path=sys.argv[1], max_bytes=10**9)\n"
        "tier.bind(b'f' * 16)\n"
        "assert tier.put(b'k' * 36, bytes(100_000)) is None\n"
        "assert tier.counters['no_space'] == 1, tier.counters\n"
        "assert not [p for p in Path(sys.argv[1]).rglob('*') if p.suffix], 'a half-written file stays'\n"
        "assert tier.get(b'k' * 36) is None\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_envelope_gives_back_what_it_sealed() -> None:
    """A page comes back only under its own key and fingerprint."""
    digest = fingerprint_digest("model")
    data = seal_page(b"key", b"page", fingerprint=digest)
    assert open_page(data, b"key", fingerprint=digest) == b"page"
    for wrong, fingerprint in ((b"kex", digest), (b"key", fingerprint_digest("other")), (b"keyy", digest)):
        with pytest.raises(BadPageError):
            open_page(data, wrong, fingerprint=fingerprint)


# ---- the connector over tiers


def test_disk_survives_the_engine(tmp_path: Path) -> None:
    """A second engine with the same directory loads what the first saved, and tells what it found there."""
    first = engine(TierConnector([DiskTier(path=tmp_path, max_bytes=1 << 20)]))
    tokens = send(first, "a", PROMPT).output_token_ids
    first.close()
    told: list[KVEvent] = []
    second = engine(TierConnector([DiskTier(path=tmp_path, max_bytes=1 << 20)]), publish=told.extend)
    request = send(second, "a", PROMPT)
    assert request.output_token_ids == tokens
    assert request.num_external_tokens == 144
    assert second.scheduler.remote.hits_by_source == {"disk": 144}
    found = [e for e in told if isinstance(e, BlockStored) and e.medium == "STORAGE"]
    assert {(e.token_ids, e.block_size) for e in found[:10]} == {((), 0)}
    second.close()


def test_disk_of_another_runner_is_foreign(tmp_path: Path) -> None:
    """A page is never handed to a runner with another fingerprint."""
    first = engine(TierConnector([DiskTier(path=tmp_path, max_bytes=1 << 20)]))
    send(first, "a", PROMPT)
    first.close()
    second = engine(TierConnector([DiskTier(path=tmp_path, max_bytes=1 << 20)]), vocab_size=100)
    assert send(second, "a", PROMPT).num_external_tokens == 0
    second.close()


@pytest.mark.parametrize("load_async", [None, False])
def test_truncated_block_file_is_recomputed(tmp_path: Path, load_async: bool | None) -> None:
    """Tokens are right, the counters say what happened, and the block is saved again."""
    connector = TierConnector([DiskTier(path=tmp_path, max_bytes=1 << 20)], load_async=load_async)
    core = engine(connector)
    send(core, "a", PROMPT)
    assert connector.flush(timeout=10)
    forget(core)
    for path in list(tmp_path.rglob("*.kv"))[:4]:
        path.write_bytes(path.read_bytes()[:-1])
    request = send(core, "b", PROMPT)
    assert request.output_token_ids == alone(PROMPT)
    assert request.num_external_tokens < 144
    assert connector.flush(timeout=10)
    stats = core.connector_stats()
    assert stats["disk"]["truncated"] >= 1
    assert stats["connector"]["failed_loads"] == 1
    forget(core)
    for number in range(4):  # each load finds some of what is broken
        send(core, f"c{number}", PROMPT)
        assert connector.flush(timeout=10)
        forget(core)
    assert send(core, "d", PROMPT).num_external_tokens == 144
    core.close()


def test_full_disk_leaves_requests_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests finish with the right tokens; what could not be kept is counted."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    connector = TierConnector([DiskTier(path=tmp_path, max_bytes=1 << 20)])
    core = engine(connector)
    assert send(core, "a", PROMPT).output_token_ids == alone(PROMPT)
    assert connector.flush(timeout=10)
    assert core.connector_stats()["disk"]["no_space"] >= 1
    forget(core)
    assert send(core, "b", PROMPT).output_token_ids == alone(PROMPT)
    core.close()


def test_host_before_disk(tmp_path: Path) -> None:
    """What host memory has lost comes from disk, is told as such, and is in host memory again."""
    memory = HostTier(max_bytes=128 * 6)
    connector = TierConnector([memory, DiskTier(path=tmp_path, max_bytes=1 << 20)])
    core = engine(connector)
    send(core, "a", PROMPT[:65], max_tokens=1)
    assert connector.flush(timeout=10)
    send(core, "b", [9] * 97, max_tokens=1)  # six blocks, which fill the host tier
    forget(core)
    assert send(core, "c", PROMPT[:65]).num_external_tokens == 64
    assert core.scheduler.remote.hits_by_source == {"disk": 64}
    forget(core)
    assert send(core, "d", PROMPT[:65]).num_external_tokens == 64
    assert core.scheduler.remote.hits_by_source == {"disk": 64, "host": 64}
    core.close()


def test_events_follow_the_tiers(tmp_path: Path) -> None:
    """Stores carry tokens, parent and medium; an index kept from them is what the tiers hold."""
    memory = HostTier(max_bytes=128 * 12)
    storage = DiskTier(path=tmp_path, max_bytes=4000)
    told: list[KVEvent] = []
    connector = TierConnector([memory, storage])
    core = engine(connector, publish=told.extend)
    for number in range(4):
        send(core, f"r{number}", [number] * 100)
        assert connector.flush(timeout=10)
    core.close()
    stored = {e.block_hashes: e for e in told if isinstance(e, BlockStored) and e.medium == "GPU"}
    index: dict[str | None, set[Any]] = {"CPU": set(), "STORAGE": set(), "GPU": set()}
    for event in told:
        assert not isinstance(event, AllBlocksCleared)
        if isinstance(event, BlockRemoved):
            index[event.medium] -= set(event.block_hashes)
        else:
            index[event.medium] |= set(event.block_hashes)
            if event.medium != "GPU":
                assert event.locality == "LOCAL"
                assert (len(event.token_ids), event.block_size) == (16, 16)
                assert event.group_idx == 0
    low = {
        tier: {int.from_bytes(k[:-4][-8:], "big") for k in keys}
        for tier, keys in (("CPU", memory._pages), ("STORAGE", storage._files))
    }
    assert index["CPU"] == low["CPU"]
    assert index["STORAGE"] == low["STORAGE"]
    assert 0 < len(low["CPU"]) <= 12
    assert stored


def test_consumer_saves_nothing_and_producer_loads_nothing(tmp_path: Path) -> None:
    """``kv_role`` says which way pages go."""
    for role, stores, external in (("kv_producer", 10, 0), ("kv_consumer", 0, 144), ("kv_both", 0, 144)):
        connector = make_connector(
            {
                "kv_connector": "TierConnector",
                "kv_role": role,
                "kv_connector_extra_config": {
                    "tiers": [{"type": "disk", "path": str(tmp_path), "max_bytes": 1 << 20}]
                },
            }
        )
        core = engine(connector)
        assert send(core, "a", PROMPT).num_external_tokens == external
        core.close()
        assert core.connector_stats()["disk"].get("stores", 0) == stores


class Raising(HostTier):
    """Raises what no tier may, once it is bound."""

    def __init__(self, *, fast: bool) -> None:
        super().__init__(max_bytes=1 << 20)
        self.fast = fast  # type: ignore[misc]

    def contains(self, keys: Sequence[bytes]) -> set[bytes]:
        """Raise."""
        raise ValueError("contains")

    def get(self, key: bytes) -> bytes | None:
        """Raise."""
        raise ValueError("get")

    def put(self, key: bytes, page: bytes) -> bool | None:
        """Raise."""
        raise ValueError("put")

    def clear(self) -> bool:
        """Raise."""
        raise ValueError("clear")


@pytest.mark.parametrize("fast", [False, True])
def test_whatever_a_tier_raises_is_a_miss(fast: bool) -> None:
    """A tier that raises in every call costs hits only; it is counted, and a reset says that it failed."""
    connector = TierConnector([Raising(fast=fast)])
    core = engine(connector)
    for name in "ab":
        assert send(core, name, PROMPT).output_token_ids == alone(PROMPT)
        assert connector.flush(timeout=10)
        forget(core)
    assert core.connector_stats()["host"]["exceptions"] > 2
    assert not core.reset_prefix_cache(reset_external=True)
    core.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hidden@127.0.0.1:1",
        "redis://me:hid:hidden@127.0.0.1:1/0",
        "redis://127.0.0.1:1?password=hidden",
        "redis://127.0.0.1:1?password=a@hidden",
        "redis://:hid/hidden@127.0.0.1:1",
        "redis://me:hidden/x@127.0.0.1:1",
        "http://:hidden@127.0.0.1",
        "redis://:a://hidden@127.0.0.1:1",
        "hidden",
    ],
)
def test_no_message_holds_the_servers_password(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the log of a server that is away nor the error of a bad URL has user, password or options."""
    pytest.importorskip("redis")
    try:
        tier = ValkeyTier(url=url)
    except KvHashError as error:
        assert "hidden" not in str(error)  # noqa: PT017
    else:
        tier.bind(b"x")
        assert tier.get(b"key") is None
        assert "does not answer" in caplog.text
    assert "hidden" not in caplog.text


# ---- configuration

TIERS = {"tiers": [{"type": "host", "max_bytes": 1}]}


@pytest.mark.parametrize(
    ("config", "at"),
    [
        ({}, "$"),
        ({"kv_connector": "NixlConnector", "kv_role": "kv_both"}, "$.kv_connector"),
        ({"kv_connector": "TierConnector"}, "$"),
        ({"kv_connector": "TierConnector", "kv_role": "both"}, "$.kv_role"),
        ({"kv_connector": "TierConnector", "kv_role": "kv_both", "port": 1}, "$"),
        ({"kv_connector": "TierConnector", "kv_role": "kv_both"}, "$.kv_connector_extra_config"),
        ({"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}, "$.kv_connector_extra_config"),
    ],
)
def test_bad_configuration_says_where(config: dict[str, Any], at: str) -> None:
    """What is not known or missing is a typed error with its path."""
    with pytest.raises(KvHashError) as caught:
        make_connector(config)
    assert (caught.value.code, caught.value.at) == ("invalid-request", at)


@pytest.mark.parametrize(
    ("extra", "at"),
    [
        ({"tiers": []}, ".tiers"),
        ({"tiers": [{"type": "tape"}]}, ".tiers[0].type"),
        ({"tiers": [{"type": "host"}]}, ".tiers[0]"),
        ({"tiers": [{"type": "host", "max_bytes": 0}]}, ".tiers[0].max_bytes"),
        ({"tiers": [{"type": "host", "max_bytes": 1, "bytes": 2}]}, ".tiers[0]"),
        ({"tiers": [{"type": "host", "max_bytes": 1}, {"type": "host", "max_bytes": 1}]}, ".tiers[1].name"),
        ({**TIERS, "load_async": 3}, ".load_async"),
        ({**TIERS, "close_timeout": float("nan")}, ".close_timeout"),
        ({**TIERS, "max_pending_bytes": -1}, ".max_pending_bytes"),
        ({"tiers": [{"type": "disk", "path": "", "max_bytes": 1}]}, ".tiers[0].path"),
        *(
            ({"tiers": [{"type": "valkey", "url": "redis://x", "timeout": seconds}]}, ".tiers[0].timeout")
            for seconds in (0, -1, 1e300, float("nan"), float("inf"))
        ),
        *(
            ({"tiers": [{"type": "valkey", "url": "redis://x", "ttl_seconds": ttl}]}, ".tiers[0].ttl_seconds")
            for ttl in (0, -5)
        ),
    ],
)
def test_bad_tiers_say_where(extra: dict[str, Any], at: str) -> None:
    """The path goes into the connector's own part."""
    config = {"kv_connector": "TierConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    with pytest.raises(KvHashError) as caught:
        make_connector(config)
    assert caught.value.at == f"$.kv_connector_extra_config{at}"


def test_offloading_connector_is_a_host_tier() -> None:
    """VLLM's name and option for offloading to host memory work."""
    connector = make_connector(
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 4096},
        }
    )
    assert isinstance(connector, TierConnector)
    tier: Tier = connector.tiers[0]
    assert isinstance(tier, HostTier)
    assert tier.max_bytes == 4096


def test_connector_needs_pages() -> None:
    """A runner without pages cannot serve a connector, and that is said at the start."""
    config: SchedulerConfig = engine().scheduler.config
    with pytest.raises(TypeError, match="no pages"):
        EngineCore(config, ScriptedRunner({}), connector=host())
    with pytest.raises(RuntimeError, match="keeps no pages"):
        NullRunner().read_page(0, 1)
