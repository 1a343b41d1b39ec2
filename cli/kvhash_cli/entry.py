"""Where the console scripts begin; ``--version`` is answered here, before anything slow is imported."""

from __future__ import annotations

import sys

__all__ = ["kvhash_main", "version_text"]

_LIBRARIES = ("cbor2", "click", "msgspec", "pyzmq", "rich", "xxhash", "transformers", "torch")


def _library_versions() -> dict[str, str]:
    """Return the installed versions by the names of the ``.dist-info`` folders; importlib.metadata takes far longer."""
    import os

    found: dict[str, str] = {}
    for folder in sys.path:
        try:
            entries = os.listdir(folder or ".")
        except OSError:
            continue
        for entry in entries:
            if entry.endswith(".dist-info"):
                name, _, version = entry[: -len(".dist-info")].partition("-")
                found.setdefault(name.lower(), version)
    return {name: found[name] for name in _LIBRARIES if name in found}


def version_text(program: str) -> str:
    """Return what ``--version`` prints: the release, the backend, and the libraries' versions."""
    from kvhash._version import __version__, backend

    libraries = ", ".join(f"{name} {version}" for name, version in _library_versions().items())
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{program} {__version__} (backend: {backend()})\npython {python}; {libraries}"


def kvhash_main() -> None:
    """Run the ``kvhash`` command."""
    if sys.argv[1:] == ["--version"]:
        print(version_text("kvhash"))
        return
    from .main import kvhash
    from .run import run

    run(kvhash, "kvhash")
