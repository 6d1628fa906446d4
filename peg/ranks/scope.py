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

    With peers, whatever stops one rank leaves the others in a collective: engine. So does a failure before the
    forward, when the rank no longer knows its rows and tables; one of a step with a decode slice; what the communicator
    says; and what is no ordinary exception.
    """
    ordinary = isinstance(error, Exception) and not isinstance(error, CommAborted | CommMismatch | RankDiverged)
    alone = world_size == 1
    own_work = phase in (StepPhase.FORWARD, StepPhase.SCORE, StepPhase.SAMPLE, StepPhase.READ)
    return Scope.REQUEST if ordinary and alone and own_work and not has_decode else Scope.ENGINE
