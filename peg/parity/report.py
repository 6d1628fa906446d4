"""What people read: a line a gate, and what is wrong under it."""

from __future__ import annotations

from collections.abc import Iterator

from peg.parity.gates import Verdict
from peg.parity.lines import Lines

_WIDTH = 46
HEADER = f"{'gate':{_WIDTH}}{'positions':>9}{'same best':>11}{'mean':>9}{'p99':>9}{'regret':>9}{'flips':>7}  verdict"


def row(verdict: Verdict) -> Iterator[str]:
    """A gate's numbers, in nats, then its faults."""
    found = verdict.comparison
    numbers = " " * 54
    if found is not None:
        numbers = (
            f"{found.positions:>9}{found.agreed / found.positions:>11.2%}{found.mean:>9.2g}{found.p99:>9.2g}"
            f"{found.regret:>9.2g}{len(found.flips):>7}"
        )
    yield f"{verdict.gate:{_WIDTH}}{numbers}  {'passed' if verdict.passed else 'FAILED'}"
    for fault in verdict.faults:
        yield f"    {fault}"


def legend(lines: Lines) -> Iterator[str]:
    """What the numbers mean and where the lines are."""
    yield (
        f"in nats, over the 64 likeliest tokens at each position; lines: mean {lines.mean:g}, p99 {lines.p99:g}, "
        f"regret {lines.regret:g}; in front of more text: {lines.drift_ratio:g} times one rank's mean and p99, or "
        f"{lines.drift_mean:g} and {lines.drift_p99:g}"
    )
    yield "the floor is what one rank differs from itself by: alone or in a batch, in front of more text"
