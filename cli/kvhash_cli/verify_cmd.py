"""``kvevents verify``: recompute every published hash."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from kvhash import KvHashError, UsageError
from kvhash.events.decode import decode_batch
from kvhash.events.records import Batch, Restart
from kvhash.events.schema import BlockStored, EventBatch
from kvhash.events.verify import REASONS, Verifier

from .decode_cmd import open_source
from .options import output_option
from .run import EXIT_CONNECT, EXIT_MISMATCH
from .stream import follow_options, lora_paths, notice_text, quiet_interrupt, read, settings_for, subscriber

__all__ = ["verify"]

_SHOWN = 10


@click.command()
@follow_options
@settings_for
@click.option(
    "--show",
    type=click.IntRange(min=0),
    default=_SHOWN,
    show_default=True,
    metavar="N",
    help="Mismatches shown in text.",
)
@output_option("text", "jsonl")
def verify(output: str, show: int, **options: Any) -> None:
    """Recompute every hash that a stream publishes: match, mismatch, or not derivable and why.

    ENDPOINT is a live engine (tcp://, ipc://) or a file that `kvevents decode` reads. Exit status 1 on a mismatch, 3
    when no block was published.

    \b
    Examples:
      kvevents verify engine.kvrec --algorithm sha256_cbor
      kvevents verify tcp://127.0.0.1:5557 --duration 30 --hash-seed 0 --lora-path sql=adapters/sql
    """
    files = ["://" not in name for name in options["endpoints"]]
    if any(files) != all(files):
        raise UsageError("verify files or live endpoints, not both at once", code="invalid-endpoint")
    batches = _from_files(options["endpoints"]) if all(files) else _live(options)
    verifiers: dict[Any, Verifier] = {}
    mismatches = 0
    with quiet_interrupt():
        for publisher, batch in batches:
            if batch is None:
                verifiers.pop(publisher, None)
                continue
            verifier = verifiers.get(publisher)
            if verifier is None:
                size = options["block_size"] or _block_size(batch)
                if size is None:
                    continue
                verifier = verifiers[publisher] = _verifier(options, size)
            for check in verifier.feed(batch):
                mismatches += check.verdict == "mismatch"
                if output == "jsonl":
                    click.echo(json.dumps(_json(publisher, check)))
                elif check.verdict == "mismatch" and mismatches <= show:
                    click.echo(str(check))
    _summary(list(verifiers.values()), output)
    if mismatches:
        raise click.exceptions.Exit(EXIT_MISMATCH)


def _verifier(options: dict[str, Any], block_size: int) -> Verifier:
    return Verifier(
        vllm=options["vllm"],
        algorithm=options["algorithm"],
        block_size=block_size,
        hash_seed=options["hash_seed"],
        lookahead=options["lookahead"],
        decode_context_parallel_size=options["decode_context_parallel_size"],
        lora_paths=lora_paths(options["lora_paths"]),
    )


def _block_size(batch: EventBatch) -> int | None:
    sizes = [
        e.block_size for e in batch.events if isinstance(e, BlockStored) and e.block_size > 0 and e.token_ids
    ]
    return min(sizes, default=None)


def _from_files(names: tuple[str, ...]) -> Iterator[tuple[Any, EventBatch | None]]:
    for name in names:
        if name != "-" and not Path(name).exists():
            raise UsageError(f"no such file, and no endpoint: {name}", code="no-such-file")
        source = open_source(name)
        for record in source:
            try:
                batch = decode_batch(record.payload)
            except KvHashError as error:
                click.echo(f"{name}: message {record.seq}: [{error.code}] {error}", err=True)
                continue
            yield (record.endpoint, batch.data_parallel_rank), batch
        for damage in source.damage:
            click.echo(f"{name}: {damage}", err=True)


def _live(options: dict[str, Any]) -> Iterator[tuple[Any, EventBatch | None]]:
    with subscriber(options) as stream:
        for record in read(stream, options):
            if isinstance(record, Batch):
                yield (record.endpoint, record.rank), record.batch
            else:
                click.echo(notice_text(record), err=True)
                if isinstance(record, Restart):
                    yield (record.endpoint, record.rank), None


def _json(publisher: Any, check: Any) -> dict[str, Any]:
    def value(item: Any) -> Any:
        return None if item is None else item.hex() if isinstance(item, bytes) else str(item)

    return {
        "v": 1, "record": "check", "endpoint": publisher[0], "rank": publisher[1], "verdict": check.verdict,
        "published": value(check.published), "expected": value(check.expected), "reason": check.reason,
    }  # fmt: skip


def _summary(verifiers: list[Verifier], output: str) -> None:
    verdicts = {
        name: sum(v.verdicts[name] for v in verifiers) for name in ("match", "mismatch", "not-derivable")
    }
    reasons: dict[str, int] = {}
    for verifier in verifiers:
        for reason, count in verifier.reasons.items():
            reasons[reason] = reasons.get(reason, 0) + count
    total = sum(verdicts.values())
    if output == "jsonl":
        click.echo(json.dumps({"v": 1, "record": "summary", "blocks": total, **verdicts, "reasons": reasons}))
    else:
        share = f" ({100 * verdicts['match'] / total:.1f} %)" if total else ""
        click.echo(f"{verdicts['match']} of {total} published hashes match{share}")
        if verdicts["mismatch"]:
            click.echo(
                f"{verdicts['mismatch']} mismatch: other settings; `kvevents doctor` or `kvhash identify` finds them"
            )
        for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
            click.echo(f"{count} not derivable: {reason}: {REASONS[reason]}")
    if not total:
        click.echo("no stored block was published", err=True)
        raise click.exceptions.Exit(EXIT_CONNECT)
