"""A real server for the tests of the shared form: one for each module, empty before each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .redis_server import RedisServer


@pytest.fixture(scope="module")
def _server() -> Iterator[RedisServer]:
    running = RedisServer()
    yield running
    running.close()


@pytest.fixture
def server(_server: RedisServer) -> RedisServer:
    """Return a running server that holds nothing."""
    _server.client().flushall()
    return _server
