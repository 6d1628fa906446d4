"""What the supervisor knows of the engine, as one reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from peg.failure import Cause, CauseKind, EngineState, Heartbeat


@dataclass(frozen=True, slots=True)
class Rebuild:
    """One time that the engine was rebuilt: the epoch that began, why, and how long clients were refused."""

    epoch: int
    cause: Cause
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """A reading of the supervisor: what is true of the engine whatever state it is in.

    `step_s` is how long the oldest step in flight has taken, None where there is none; `step_limit_s` what it may take.
    `failures` counts first causes by kind and rank.
    """

    state: EngineState
    epoch: int
    cause: Cause | None
    secondary: tuple[Cause, ...]
    heartbeats: tuple[Heartbeat, ...]
    step: int | None
    step_s: float | None
    step_limit_s: float
    failures: Mapping[tuple[CauseKind, int | None], int]
    rebuilt: tuple[Rebuild, ...]

    @property
    def stalled(self) -> bool:
        """Whether a step has taken more than half of what it may: nothing is known to be wrong, but little is right."""
        return self.step_s is not None and self.step_s > self.step_limit_s / 2
