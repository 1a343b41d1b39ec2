"""Engines share KV through a Valkey server, and do without it when it is away: against a real server."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from engine_ref.connectors import HostTier, TierConnector, ValkeyTier, make_connector
from engine_ref.connectors.envelope import seal_page
from engine_ref.core import EngineCore
from engine_ref.events import KVEvent
from engine_ref.request import Request
from engine_ref.scheduler import StepPlan
from kvhash import KvHashError
from kvhash.events.schema import BlockRemoved, BlockStored

from .connector_engine import HASHER, alone, engine, finish, send, until
from .valkey_server import PROGRAM, Server

PROMPT = list(range(160))

if PROGRAM is None and os.environ.get("KVHASH_REQUIRE_ALL") != "1":
    pytest.skip("neither valkey-server nor redis-server is installed", allow_module_level=True)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Run a server."""
    running = Server(tmp_path)
    running.start()
    yield running
    running.kill()


def shared(server: Server, *, timeout: float = 0.5) -> TierConnector:
    """Return a connector to the server, as its configuration makes it."""
    connector = make_connector(
        {
            "kv_connector": "TierConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "tiers": [{"type": "valkey", "url": server.url, "timeout": timeout}]
            },
        }
    )
    assert isinstance(connector, TierConnector)
    return connector


def saved(core: EngineCore) -> None:
    """Wait until what an engine computed is on the server."""
    assert isinstance(core.connector, TierConnector)
    assert core.connector.flush(timeout=10)


def test_second_engine_computes_only_what_the_first_did_not(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines, one server: the second loads the shared prefix and computes the rest, with the same tokens."""
    told: list[KVEvent] = []
    first, second = engine(shared(server), publish=told.extend), engine(shared(server))
    send(first, "a", PROMPT)
    saved(first)
    longer = PROMPT + [5] * 50
    computed: list[int] = []
    execute = second.runner.execute

    def count(plan: StepPlan, requests: Mapping[str, Request]) -> dict[str, list[int]]:
        computed.append(plan.total_tokens)
        return execute(plan, requests)

    monkeypatch.setattr(second.runner, "execute", count)
    request = send(second, "b", longer)
    assert request.output_token_ids == alone(longer)
    assert (request.num_cached_tokens, request.num_external_tokens) == (160, 160)
    assert sum(computed) == 50 + 3
    assert second.scheduler.remote.hits_by_source == {"external_unspecified": 160}
    saved(second)
    # And back: the first loads what the second added.
    assert send(first, "c", longer).num_cached_tokens == 208
    first.publish_events()
    stored = [e for e in told if isinstance(e, BlockStored) and e.medium == "STORAGE"]
    assert {e.locality for e in stored} == {"REMOTE"}
    assert not [e for e in told if isinstance(e, BlockRemoved)]
    first.close()
    second.close()


def test_other_fingerprint_shares_nothing(server: Server) -> None:
    """Engines of another model on the same server do not see each other's pages, whatever the hashes."""
    first, second = engine(shared(server)), engine(shared(server), vocab_size=100)
    send(first, "a", PROMPT)
    saved(first)
    assert send(second, "b", PROMPT).num_external_tokens == 0
    first.close()
    second.close()


def test_killed_server_costs_hits_only(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Requests finish with the right tokens while it is away, said once in the log; it is used again later."""
    core = engine(shared(server))
    send(core, "a", PROMPT)
    saved(core)
    server.kill()
    assert core.reset_prefix_cache()
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            prompt = [*PROMPT, number]
            request = send(core, f"b{number}", prompt)
            assert request.output_token_ids == alone(prompt)
            saved(core)
            assert core.reset_prefix_cache()
    assert len([r for r in caplog.records if "does not answer" in r.message]) == 1
    stats = core.connector_stats()["valkey"]
    assert stats["errors"] >= 1
    assert stats["skipped"] >= 1
    server.start()
    numbers = iter(range(10_000))

    def comes_back() -> bool:
        """Save something new until the pause is over, then ask for it without the pool."""
        prompt = [next(numbers)] * 40
        send(core, f"c{prompt[0]}", prompt)
        saved(core)
        assert core.reset_prefix_cache()
        return send(core, f"d{prompt[0]}", prompt).num_external_tokens == 32

    until(comes_back)
    core.close()


def test_server_killed_during_the_load(server: Server) -> None:
    """The lookup found the pages, the load does not get them: the request computes them."""
    core = engine(shared(server))
    connector = core.connector
    assert isinstance(connector, TierConnector)
    send(core, "a", PROMPT)
    saved(core)
    assert core.reset_prefix_cache()
    request = Request("b", PROMPT, hasher=HASHER, max_tokens=4)
    core.add_request(request)
    until(lambda: connector.get_num_new_matched_tokens(request, 0)[0] is not None)
    server.kill()
    finish(core)
    assert request.output_token_ids == alone(PROMPT)
    assert request.num_external_tokens == 0
    assert core.scheduler.remote.load_stats.failed_requests == 1
    assert core.connector_stats()["connector"]["failed_loads"] == 1
    core.close()


def test_hanging_server_does_not_stop_the_steps(server: Server) -> None:
    """While a request waits for a server that hangs, another runs; no step waits for the server."""
    core = engine(shared(server, timeout=1.0))
    send(core, "a", PROMPT)
    saved(core)
    assert core.reset_prefix_cache()
    send(core, "w", [1] * 8)
    server.pause()
    waiting = Request("b", PROMPT, hasher=HASHER, max_tokens=2)
    running = Request("c", [3] * 10, hasher=HASHER, max_tokens=40)
    core.add_request(waiting)
    core.add_request(running)
    longest = 0.0
    while not running.status.is_finished:
        start = time.monotonic()
        core.step()
        longest = max(longest, time.monotonic() - start)
    assert not waiting.status.is_finished
    assert longest < 0.5
    finish(core)
    assert waiting.output_token_ids == alone(PROMPT, max_tokens=2)
    server.kill()
    core.close()


def test_bad_page_on_the_server_is_never_loaded(server: Server) -> None:
    """What is not the page, whoever put it there, is a miss, counted and removed."""
    tier = ValkeyTier(url=server.url)
    tier.bind(b"f" * 16)
    key = bytes(36)
    assert tier.put(key, b"page") is True
    assert tier.put(key, b"page") is False
    whole = seal_page(key, b"page", fingerprint=b"f" * 16)
    other = seal_page(bytes(35) + b"\1", b"page", fingerprint=b"f" * 16)
    for data, reason in ((whole[:-1], "truncated"), (b"hello" * 40, "corrupt"), (other, "foreign")):
        tier._client.set(tier._name(key), data)
        assert tier.contains([key]) == {key}
        assert tier.get(key) is None
        assert tier.counters[reason] == 1
        assert tier.contains([key]) == set()
    tier._client.lpush(tier._name(key), "a list")
    assert tier.get(key) is None
    assert tier.counters["errors"] == 1
    tier.close()


def test_reset_external_clears_the_shared_tier_of_this_model(server: Server) -> None:
    """Every page of this fingerprint goes; another model's stay."""
    first, second = engine(shared(server)), engine(shared(server), vocab_size=100)
    for core in (first, second):
        send(core, "a", PROMPT)
        saved(core)
    assert first.reset_prefix_cache(reset_external=True)
    assert second.reset_prefix_cache()
    assert send(first, "b", PROMPT).num_external_tokens == 0
    assert send(second, "b", PROMPT).num_external_tokens == 144
    server.kill()
    assert not first.reset_prefix_cache(reset_external=True)
    first.close()
    second.close()


def test_host_before_valkey(server: Server) -> None:
    """Chained: what came from the server once comes from host memory the next time."""
    first = engine(shared(server))
    send(first, "a", PROMPT)
    saved(first)
    chained = TierConnector([HostTier(max_bytes=1 << 20), ValkeyTier(url=server.url)])
    second = engine(chained)
    for source in ("external_unspecified", "host"):
        assert send(second, source, PROMPT).num_external_tokens == 144
        assert second.scheduler.remote.hits_by_source[source] == 144
        assert second.reset_prefix_cache()
    first.close()
    second.close()


def test_bad_url_is_a_typed_error() -> None:
    """A URL of another kind is refused at the start."""
    with pytest.raises(KvHashError, match="redis://"):
        ValkeyTier(url="http://example")
