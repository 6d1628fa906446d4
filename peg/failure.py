"""What can go wrong and how it is told: states, causes, heartbeats, and the faults that injection makes.

Frozen values, made on one thread and read on any. Nothing here knows torch.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping
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
    OPERATOR_STOP = "operator_stop"
    OPERATOR_REBUILD = "operator_rebuild"


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
    (time.monotonic). `waits`: it sleeps in a collective until its peers come, so it holds nobody up.
    """

    rank: int
    phase: str
    step: int
    since_s: float
    waits: bool = False


class FaultKind(enum.StrEnum):
    """What fault injection can do. `FAULT_EFFECTS` says it in words."""

    RAISE = "raise"
    MEMORY_ERROR = "memory_error"
    STALL = "stall"
    SPIN = "spin"
    HANG = "hang"
    SEIZE = "seize"
    DIE = "die"
    SKIP = "skip_collective"
    EXTRA = "extra_collective"
    WRONG_SHAPE = "wrong_shape"
    WRONG_TOKEN = "wrong_token"
    WRONG_DIGEST = "wrong_digest"
    UNREADABLE = "unreadable"
    ABORT_HANGS = "abort_hangs"
    ABORT_RAISES = "abort_raises"
    COMM_ERROR = "comm_error"
    LOOP_RAISES = "loop_raises"
    SUPERVISOR_RAISES = "supervisor_raises"


FAULT_EFFECTS: Mapping[FaultKind, str] = {
    FaultKind.RAISE: "the rank raises",
    FaultKind.MEMORY_ERROR: "the rank raises MemoryError",
    FaultKind.STALL: "the rank stands still until its communicator is aborted",
    FaultKind.SPIN: "the rank runs for ever in a Python loop",
    FaultKind.HANG: "the rank waits for ever in a call that releases the interpreter lock",
    FaultKind.SEIZE: "the rank waits for ever in a call that keeps the interpreter lock: only the deadman is left",
    FaultKind.DIE: "the rank's thread ends",
    FaultKind.SKIP: "the rank leaves one collective out",
    FaultKind.EXTRA: "the rank issues one collective too many",
    FaultKind.WRONG_SHAPE: "the rank issues a collective of another shape",
    FaultKind.WRONG_TOKEN: "the rank tells another sampled id",
    FaultKind.WRONG_DIGEST: "the rank tells that it stored something else",
    FaultKind.UNREADABLE: "the rank cannot read what came of the step",
    FaultKind.ABORT_HANGS: "the rank raises, and the abort of its communicator never returns",
    FaultKind.ABORT_RAISES: "the rank raises, and the helper that aborts its communicator fails",
    FaultKind.COMM_ERROR: "the rank's communicator reports an asynchronous error",
    FaultKind.LOOP_RAISES: "the engine's own task fails as it issues the step",
    FaultKind.SUPERVISOR_RAISES: "the supervisor fails as it looks at the ranks",
}


class FaultPlace(enum.StrEnum):
    """What a rank does when a fault strikes it."""

    STEP = "step"
    LOAD = "load"
    CONNECT = "connect"
    WARM_UP = "warm_up"
    MAKE_CACHE = "make_cache"


class FaultPoint(enum.StrEnum):
    """Where a fault strikes: at the first collective, or at the end where there is none."""

    BEFORE = "before"
    INSIDE = "inside"
    AFTER = "after"


@dataclass(frozen=True, slots=True)
class Fault:
    """One injected fault. It strikes once.

    In a step it is the `after_steps`-th to be issued from now on; elsewhere the next time that the rank is there.
    """

    kind: FaultKind
    rank: int
    after_steps: int = 1
    point: FaultPoint = FaultPoint.BEFORE
    place: FaultPlace = FaultPlace.STEP
