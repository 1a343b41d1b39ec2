"""`python -m kvhash_router`: the router's command line."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
