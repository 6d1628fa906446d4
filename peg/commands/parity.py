"""`peg parity`: whether tensor parallelism changes what a checkpoint says, and whether it says what it should."""

from __future__ import annotations

import click

from peg.config import EngineConfig
from peg.parity.environment import describe
from peg.parity.lines import LINES
from peg.parity.report import HEADER, legend, row
from peg.parity.session import Session, Wanted


async def parity(config: EngineConfig, wanted: Wanted) -> int:
    """Write environment, table and verdict; the exit code: 0 passed, 1 failed. Raises UsageError."""
    session = Session(config, wanted)
    failed = 0
    click.echo(HEADER)
    async for verdict in session.verdicts():
        failed += not verdict.passed
        click.echo("\n".join(row(verdict)))
    click.echo()
    if session.info is not None:
        click.echo("\n".join(legend(LINES[session.info.dtype])))
        click.echo()
        for name, value in describe(session.info, session.checkpoint):
            click.echo(f"{name:14}{value}")
        click.echo()
    click.echo(f"FAILED: {failed} gates" if failed else "passed")
    return 1 if failed else 0
