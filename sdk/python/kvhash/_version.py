"""The version of this distribution and which backend hashes."""

from __future__ import annotations

__all__ = ["__version__", "backend"]

__version__ = "0.1.0"


def backend() -> str:
    """Return what computes the hashes in this process: ``"native"`` (Rust) or ``"python"`` (the definition).

    ``KVHASH_BACKEND`` forces one; raises MissingDependencyError where the native module is forced and not built.
    """
    from ._backend import backend_name

    return backend_name()
