#!/usr/bin/env python3
"""Random load on a small model, and a random fault that can be rebuilt every moment, for as long as you like.

    .venv/bin/python tools/soak.py --minutes 15

Prints what came of it, and ends with 1 where anybody was forgotten or anything grew.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import click
import structlog

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.faults.faulty_engine import write_model  # noqa: E402  the tests' engine is in this checkout only
from tests.faults.soak import soak  # noqa: E402
from tests.faults.test_soak import check  # noqa: E402


@click.command(help=__doc__)
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=15.0, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
def main(minutes: float, seed: int) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    with tempfile.TemporaryDirectory() as folder:
        soaked = asyncio.run(soak(write_model(Path(folder)), seed, 60 * minutes))
    print(f"{minutes:g} min, seed {seed}: {soaked}")
    check(soaked)


if __name__ == "__main__":
    main()
