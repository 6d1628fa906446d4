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


# Measured on two cores of a Xeon with AMX, torch 2.13. `right`: one rank and two of Gemma 3 270M's real weights, each
# against the other and against transformers, over 3339 positions and over 378. `faults`: the least by which any fault
# moved two ranks from one: a reduction skipped, all of them behind their norms, a shard shifted by one head,
# block-table entries swapped.
#
#              right           faults
# bf16  mean   0.05 to 0.09    0.39
#       p99    0.14 to 0.47    2.2
#       regret 0 to 0.38       3.6
# fp32  mean   0 to 7e-6       0.13     a small random Gemma 3, which shows faults less than real weights do
#
# A text alone or in front of more, bf16: right to 0.05 and p99 0.17 there; 0.066 and 0.30 over three and four ranks on
# an H200 (SmolLM2, Gemma 3 270M), as NCCL adds longer messages up in another order; with entries swapped 1.0 and 5.2.
LINES: Mapping[str, Lines] = {
    "float32": Lines(mean=1e-4, p99=1e-3, regret=1e-3, drift_mean=1e-4, drift_p99=1e-3),
    "bfloat16": Lines(mean=0.15, p99=0.75, regret=1.0, drift_mean=0.1, drift_p99=0.5),
}
