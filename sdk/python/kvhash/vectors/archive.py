"""The corpus as one release archive: the same bytes from the same files, wherever and whenever it is made."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

from .load import Corpus

__all__ = ["archive_name", "write_archive"]


def archive_name(corpus: Corpus) -> str:
    """Return the archive's file name, with the corpus's version in it."""
    return f"kvhash-vectors-{corpus.version}.tar.gz"


def write_archive(corpus: Corpus, target: Path) -> None:
    """Write the whole corpus to `target`, in one folder named after its version.

    Names are sorted and times, owners and permissions fixed. The file appears complete or not at all.
    """
    top = archive_name(corpus).removesuffix(".tar.gz")
    files = sorted(path for path in corpus.root.rglob("*") if path.is_file())
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0, filename="") as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for path in files:
            data = path.read_bytes()
            entry = tarfile.TarInfo(f"{top}/{path.relative_to(corpus.root).as_posix()}")
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    draft = target.with_name(f".{target.name}.part")
    try:
        draft.write_bytes(packed.getvalue())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
