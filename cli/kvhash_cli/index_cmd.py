"""``kvevents index``: which engine holds which prefix, live in a terminal or at the end of a stream."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kvhash import InvalidRequestError, UsageError
from kvhash.events.endpoint import parse_ranks
from kvhash.events.message import parse_message
from kvhash.events.records import BadMessage, Batch, Record
from kvhash.events.schema import BlockStored, EventBatch
from kvhash.events.subscriber import Source
from kvhash.events.tracker import PublisherTracker
from kvhash.index import EngineSettings, Knowledge, PrefixMatch, ResidencyIndex
from kvhash.index.types import MAX_BLOCK_TOKENS
from kvhash.request import HashRequest, parse_json

from .decode_cmd import open_source
from .options import output_option, read_value
from .run import EXIT_CONNECT
from .stream import follow_options, lora_paths, notice_text, quiet_interrupt, read, settings_for, subscriber

__all__ = ["index"]

_PREFIXES = 10
_SETTINGS = ("vllm", "algorithm", "hash_seed", "lookahead", "decode_context_parallel_size")


@click.command()
@follow_options
@settings_for
@click.option(
    "--query",
    default=None,
    metavar="FILE",
    help="A prompt: JSON list of token ids, or a request line's object (tokens, cache_salt, lora); FILE, JSON or -.",
)
@click.option(
    "--max-blocks", type=int, default=None, metavar="N", help="Blocks held at most, over all engines."
)
@click.option(
    "--prefixes", type=int, default=_PREFIXES, show_default=True, metavar="N", help="Prefixes shown."
)
@output_option("text", "jsonl")
def index(output: str, query: str | None, max_blocks: int | None, prefixes: int, **options: Any) -> None:
    """Show which engines hold what: state of knowledge, blocks by tier, and the prefixes that most blocks hang on.

    ENDPOINT is a live engine (tcp://, ipc://) or a file that `kvevents decode` reads. In a terminal the map is live;
    elsewhere it is printed once at the end (--duration, --idle-timeout, Ctrl-C). With --query the end says, too, how
    much of a prompt each engine holds, and the hash settings are checked against the events. Exit status 3 when
    nothing came.

    \b
    Examples:
      kvevents index tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558 --from-seq start
      kvevents index engine.kvrec --query tokens.json --algorithm sha256_cbor -o jsonl
    """
    files = ["://" not in name for name in options["endpoints"]]
    if any(files) != all(files):
        raise UsageError("index files or live endpoints, not both at once", code="invalid-endpoint")
    if prefixes < 0:
        raise UsageError(f"--prefixes: expected 0 or more, got {prefixes}")
    prompt = None if query is None else _prompt(query)
    if prompt is not None:
        _hashes(prompt, options, 16)  # bad settings are said before the stream is read
        _say_overridden(prompt, options)
        # The engines' events judge the settings that the prompt is hashed by, whoever said them.
        options |= {name: prompt[name] for name in _SETTINGS if name in prompt}
    feed = _Feed(ResidencyIndex(max_blocks=max_blocks), options, verify=prompt is not None)
    if all(files):
        for record in _from_files(options["endpoints"]):
            feed.take(record.endpoint, record)
    elif output == "text" and sys.stdout.isatty():
        _live(feed, options, prefixes)
    else:
        _follow(feed, options)
    if not feed.seen:
        click.echo("no batch came; `kvevents doctor` says why that can be", err=True)
        raise click.exceptions.Exit(EXIT_CONNECT)
    if prompt is not None:
        _say_other_sizes(feed, prompt)
        _say_other_settings(feed, options)
    show = _print_json if output == "jsonl" else _print_text
    show(feed, prefixes, {} if prompt is None else _matches(feed, prompt, options))


class _Feed:
    """The index, and what each engine's settings turn out to be."""

    def __init__(self, held: ResidencyIndex, options: Mapping[str, Any], *, verify: bool) -> None:
        self.index = held
        self.seen = False
        self.sizes: dict[str, int] = {}
        self._options = options
        self._verify = verify

    def take(self, engine: str, record: Record) -> None:
        """Apply one record."""
        if isinstance(record, Batch):
            self.seen = True
            if engine not in self.sizes:
                self._settle(engine, record.batch)
        else:
            click.echo(notice_text(record), err=True)
        self.index.apply_record(engine, record)

    def _settle(self, engine: str, batch: EventBatch) -> None:
        """Take the tokens per hash from the options, else from an engine's first stores."""
        stores = (event for event in batch.events if isinstance(event, BlockStored) and event.token_ids)
        most = MAX_BLOCK_TOKENS // self._options["decode_context_parallel_size"]
        sizes = [event.block_size for event in stores if 0 < event.block_size <= most]
        size = self._options["block_size"] or min(sizes, default=None)
        if size is None:
            return
        self.sizes[engine] = size
        if self._verify:
            self.index.configure(engine, EngineSettings(hashing=_settings(self._options, size)))
        elif self._options["block_size"]:
            span = size * self._options["decode_context_parallel_size"]
            self.index.configure(engine, EngineSettings(tokens_per_hash=span))


def _settings(options: Mapping[str, Any], block_size: int) -> dict[str, Any]:
    paths = lora_paths(options["lora_paths"])
    return {name: options[name] for name in _SETTINGS} | {"block_size": block_size, "lora_paths": paths}


# --- the prompt ---------------------------------------------------------------------------------------------


def _prompt(query: str) -> dict[str, Any]:
    """Return the prompt's fields of a request line."""
    what = "--query"
    if query != "-" and _is_file(query):
        what = f"the file of --query, {query},"
        data: bytes | str = Path(query).read_bytes()
    elif query.strip() and query.lstrip()[0] not in "[{-@":
        raise InvalidRequestError(
            f"--query: there is no file {query!r:.200}; expected a file, - for standard input, or JSON: a list of "
            'token ids, or an object as in a request line ({"tokens":[...]})',
            code="no-such-file",
        )
    else:
        data = read_value(query, "--query")
    value = parse_json(data, what=what)
    if isinstance(value, list):
        value = {"tokens": value}
    if not isinstance(value, Mapping) or "tokens" not in value:
        raise InvalidRequestError("expected a list of token ids, or an object with tokens", at="$")
    return dict(value)


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # JSON is no file's name
        return False


def _hashes(prompt: Mapping[str, Any], options: Mapping[str, Any], block_size: int) -> list[Any]:
    settings = _settings(options, block_size)
    settings.pop("lora_paths")
    request = HashRequest.of({**settings, **prompt})
    return request.chain().block_hashes


def _say_overridden(prompt: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Say which options that were given count for nothing, since the query says something else."""
    context = click.get_current_context()
    for name in _SETTINGS:
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if given and name in prompt and prompt[name] != options[name]:
            flag = f"--{name.replace('_', '-')}"
            click.echo(
                f"the query's {name}, {prompt[name]!r:.100}, counts, not {flag} {options[name]}", err=True
            )


def _say_other_settings(feed: _Feed, options: Mapping[str, Any]) -> None:
    """Say of which engines the published hashes are not what the query's settings give: then nothing can match."""
    said = ", ".join(f"{name} {options[name]!r}" for name in _SETTINGS[:3])
    for engine in feed.index.engines():
        if "hash-mismatch" in feed.index.knowledge(engine).reasons:
            click.echo(
                f"{engine}: it does not hash by {said}: nothing can match; `kvevents verify` checks settings, "
                "`kvhash identify` finds them",
                err=True,
            )


def _say_other_sizes(feed: _Feed, prompt: Mapping[str, Any]) -> None:
    """Say of which engines the query's own block size is not theirs: its hashes are then none of theirs."""
    asked = prompt.get("block_size")
    for engine, size in feed.sizes.items():
        if asked is not None and asked != size:
            click.echo(
                f"{engine}: the query's block_size is {asked}, the engine's is {size}: nothing can match; "
                "leave block_size out of the query",
                err=True,
            )


def _matches(feed: _Feed, prompt: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, PrefixMatch]:
    found: dict[str, PrefixMatch] = {}
    for engine in feed.index.engines():
        size = feed.sizes.get(engine)
        hashes = [] if size is None else _hashes(prompt, options, size)
        found |= feed.index.longest_prefix(hashes, [engine], num_tokens=len(prompt["tokens"]))
    return dict(sorted(found.items(), key=lambda item: -item[1].usable_tokens))


# --- where records come from --------------------------------------------------------------------------------


def _from_files(names: tuple[str, ...]) -> Iterator[Record]:
    """Yield what a subscriber without a replay socket would have said of recorded messages."""
    for name in names:
        if name != "-" and not Path(name).exists():
            raise UsageError(f"no such file, and no endpoint: {name}", code="no-such-file")
        source = open_source(name)
        trackers: dict[tuple[str, int | None], PublisherTracker] = {}
        for recorded in source:
            now = recorded.received_ns / 1e9
            message = parse_message(list(recorded.frames), recorded.endpoint, recorded.received_ns)
            if isinstance(message, BadMessage):
                yield message
                continue
            mine = [rank for endpoint, rank in trackers if endpoint == recorded.endpoint]
            # A batch that cannot be read has no rank: it is of the only publisher, where there is only one.
            rank = mine[0] if message.batch is None and len(mine) == 1 else message.rank
            tracker = trackers.get((recorded.endpoint, rank))
            if tracker is None:
                tracker = PublisherTracker(recorded.endpoint, rank, can_replay=False)
                trackers[recorded.endpoint, rank] = tracker
            yield from tracker.tick(now)
            yield from tracker.live(message, now)
        for tracker in trackers.values():
            yield from tracker.tick(math.inf)
        for damage in source.damage:
            click.echo(f"{name}: {damage}", err=True)


def _names(options: Mapping[str, Any]) -> dict[str, str]:
    """Return which engine each rank's endpoint is of: the ENDPOINT that was given."""
    ranks = parse_ranks(options["dp_ranks"])
    return {
        source.endpoint: endpoint
        for endpoint in options["endpoints"]
        for source in Source.for_ranks(endpoint, None, ranks)
    }


def _follow(feed: _Feed, options: dict[str, Any], tick: Callable[[], None] | None = None) -> None:
    names = _names(options)
    with subscriber(options) as stream, quiet_interrupt():
        for record in read(stream, options, tick=tick, needs_batch=False):
            feed.take(names.get(record.endpoint, record.endpoint), record)


def _live(feed: _Feed, options: dict[str, Any], prefixes: int) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.table import Table

    def tables() -> Group:
        engines = Table("engine", "knowledge", "blocks", "by tier")
        for engine in feed.index.engines():
            engines.add_row(*_engine_row(feed, engine))
        hot = Table("hash", "shared blocks", "blocks below", "engines")
        for prefix in feed.index.hottest_prefixes(prefixes):
            hot.add_row(f"{prefix.key:016x}", str(prefix.blocks), str(prefix.below), str(len(prefix.engines)))
        return Group(engines, hot)

    shown_at = 0.0
    with Live(tables(), refresh_per_second=4) as live:

        def refresh() -> None:
            nonlocal shown_at
            if time.monotonic() - shown_at > 0.5:
                shown_at = time.monotonic()
                live.update(tables())

        _follow(feed, options, refresh)
        live.update(tables())


# --- what is printed ----------------------------------------------------------------------------------------


def _known(known: Knowledge) -> str:
    text = known.state.name
    if known.reasons:
        text += f" ({', '.join(known.reasons)})"
    if known.since is not None:
        text += time.strftime(" since %H:%M:%SZ", time.gmtime(known.since))
    return text


def _tiers(blocks: Mapping[str, int]) -> str:
    return ", ".join(f"{tier} {count}" for tier, count in blocks.items()) or "-"


def _engine_row(feed: _Feed, engine: str) -> tuple[str, str, str, str]:
    tiers = feed.index.blocks_by_tier(engine)
    return engine, _known(feed.index.knowledge(engine)), str(sum(tiers.values())), _tiers(tiers)


def _print_text(feed: _Feed, prefixes: int, matches: Mapping[str, PrefixMatch]) -> None:
    for engine in feed.index.engines():
        name, known, blocks, tiers = _engine_row(feed, engine)
        click.echo(f"{name}  {known}  {blocks} blocks: {tiers}")
    for prefix in feed.index.hottest_prefixes(prefixes):
        click.echo(
            f"prefix {prefix.key:016x}: {prefix.blocks} blocks shared, {prefix.below} on it, "
            f"on {len(prefix.engines)} engine{'s' if len(prefix.engines) > 1 else ''}"
        )
    media = feed.index.stats()["unknown_media"]
    if media:
        click.echo(f"media that score nothing: {_tiers(media)} events", err=True)
    for engine, match in matches.items():
        remote = f"; remote {_tiers(match.remote)}" if match.remote else ""
        rank = "" if match.rank is None else f" rank {match.rank}"
        click.echo(
            f"match {engine}{rank}: {match.usable_tokens} tokens usable, {match.blocks} blocks "
            f"({_tiers(match.by_tier)}{remote})"
        )


def _print_json(feed: _Feed, prefixes: int, matches: Mapping[str, PrefixMatch]) -> None:
    def out(record: str, **fields: Any) -> None:
        click.echo(json.dumps({"v": 1, "record": record, **fields}))

    for engine in feed.index.engines():
        known = feed.index.knowledge(engine)
        out(
            "engine",
            engine=engine,
            ranks=feed.index.ranks(engine),
            knowledge=known.state.value,
            since=known.since,
            reasons=known.reasons,
            as_of=known.as_of,
            blocks=feed.index.blocks_by_tier(engine),
        )
    for prefix in feed.index.hottest_prefixes(prefixes):
        out(
            "prefix",
            hash=str(prefix.key),
            blocks=prefix.blocks,
            below=prefix.below,
            engines=prefix.engines,
        )
    for engine, match in matches.items():
        out(
            "match",
            engine=engine,
            rank=match.rank,
            blocks=match.blocks,
            tokens=match.tokens,
            usable_tokens=match.usable_tokens,
            by_tier=match.by_tier,
            remote=match.remote,
        )
    out("stats", **feed.index.stats())
