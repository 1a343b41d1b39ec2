"""Where the console scripts begin; ``--version`` is answered here, before anything slow is imported."""

from __future__ import annotations

import sys

__all__ = ["kvevents_main", "kvhash_main", "version_text"]

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
    """Return what ``--version`` prints: the release, the backend, the libraries' versions, and what is missing."""
    from kvhash._backend import native_hint
    from kvhash._version import __version__, backend

    libraries = ", ".join(f"{name} {version}" for name, version in _library_versions().items())
    python = ".".join(map(str, sys.version_info[:3]))
    hint = native_hint()
    more = "" if hint is None else f"\n{hint}"
    return f"{program} {__version__} (backend: {backend()})\npython {python}; {libraries}{more}"


def _print_version(program: str) -> None:
    if sys.stdout is None:  # type: ignore[redundant-expr, unused-ignore]
        sys.exit(2)
    try:
        shown = version_text(program)
    except Exception as error:
        # Only a wrong KVHASH_BACKEND gets here; the errors' classes are not imported for the sake of this case.
        print(f"{program}: error [{getattr(error, 'code', 'error')}]: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        print(shown)
        sys.stdout.flush()
    except OSError as error:
        import os

        # Python flushes once more at exit, and must not complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):
            print(f"{program}: error [io]: {error.strerror}", file=sys.stderr)
            sys.exit(2)


def kvhash_main() -> None:
    """Run the ``kvhash`` command."""
    if sys.argv[1:] == ["--version"]:
        _print_version("kvhash")
        return
    from .main import kvhash
    from .run import run

    run(kvhash, "kvhash")


def kvevents_main() -> None:
    """Run the ``kvevents`` command."""
    if sys.argv[1:] == ["--version"]:
        _print_version("kvevents")
        return
    from .kvevents import kvevents
    from .run import run

    run(kvevents, "kvevents")
