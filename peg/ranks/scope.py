"""What is whose failure."""

from __future__ import annotations

import enum

from peg.errors import CommAborted, CommMismatch, RankDiverged
from peg.ranks.runner import StepPhase


class Scope(enum.StrEnum):
    """Whom a failure costs: the sequences of one step, or everyone."""

    REQUEST = "request"
    ENGINE = "engine"


def failure_scope(*, has_decode: bool, phase: str, world_size: int, error: BaseException) -> Scope:
    """The scope of an exception on a rank during a step; `phase` is its heartbeat's.

    Once every collective of the step was issued, as it is when its outcome is read, only what the rank had to tell is
    lost: request, whatever the step was. Before that, whatever stops one rank leaves its peers in a collective: engine.
    So does a failure before the forward, when the rank no longer knows its rows and tables; one of a step with a decode
    slice; what the communicator says; and what is no ordinary exception.
    """
    ordinary = isinstance(error, Exception) and not isinstance(error, CommAborted | CommMismatch | RankDiverged)
    if ordinary and phase == StepPhase.READ:
        return Scope.REQUEST
    alone = world_size == 1
    own_work = phase in (StepPhase.FORWARD, StepPhase.SCORE, StepPhase.SAMPLE)
    return Scope.REQUEST if ordinary and alone and own_work and not has_decode else Scope.ENGINE
