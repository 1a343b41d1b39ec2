"""`python -m engine_ref`: the engine's commands."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
