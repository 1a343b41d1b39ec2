"""The version of this distribution and which backend hashes."""

from __future__ import annotations

__all__ = ["__version__", "backend"]

__version__ = "0.1.0"


def backend() -> str:
    """Return what computes the hashes in this process: ``"python"`` (the pure Python definition)."""
    return "python"
