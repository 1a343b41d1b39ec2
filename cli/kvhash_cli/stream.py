"""Options of commands that follow engines, and the loop that reads them."""

from __future__ import annotations

import functools
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from kvhash import UsageError
from kvhash.block_size import check_block_size
from kvhash.events.endpoint import parse_ranks
from kvhash.events.export import event_to_json
from kvhash.events.records import (
    BadMessage,
    Batch,
    Confirmed,
    Gap,
    Lost,
    Record,
    Recovered,
    Restart,
    Stale,
    Unconfirmed,
)
from kvhash.events.schema import Event
from kvhash.events.subscriber import Source, Subscriber

from .options import MAX_SIZE, Seconds
from .run import EXIT_CONNECT

__all__ = [
    "event_record",
    "follow_options",
    "lora_path_option",
    "lora_paths",
    "notice_record",
    "notice_text",
    "read",
    "serve_options",
    "settings_for",
    "subscriber",
]

_F = TypeVar("_F", bound=Callable[..., Any])


def follow_options(function: _F) -> _F:
    """Add what says whom to follow, from where, and for how long."""
    decorators = [
        click.argument("endpoints", nargs=-1, required=True, metavar="ENDPOINT..."),
        click.option(
            "--topic", default="", metavar="PREFIX", help="Topics wanted, by prefix. [default: all]"
        ),
        click.option(
            "--replay",
            "replay_endpoints",
            multiple=True,
            metavar="ENDPOINT",
            help="Replay socket of each ENDPOINT, in order.",
        ),
        click.option(
            "--from-seq",
            default="end",
            show_default=True,
            metavar="N|start|end|-N",
            help="Begin at this sequence number; -N: N batches before the first live one. Needs --replay.",
        ),
        click.option(
            "--dp-ranks", default="0", metavar="RANKS", help="Data parallel ranks, such as 0-7: port + rank."
        ),
        click.option(
            "--duration", type=Seconds(), default=None, metavar="SECONDS", help="End after so long."
        ),
        click.option(
            "--idle-timeout",
            type=Seconds(),
            default=None,
            metavar="SECONDS",
            help="End when nothing came for so long.",
        ),
        click.option(
            "--replay-timeout",
            type=Seconds(0.001),
            default=5.0,
            show_default=True,
            metavar="SECONDS",
            help="Silence of a replay.",
        ),
    ]
    return functools.reduce(lambda inner, one: one(inner), reversed(decorators), function)


def _from_seq(text: str) -> Any:
    if text == "end":
        return "live"
    if text == "start":
        return "start"
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"--from-seq is a number, start or end, got {text!r}", code="invalid-from-seq"
        ) from None


def subscriber(options: Mapping[str, Any]) -> Subscriber:
    """Return a subscriber for the options; raises UsageError and EndpointError."""
    endpoints, replays = options["endpoints"], options["replay_endpoints"]
    if len(replays) > len(endpoints):
        raise UsageError("more --replay than endpoints; give one for each, in order", code="invalid-endpoint")
    from_seq = _from_seq(options["from_seq"])
    if from_seq != "live" and not replays:
        raise UsageError("--from-seq needs --replay, the engine's replay socket", code="invalid-from-seq")
    ranks = parse_ranks(options["dp_ranks"])
    padded = [*replays, *[None] * (len(endpoints) - len(replays))]
    sources = [
        source
        for endpoint, replay in zip(endpoints, padded, strict=True)
        for source in Source.for_ranks(endpoint, replay, ranks)
    ]
    return Subscriber(
        sources, topic=options["topic"], from_seq=from_seq, replay_timeout=options["replay_timeout"]
    )


def _reader_gone() -> bool:
    """Return whether whoever read our stdout has gone, as after `| head`."""
    try:
        poller = select.poll()
        poller.register(sys.stdout.fileno(), select.POLLERR)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poller.poll(0))
    except (AttributeError, ValueError, OSError):
        return False


def read(
    stream: Subscriber,
    options: Mapping[str, Any],
    *,
    tick: Callable[[], None] | None = None,
    needs_batch: bool = True,
) -> Iterator[Record]:
    """Yield records until the duration, the idle time or the reader of stdout ends it.

    `tick` is called a few times a second. Exits with status 3 when the time is over and no batch came at all.
    """
    begun = last = time.monotonic()
    duration, idle = options.get("duration"), options.get("idle_timeout")
    seen = False
    while True:
        now = time.monotonic()
        if duration is not None and now >= begun + duration:
            break
        if idle is not None and now >= last + idle:
            break
        if _reader_gone():
            raise BrokenPipeError
        record = stream.poll(0.2)
        if tick is not None:
            tick()
        if record is None:
            continue
        last = time.monotonic()
        seen = seen or isinstance(record, Batch)
        yield record
    if needs_batch and not seen:
        click.echo("nothing came; `kvevents doctor` says why that can be", err=True)
        raise click.exceptions.Exit(EXIT_CONNECT)


def event_record(record: Batch, event: Event, num_tokens: int | None) -> dict[str, Any]:
    """Return the jsonl record of one event of a batch."""
    shown = event_to_json(event)
    if num_tokens is not None:
        shown["num_tokens"] = num_tokens
    return {
        "v": 1,
        "record": "event",
        "endpoint": record.endpoint,
        "rank": record.rank,
        "topic": record.topic.decode("utf-8", "backslashreplace"),
        "seq": str(record.seq),
        "ts": record.batch.ts,
        "received_ns": str(record.received_ns),
        "replayed": record.replayed,
        "event": shown,
    }


def notice_record(record: Record) -> dict[str, Any]:
    """Return the jsonl record of a gap, recovery, loss, restart, stale batch, confirmation or bad message."""
    result: dict[str, Any] = {
        "v": 1,
        "record": type(record).__name__.lower(),
        "endpoint": record.endpoint,
        "rank": record.rank,
    }
    if isinstance(record, (Gap, Recovered, Lost)):
        result |= {"first": str(record.first), "last": str(record.last)}
    if isinstance(record, (Lost, BadMessage)):
        result["reason"] = record.reason
    if isinstance(record, (Restart, Confirmed)):
        result["last_seq"] = None if record.last_seq is None else str(record.last_seq)
    if isinstance(record, (Stale, BadMessage)):
        result["seq"] = None if record.seq is None else str(record.seq)
    return result


def notice_text(record: Record) -> str:
    """Return a notice in words."""
    who = record.endpoint if record.rank is None else f"{record.endpoint} rank {record.rank}"
    if isinstance(record, Gap):
        return f"{who}: gap: {_range(record)} missing"
    if isinstance(record, Recovered):
        return f"{who}: recovered: {_range(record)}"
    if isinstance(record, Lost):
        return f"{who}: lost: {_range(record)} ({record.reason})"
    if isinstance(record, Restart):
        return f"{who}: restarted; what it held before is gone"
    if isinstance(record, Stale):
        return f"{who}: message {record.seq} came too late and is passed over"
    if isinstance(record, Confirmed):
        return f"{who}: confirmed: it was asked, and has not begun anew"
    if isinstance(record, Unconfirmed):
        return f"{who}: unconfirmed: it may have begun anew, and does not answer"
    assert isinstance(record, BadMessage)
    return f"{who}: bad message: {record.reason}"


def _range(record: Gap | Recovered | Lost) -> str:
    count = record.last - record.first + 1
    return f"{record.first}" if count == 1 else f"{record.first} to {record.last} ({count} batches)"


def serve_options(function: _F) -> _F:
    """Add how long a command that serves waits before and after."""
    decorators = [
        click.option(
            "--delay",
            type=Seconds(),
            default=1.0,
            show_default=True,
            metavar="SECONDS",
            help="Wait for subscribers first.",
        ),
        click.option(
            "--linger",
            type=Seconds(),
            default=0.0,
            metavar="SECONDS",
            help="Answer replay requests for so long at the end.",
        ),
    ]
    return functools.reduce(lambda inner, one: one(inner), reversed(decorators), function)


def _block_size(_context: click.Context, _option: click.Parameter, value: int | None) -> int | None:
    return None if value is None else check_block_size(value)


def lora_path_option(name: str) -> Callable[[_F], _F]:
    """Return the option ``--lora-path``, checked before anything is read; its values are for `lora_paths`."""

    def checked(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
        lora_paths(texts)
        return texts

    return click.option(
        "--lora-path",
        name,
        multiple=True,
        callback=checked,
        metavar="NAME=PATH",
        help="An adapter's path; repeat.",
    )


def settings_for(function: _F) -> _F:
    """Add an engine's hash settings for commands that recompute hashes."""
    decorators = [
        click.option("--vllm", default="latest", show_default=True, metavar="RELEASE", help="vLLM release."),
        click.option(
            "--algorithm", default="sha256", show_default=True, metavar="NAME", help="Hash algorithm."
        ),
        click.option(
            "--hash-seed", default=None, metavar="TEXT", help="PYTHONHASHSEED; left out where unset."
        ),
        click.option(
            "--block-size",
            default=None,
            type=int,
            callback=_block_size,
            metavar="TOKENS",
            help="Tokens of a hash. [default: the first event's]",
        ),
        click.option(
            "--lookahead",
            default=0,
            type=click.IntRange(0, 1 << 16),
            metavar="N",
            help="Look-ahead of the engine's drafter.",
        ),
        click.option(
            "--decode-context-parallel-size",
            default=1,
            type=click.IntRange(1, MAX_SIZE),
            metavar="N",
            help="Context parallelism.",
        ),
        lora_path_option("lora_paths"),
    ]
    return functools.reduce(lambda inner, one: one(inner), reversed(decorators), function)


def lora_paths(texts: tuple[str, ...]) -> dict[str, str]:
    """Return adapter paths by name; raises UsageError for a text without ``=`` and for two paths of one name."""
    paths: dict[str, str] = {}
    for text in texts:
        name, separator, path = text.partition("=")
        if not separator or not name or not path:
            raise UsageError(f"--lora-path is NAME=PATH, got {text!r}", code="invalid-lora")
        if paths.setdefault(name, path) != path:
            raise UsageError(
                f"--lora-path gives {name!r} two paths, {paths[name]!r} and {path!r}", code="invalid-lora"
            )
    return paths


@contextmanager
def quiet_interrupt() -> Iterator[None]:
    """Turn Ctrl-C into the end of the block, for commands that then print a summary."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("", err=True)
