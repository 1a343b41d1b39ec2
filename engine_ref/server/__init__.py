"""The HTTP front: OpenAI's endpoints over one engine or several data-parallel ranks."""

from __future__ import annotations

from .app import make_app
from .frontend import Frontend

__all__ = ["Frontend", "make_app"]
