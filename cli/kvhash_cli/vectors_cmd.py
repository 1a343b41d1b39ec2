"""``kvhash vectors``: see, check, export and make the test-vector corpus."""

from __future__ import annotations

import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click

from kvhash._errors import InvalidRequestError, UsageError
from kvhash.vectors.archive import archive_name, write_archive
from kvhash.vectors.coverage import algorithms, flags, gaps, rows
from kvhash.vectors.load import Corpus, applies, load_corpus
from kvhash.vectors.verify import verify, verify_checksums
from kvhash.vectors.visible import printable_json, visible

__all__ = ["vectors"]

_FAILED = 1
_corpus = click.option(
    "--corpus",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=None,
    help="The folder of the corpus; the one that came with kvhash when left out.",
)
_output = click.option(
    "-o", "--output", type=click.Choice(["text", "jsonl"]), default="text", show_default=True
)


@click.group("vectors")
def vectors() -> None:
    """See, check, export and make the test vectors for other languages.

    \b
    Example:
      kvhash vectors list --run 'extra_keys/*' --release 0.33.0
    """


@vectors.command("list")
@_corpus
@_output
@click.option("--run", "pattern", default="*", metavar="GLOB", help="Only ids that match.")
@click.option("--release", default=None, metavar="RELEASE", help="Only what holds for this vLLM release.")
@click.option("--flag", default=None, help="Only vectors with this flag.")
def list_(corpus: Path | None, output: str, pattern: str, release: str | None, flag: str | None) -> None:
    """List the vectors: id, result, name.

    \b
    Example:
      kvhash vectors list --flag aliasing
    """
    found = False
    for file, vector in load_corpus(corpus):
        if not fnmatchcase(vector["id"], pattern) or (flag and flag not in vector["flags"]):
            continue
        if release is not None and not applies(vector, release):
            continue
        found = True
        if output == "jsonl":
            names = ("id", "name", "flags", "since", "until", "result")
            shown: dict[str, Any] = {"v": 1, "kind": file.kind, **{name: vector[name] for name in names}}
            click.echo(printable_json(shown))
        else:
            click.echo(visible(f"{vector['id']:<64} {vector['result']:<24} {vector['name']}"))
    if not found:
        raise InvalidRequestError("no vector fits these options", code="no-vectors")


@vectors.command("show")
@_corpus
@click.argument("identity", metavar="ID")
def show(corpus: Path | None, identity: str) -> None:
    """Show one vector, with what its flags mean.

    \b
    Example:
      kvhash vectors show extra_keys/sha256-cbor-salt-short/0.31.0
    """
    file, vector = load_corpus(corpus).get(identity)
    notes = {flag: file.notes[flag] for flag in vector["flags"]}
    click.echo(printable_json({**vector, "notes": notes}, indent=2))


@vectors.command("verify")
@_corpus
def verify_(corpus: Path | None) -> None:
    """Compute every vector anew and compare; check every file against SHA256SUMS. Exit status 1 on a difference.

    \b
    Example:
      kvhash vectors verify --corpus third_party/kvhash-vectors
    """
    data = load_corpus(corpus)
    wrong = 0
    for fault in verify_checksums(data.root):
        wrong += 1
        click.echo(visible(fault))
    for identity, faults in verify(data):
        for fault in faults:
            wrong += 1
            click.echo(visible(f"{identity}: {fault}"))
    _end(wrong, f"{len(data)} vectors of corpus {data.version}")


@vectors.command("coverage")
@_corpus
@_output
def coverage(corpus: Path | None, output: str) -> None:
    """Show which changes of the contract, algorithms and flags have vectors. Exit status 1 when one has none.

    \b
    Example:
      kvhash vectors coverage
    """
    data = load_corpus(corpus)
    missing = gaps(data)
    if output == "jsonl":
        changes = [
            {
                "since": str(row.change.since),
                "summary": row.change.summary,
                "before": row.before,
                "after": row.after,
            }
            for row in rows(data)
        ]
        body = {
            "v": 1,
            "changes": changes,
            "algorithms": algorithms(data),
            "flags": flags(data),
            "gaps": missing,
        }
        click.echo(printable_json(body))
    else:
        _show_coverage(data)
    for gap in missing:
        click.echo(visible(gap), err=True)
    if missing:
        raise click.exceptions.Exit(_FAILED)


def _show_coverage(data: Corpus) -> None:
    click.echo("change      before  from it on")
    for row in rows(data):
        click.echo(f"{row.change.since!s:<10}{row.before:>8}{row.after:>12}   {row.change.summary[:70]}")
    click.echo("\nalgorithm                 vectors with an answer")
    for name, count in algorithms(data).items():
        click.echo(visible(f"{name:<26}{count:>6}"))
    click.echo("\nflag                      vectors")
    for name, count in sorted(flags(data).items()):
        click.echo(visible(f"{name:<26}{count:>6}"))


@vectors.command("export")
@_corpus
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
def export(corpus: Path | None, folder: Path) -> None:
    """Copy the corpus to DIR, which must not exist or be empty, to vendor it in another project.

    DIR may be a link to an empty folder, and does not lie within a corpus.

    \b
    Example:
      kvhash vectors export third_party/kvhash-vectors
    """
    data = load_corpus(corpus)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty; expected a new folder", code="folder-not-empty")
    _outside_a_corpus(folder)
    _undamaged(data)
    target = folder.resolve()  # a link to an empty folder stays one
    draft = target.parent / f".{target.name}.part"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        shutil.copytree(data.root, draft)
        if target.exists():
            target.rmdir()
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    click.echo(f"{len(data)} vectors of corpus {data.version} are in {folder}", err=True)


@vectors.command("archive")
@_corpus
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
def archive(corpus: Path | None, folder: Path) -> None:
    """Write the corpus as a release archive into DIR, made where it is not there, and print its path.

    The same files give the same bytes.

    \b
    Example:
      kvhash vectors archive dist
    """
    data = load_corpus(corpus)
    _outside_a_corpus(folder)
    _undamaged(data)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / archive_name(data)
    write_archive(data, target)
    click.echo(str(target))


def _outside_a_corpus(folder: Path) -> None:
    """Refuse to write into a corpus: what is put there has no checksum, so the corpus would be a damaged one."""
    target = folder.resolve()
    for parent in (target, *target.parents):
        if all((parent / name).is_file() for name in ("manifest.json", "SHA256SUMS")):
            raise UsageError(f"{folder} lies within a corpus, {parent}", code="folder-in-corpus")


def _undamaged(data: Corpus) -> None:
    faults = verify_checksums(data.root)
    if faults:
        raise UsageError(f"the corpus is damaged: {faults[0]}", code="corpus-damaged")


@vectors.command("generate")
@click.option("--check", is_flag=True, help="Write nothing; exit status 1 when the files are not up to date.")
@click.option(
    "--corpus",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=Path("vectors"),
    show_default=True,
    help="The folder to write.",
)
@click.option(
    "--recorded",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=Path("tests/data"),
    show_default=True,
    help="The recorded outputs of vLLM, in a checkout.",
)
def generate(check: bool, corpus: Path, recorded: Path) -> None:
    """Make the corpus anew from the SDK, confirmed by other libraries (in a checkout).

    \b
    Example:
      kvhash vectors generate --check
    """
    from kvhash.vectors import generate as generator

    try:
        if check:
            faults = generator.check(corpus, recorded)
            for fault in faults:
                click.echo(fault)
            _end(len(faults), f"the corpus in {corpus}")
            return
        for name in generator.write(corpus, recorded):
            click.echo(f"wrote {corpus / name}", err=True)
    except (ValueError, AssertionError) as error:
        raise UsageError(str(error), code="corpus-error") from None


def _end(wrong: int, what: str) -> None:
    click.echo(f"{what}: {'all right' if not wrong else f'{wrong} faults'}", err=True)
    if wrong:
        raise click.exceptions.Exit(_FAILED)
