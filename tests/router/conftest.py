"""Makes the router's package importable: it is an example beside the SDK, not a part of it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "router"))
