"""``kvhash conformance``: check any program that answers request lines against the corpus."""

from __future__ import annotations

from pathlib import Path

import click

from kvhash._errors import InvalidRequestError
from kvhash.contract import Contract
from kvhash.vectors.conformance import CAPABILITIES, read_skips, run, select
from kvhash.vectors.load import load_corpus
from kvhash.vectors.report import FORMATS

__all__ = ["conformance"]

_FAILED = 1


@click.command("conformance")
@click.option(
    "--cmd", "command", required=True, metavar="PROGRAM", help="The program to check, with its arguments."
)
@click.option(
    "--release", default=None, metavar="RELEASE", help="Only what holds for this vLLM release, asked at it."
)
@click.option("--algorithm", default=None, metavar="NAME", help="Only this algorithm.")
@click.option("--run", "pattern", default=None, metavar="GLOB", help="Only vectors whose id matches.")
@click.option(
    "--without",
    multiple=True,
    type=click.Choice(CAPABILITIES, case_sensitive=False),
    metavar="CAPABILITY",
    help=f"What the program does not claim; may be given again. One of: {', '.join(CAPABILITIES)}.",
)
@click.option(
    "--skip-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=None,
    help="Ids to skip, one a line, each with its reason after a space.",
)
@click.option(
    "--corpus",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=None,
    help="The folder of the corpus; the one that came with kvhash when left out.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.1),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Give up when nothing happens for so long.",
)
@click.option(
    "--deadline",
    type=click.FloatRange(min=0.1),
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
    external form, extra keys). A failing value that a known mistake gives is named. A program that hangs, crashes,
    writes rubbish or answers out of order is reported, never waited for. Exit status 1 when anything failed.

    \b
    Examples:
      kvhash conformance --cmd 'kvhash hash --jsonl -'
      kvhash conformance --cmd 'java -jar hasher.jar' --without events -o junit > report.xml
      kvhash conformance --cmd ./hasher --release 0.33.0 --algorithm sha256_cbor --run 'extra_keys/*'
    """
    data = load_corpus(corpus)
    if release is not None:
        release = str(Contract.for_vllm(release).release)
    cases = select(data, release=release, algorithm=algorithm, pattern=pattern, without=without)
    if not cases:
        raise InvalidRequestError("no vector fits these options", code="no-vectors")
    skips = read_skips(skip_file, data) if skip_file else {}
    report = run(command, data, cases, skips=skips, idle_seconds=timeout, total_seconds=deadline)
    click.echo(FORMATS[output](report), nl=False)
    if not report.passed:
        raise click.exceptions.Exit(_FAILED)
