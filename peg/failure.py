"""What can go wrong and how it is told: states, causes, heartbeats, and the faults that injection makes.

Frozen values, made on one thread and read on any. Nothing here knows torch.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias


class EngineState(enum.StrEnum):
    """The life of an engine: DESIGN's state machine, any state may become BROKEN."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    BROKEN = "broken"
    REBUILDING = "rebuilding"


class CauseKind(enum.StrEnum):
    """What was found. One word each, used in logs, health and metrics."""

    RANK_RAISED = "rank_raised"
    RANK_DIVERGED = "rank_diverged"
    RANK_DIED = "rank_died"
    COMM_ERROR = "comm_error"
    STEP_DEADLINE = "step_deadline"
    PICKUP_DEADLINE = "pickup_deadline"
    STARTUP_DEADLINE = "startup_deadline"
    STARTUP_FAILED = "startup_failed"
    LOOP_FAILED = "loop_failed"
    SUPERVISOR_FAILED = "supervisor_failed"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why the engine failed, as found at first hand. Plain strings, so that nothing on a device is kept alive."""

    kind: CauseKind
    message: str
    rank: int | None = None
    step: int | None = None
    phase: str | None = None
    traceback: str = ""
    at_s: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        where = [f"{name} {value}" for name, value in (("rank", self.rank), ("step", self.step)) if value is not None]
        place = f" ({', '.join(where)})" if where else ""
        return f"{self.kind}{place}: {self.message}"


FailureCallback: TypeAlias = Callable[[Cause], None]
"""How a rank tells the supervisor. Any thread; returns at once; never raises."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Where one rank is: written by the rank's thread, read by the supervisor.

    `step` is the step it works on or did last, -1 before the first; `since_s` is when it entered the phase
    (time.monotonic).
    """

    rank: int
    phase: str
    step: int
    since_s: float


class FaultKind(enum.StrEnum):
    """What fault injection can do to a rank."""

    RAISE = "raise"
    STALL = "stall"


class FaultPoint(enum.StrEnum):
    """Where in a step a fault strikes."""

    BEFORE = "before"
    INSIDE = "inside"
    AFTER = "after"


@dataclass(frozen=True, slots=True)
class Fault:
    """One injected fault: strikes `rank` in the `after_steps`-th step from now on, at `point` of a collective."""

    kind: FaultKind
    rank: int
    after_steps: int
    point: FaultPoint = FaultPoint.BEFORE
