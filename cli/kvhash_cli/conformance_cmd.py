"""``kvhash conformance``: check any program that answers request lines against the corpus."""

from __future__ import annotations

from pathlib import Path

import click

from kvhash._errors import InvalidRequestError, UsageError
from kvhash.contract import Contract
from kvhash.vectors.conformance import CAPABILITIES, read_skips, run, select
from kvhash.vectors.load import Corpus, load_corpus
from kvhash.vectors.report import FORMATS
from kvhash.vectors.verify import verify_checksums
from kvhash.vectors.visible import visible

from .options import Seconds

__all__ = ["conformance"]

_FAILED = 1


def _capabilities(
    _context: click.Context, _option: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the names as the report writes them, whatever case they were given in."""
    by_name = {name.lower(): name for name in CAPABILITIES}
    for value in values:
        if value.lower() not in by_name:
            raise click.BadParameter(f"{value!r} is none; expected one of: {', '.join(CAPABILITIES)}")
    return tuple(by_name[value.lower()] for value in values)


@click.command("conformance")
@click.option(
    "--cmd",
    "command",
    required=True,
    metavar="PROGRAM",
    help="The program to check, with its arguments. No shell: for pipes and variables write \"sh -c '...'\".",
)
@click.option(
    "--release", default=None, metavar="RELEASE", help="Only what holds for this vLLM release, asked at it."
)
@click.option("--algorithm", default=None, metavar="NAME", help="Only this algorithm.")
@click.option("--run", "pattern", default=None, metavar="GLOB", help="Only vectors whose id matches.")
@click.option(
    "--without",
    multiple=True,
    callback=_capabilities,
    metavar="CAPABILITY",
    help=f"What the program does not claim; may be given again. One of: {', '.join(CAPABILITIES)}.",
)
@click.option(
    "--skip-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=None,
    help="Ids to skip, one a line, each with its reason after a space or a tab.",
)
@click.option(
    "--corpus",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=None,
    help="The folder of the corpus; the one that came with kvhash when left out.",
)
@click.option(
    "--timeout",
    type=Seconds(0.1),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Give up when nothing happens for so long.",
)
@click.option(
    "--deadline",
    type=Seconds(0.1),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Give up after so long in all.",
)
@click.option(
    "-o", "--output", type=click.Choice(list(FORMATS)), default="text", show_default=True, help="Form."
)
def conformance(
    command: str,
    release: str | None,
    algorithm: str | None,
    pattern: str | None,
    without: tuple[str, ...],
    skip_file: Path | None,
    corpus: Path | None,
    timeout: float,
    deadline: float,
    output: str,
) -> None:
    """Ask PROGRAM the whole corpus over stdin and stdout and say what it gets right.

    For each capability: how many passed and failed, and the first layer that differs (serialization, digest, chain,
    external form, extra keys). A failing value that a known mistake gives is named. A program that hangs, crashes
    (also after its last answer), writes rubbish or answers out of order is reported, never waited for; its exit
    status is told and decides nothing. Exit status 1 when anything failed or nothing was asked.

    \b
    Examples:
      kvhash conformance --cmd 'kvhash hash --jsonl -'
      kvhash conformance --cmd 'java -jar hasher.jar' --without events -o junit > report.xml
      kvhash conformance --cmd ./hasher --release 0.33.0 --algorithm sha256_cbor --run 'extra_keys/*'
    """
    data = load_corpus(corpus)
    _undamaged(data, chosen=corpus is not None)
    for kind, count in data.unknown_kinds().items():
        click.echo(
            f"{count} vectors of kind {kind!r} are not asked: this kvhash does not know the kind; update it",
            err=True,
        )
    if release is not None:
        release = str(Contract.for_vllm(release).release)
    cases = select(data, release=release, algorithm=algorithm, pattern=pattern, without=without)
    if not cases:
        raise InvalidRequestError("no vector fits these options", code="no-vectors")
    skips = read_skips(skip_file, data) if skip_file else {}
    report = run(command, data, cases, skips=skips, idle_seconds=timeout, total_seconds=deadline)
    click.echo(FORMATS[output](report), nl=False)
    if report.status:
        click.echo(f"the program's exit status was {report.status}, which decides nothing here", err=True)
    if not report.passed:
        raise click.exceptions.Exit(_FAILED)


def _undamaged(data: Corpus, *, chosen: bool) -> None:
    faults = verify_checksums(data.root)
    if faults and chosen:
        raise UsageError(visible(f"the corpus is damaged: {'; '.join(faults[:3])}"), code="corpus-damaged")
    for fault in faults:
        click.echo(visible(f"the corpus that came with kvhash is damaged: {fault}"), err=True)
