"""Where the lines are, each beside the measurement that set it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """The most that two runs may be apart; see `Comparison`. In nats.

    Drift, of a text alone against itself in front of more text, may be `drift_ratio` times the control's, and always
    `drift_mean` and `drift_p99`.
    """

    mean: float
    p99: float
    regret: float
    drift_mean: float
    drift_p99: float
    drift_ratio: float = 2.0


LINES: Mapping[str, Lines] = {
    "float32": Lines(mean=1e-4, p99=1e-3, regret=1e-3, drift_mean=1e-4, drift_p99=1e-3),
    "bfloat16": Lines(mean=0.1, p99=0.5, regret=1.0, drift_mean=0.05, drift_p99=0.25),
}
