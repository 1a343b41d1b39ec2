"""The Rust form of the router decides as the Python one does, follows real engines, and says what it missed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvhash import BlockHasher
from kvhash.events.encode import encode_batch
from kvhash.events.publisher import Publisher
from kvhash.events.schema import BlockStored, EventBatch

from ..events.relay import rebind
from ..interop.toolchain import cargo
from ..ports import free_endpoints
from .other_programs import (
    assert_follows_real_engines,
    assert_goes_on_after_a_line_that_is_not_text,
    running,
)
from .running import ROOT, wait_for

pytestmark = pytest.mark.timeout(600)  # a cold build takes a minute or two
CRATE = ROOT / "examples" / "router-rust"
_LOCAL = "tcp://127.0.0.1"
_HASHER = BlockHasher(vllm="latest", algorithm="sha256_cbor", block_size=16, hash_seed="0")
_PROMPT = list(range(49))
_FLAGS = ["--hash-seed", "0", "--prefix-caching-hash-algo", "sha256_cbor"]


@cache
def _program() -> Path:
    cargo(CRATE, "build", "--locked", "--quiet", timeout=500)
    return CRATE / "target" / "debug" / "kvhash-route"


def test_rust_tests_pass() -> None:
    """The crate is formatted and its own tests pass: the Python router's decisions, and the index's rules."""
    cargo(CRATE, "fmt", "--check", timeout=500)
    cargo(CRATE, "test", "--locked", "--quiet", timeout=500)


def test_rust_program_follows_real_engines() -> None:
    """What was stored before it came, what is stored after, and a restart: the program knows where a prompt is held."""
    assert_follows_real_engines(_program(), "--")


def test_rust_program_answers_the_line_behind_one_that_is_not_text() -> None:
    """A line that is no UTF-8 is answered with an error, as one that is no JSON; the next one is a question again."""
    assert_goes_on_after_a_line_that_is_not_text([str(_program()), *_FLAGS, "--wait", "0"], "--")


class _Line:
    """A publisher's live socket that sends what it is told, and a replay socket that has everything."""

    def __init__(self, context: zmq.Context[Any], release: str) -> None:
        self._context, self._release = context, release
        self.events, self.replay = free_endpoints()
        self._open()
        self._hashes = [int.from_bytes(one[-8:], "big") for one in _HASHER.hash_tokens(_PROMPT)]

    def _open(self) -> None:
        self._live = self._context.socket(zmq.XPUB)
        self._live.setsockopt(zmq.LINGER, 0)
        rebind(self._live, self.events)
        self._kept = Publisher(f"{_LOCAL}:*", self.replay, bind=True, release=self._release)

    def restart(self) -> None:
        """Come back at the same addresses with nothing, as an engine does that crashed."""
        self.close()
        self._open()

    def heard(self) -> None:
        """Wait until a subscriber is there."""
        assert self._live.poll(20_000), "nobody subscribed"
        assert self._live.recv() == b"\1"

    def store(self, block: int, *, live: bool = True) -> None:
        """Publish the prompt's block of this number, as the batch of this number; not `live`: it gets lost."""
        event = BlockStored(
            (self._hashes[block],),
            self._hashes[block - 1] if block else None,
            tuple(_PROMPT[16 * block : 16 * block + 16]),
            16,
            medium="GPU",
        )
        payload = encode_batch(EventBatch(float(block + 1), (event,), 0))
        published = self._kept.published
        self._kept.publish_payload(payload)
        wait_for(lambda: self._kept.published > published, "the batch to be kept")
        if live:
            self._live.send_multipart([b"", block.to_bytes(8, "big"), payload])

    def close(self) -> None:
        """End both sockets."""
        self._live.close(0)
        self._kept.close()


@contextmanager
def _line(release: str = "latest") -> Iterator[_Line]:
    context: zmq.Context[Any] = zmq.Context()
    line = _Line(context, release)
    try:
        yield line
    finally:
        line.close()
        context.destroy(linger=0)


def test_rust_program_says_what_it_missed() -> None:
    """A lost batch, and nowhere to ask for it: its blocks are not made up, and the engine is no longer `exact`."""
    with _line() as line, running([str(_program()), *_FLAGS, "--engine", f"e={line.events}"]) as ask:
        line.heard()
        line.store(0)
        wait_for(lambda: ask(_PROMPT)["matched_tokens"] == {"e": 16}, "the first batch")
        assert ask(_PROMPT)["knowledge"] == {"e": "exact"}
        line.store(1, live=False)
        line.store(2)
        wait_for(lambda: ask(_PROMPT)["knowledge"] == {"e": "degraded"}, "the loss to be said")
        assert ask(_PROMPT)["matched_tokens"] == {"e": 16}


@pytest.mark.parametrize("release", ["latest", "0.25.0"])
def test_rust_program_asks_for_what_it_missed(release: str) -> None:
    """A lost batch that the engine still has, in either framing of replays: it is asked for, and all is `exact`."""
    with _line(release) as line:
        engine = f"e={line.events},{line.replay}"
        with running([str(_program()), *_FLAGS, "--engine", engine]) as ask:
            line.heard()
            line.store(0)
            wait_for(lambda: ask(_PROMPT)["matched_tokens"] == {"e": 16}, "the first batch")
            line.store(1, live=False)
            line.store(2)
            wait_for(lambda: ask(_PROMPT)["matched_tokens"] == {"e": 48}, "the batch that was missed")
            assert ask(_PROMPT)["knowledge"] == {"e": "exact"}


def test_rust_program_sees_a_restart_that_says_nothing() -> None:
    """An engine that came back and published nothing yet holds nothing: the new connection's replay lacks its past."""
    with _line() as line:
        engine = f"e={line.events},{line.replay}"
        with running([str(_program()), *_FLAGS, "--engine", engine]) as ask:
            line.heard()
            line.store(0)
            line.store(1)
            wait_for(lambda: ask(_PROMPT)["matched_tokens"] == {"e": 32}, "the first life's batches")
            line.restart()
            wait_for(lambda: ask(_PROMPT)["matched_tokens"] == {"e": 0}, "the restart to be seen")
            assert ask(_PROMPT)["knowledge"] == {"e": "unknown"}
