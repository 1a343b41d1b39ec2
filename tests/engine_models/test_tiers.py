"""Connector tiers move the pages of real models: tokens after a restore are those of transformers' `generate`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_ref.connectors import TierConnector, make_connector

from ..engine.valkey_server import PROGRAM, Server
from .engine import BLOCK, Engine, make_engine
from .models import MODELS, ModelShelf, prompts

pytestmark = pytest.mark.torch

COUNT = 8
PROMPTS = prompts(32)
#: One of each kind of cache: full attention; a window beside it; a recurrent state beside it.
KINDS = ("llama", "gemma3", "qwen3_5")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server; it is emptied by each engine's reset."""
    if PROGRAM is None and os.environ.get("KVHASH_REQUIRE_ALL") != "1":
        pytest.skip("neither valkey-server nor redis-server is installed")
    running = Server(tmp_path_factory.mktemp("valkey"))
    running.start()
    yield running
    running.kill()


@pytest.fixture
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Return what describes a tier, by its kind."""

    def describe(kind: str) -> dict[str, Any]:
        if kind == "host":
            return {"type": "host", "max_bytes": 1 << 28}
        if kind == "disk":
            return {"type": "disk", "path": str(tmp_path / "pages"), "max_bytes": 1 << 28}
        return {"type": "valkey", "url": request.getfixturevalue("server").url, "timeout": 5.0}

    return describe


def connect(*tiers: dict[str, Any], **extra: Any) -> TierConnector:
    """Return a connector over tiers."""
    connector = make_connector(
        {
            "kv_connector": "TierConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"tiers": list(tiers), **extra},
        }
    )
    assert isinstance(connector, TierConnector)
    return connector


def forget(engine: Engine) -> None:
    """Wait until everything is saved, and make the pool forget it."""
    assert isinstance(engine.core.connector, TierConnector)
    assert engine.core.connector.flush(timeout=30)
    assert engine.core.reset_prefix_cache()


def generated(shelf: ModelShelf, name: str) -> list[list[int]]:
    """Return what transformers makes of the prompts."""
    return [shelf.generated(name, prompt, COUNT) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", ["host", "disk", "valkey"])
@pytest.mark.parametrize(
    ("name", "async_scheduling"), [*((name, False) for name in MODELS), *((name, True) for name in KINDS)]
)
def test_restored_tokens_equal_generate(
    shelf: ModelShelf,
    tier: Callable[[str], dict[str, Any]],
    name: str,
    kind: str,
    async_scheduling: bool,
) -> None:
    """What the pool forgot comes back from the tier, every group of it, and 32 prompts go on as if computed."""
    engine = make_engine(
        shelf.folder(name), connector=connect(tier(kind)), async_scheduling=async_scheduling, budget=64
    )
    right = generated(shelf, name)
    assert engine.outputs(PROMPTS, max_tokens=COUNT) == right
    forget(engine)
    assert engine.outputs(PROMPTS, max_tokens=COUNT) == right
    longest = max(engine.requests, key=lambda request: request.num_prompt_tokens)
    assert longest.num_external_tokens >= longest.num_prompt_tokens - 2 * BLOCK
    assert sum(request.num_external_tokens for request in engine.requests) > 500
    stats = engine.core.connector_stats()
    assert stats["connector"]["loaded_blocks"] > 100
    assert "failed_loads" not in stats["connector"]
    assert engine.core.reset_prefix_cache(reset_external=True)
    engine.core.close()


@pytest.mark.parametrize("load_async", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_another_engine_goes_on_from_the_shared_tier(
    shelf: ModelShelf, tier: Callable[[str], dict[str, Any]], name: str, load_async: bool
) -> None:
    """Pages that one engine saved are another's hits, chunked and preempted, with its own generated tokens too."""
    first = make_engine(shelf.folder(name), connector=connect(tier("valkey")))
    right = generated(shelf, name)
    assert first.outputs(PROMPTS, max_tokens=COUNT) == right
    forget(first)
    first.core.close()
    second = make_engine(
        shelf.folder(name),
        connector=connect({"type": "host", "max_bytes": 1 << 28}, tier("valkey"), load_async=load_async),
        num_blocks=48,
        budget=23,
        watermark=0.0,
        async_scheduling=True,
    )
    assert second.outputs(PROMPTS, max_tokens=COUNT) == right
    assert sum(request.num_external_tokens for request in second.requests) > 300
    assert second.core.reset_prefix_cache(reset_external=True)
    second.core.close()


@pytest.mark.parametrize("load_async", [False, True])
@pytest.mark.parametrize("damage", ["truncated", "corrupt", "vanished"])
@pytest.mark.parametrize("name", KINDS)
def test_a_load_that_fails_gives_the_right_tokens(
    shelf: ModelShelf,
    tier: Callable[[str], dict[str, Any]],
    tmp_path: Path,
    name: str,
    damage: str,
    load_async: bool,
) -> None:
    """Some of the files are cut, changed or gone: their tokens are computed again, and the outputs do not show it."""
    engine = make_engine(shelf.folder(name), connector=connect(tier("disk"), load_async=load_async))
    right = generated(shelf, name)
    assert engine.outputs(PROMPTS, max_tokens=COUNT) == right
    forget(engine)
    files = sorted(tmp_path.rglob("*.kv"))
    for path in files[::3]:
        data = path.read_bytes()
        if damage == "truncated":
            path.write_bytes(data[: len(data) // 2])
        elif damage == "corrupt":
            path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        else:
            path.unlink()
    assert engine.outputs(PROMPTS, max_tokens=COUNT) == right
    stats = engine.core.connector_stats()
    assert stats["disk"][damage] > 0
    assert stats["connector"]["failed_loads"] > 0
    assert engine.core.scheduler.cache.pool.usage == 0.0
    engine.core.close()


def test_a_server_that_dies_costs_hits_only(shelf: ModelShelf, tmp_path: Path) -> None:
    """The pages are gone with the server: everything is computed, and right."""
    if PROGRAM is None and os.environ.get("KVHASH_REQUIRE_ALL") != "1":
        pytest.skip("neither valkey-server nor redis-server is installed")
    server = Server(tmp_path)
    server.start()
    engine = make_engine(
        shelf.folder("gemma3"), connector=connect({"type": "valkey", "url": server.url, "timeout": 0.5})
    )
    right = generated(shelf, "gemma3")
    assert engine.outputs(PROMPTS, max_tokens=COUNT) == right
    forget(engine)
    server.kill()
    start = time.monotonic()
    assert engine.outputs(PROMPTS, max_tokens=COUNT) == right
    assert time.monotonic() - start < 30
    assert all(request.num_external_tokens == 0 for request in engine.requests)
    engine.core.close()


@pytest.mark.parametrize("name", KINDS)
def test_another_model_loads_nothing(
    shelf: ModelShelf, tier: Callable[[str], dict[str, Any]], name: str
) -> None:
    """The same tokens under other weights, or another dtype, have the same hashes and other pages."""
    first = make_engine(shelf.folder(name), connector=connect(tier("valkey")))
    first.outputs(PROMPTS[:8], max_tokens=COUNT)
    forget(first)
    for folder, options in ((shelf.folder(name, 0.1), {}), (shelf.folder(name), {"dtype": "bfloat16"})):
        other = make_engine(folder, connector=connect(tier("valkey")), runner_options=options)
        other.outputs(PROMPTS[:8], max_tokens=COUNT)
        assert all(request.num_external_tokens == 0 for request in other.requests)
        assert other.core.reset_prefix_cache(reset_external=True)
        other.core.close()
    assert first.core.reset_prefix_cache(reset_external=True)
    first.core.close()
