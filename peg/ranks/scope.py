"""What is whose failure."""

from __future__ import annotations

import enum

from peg.errors import CommAborted, CommMismatch, RankDiverged
from peg.ranks.runner import StepPhase


class Scope(enum.StrEnum):
    """Whom a failure costs: the sequences of one step, or everyone."""

    REQUEST = "request"
    ENGINE = "engine"


def failure_scope(*, has_decode: bool, phase: StepPhase, world_size: int, error: BaseException) -> Scope:
    """The scope of an exception on a rank during a step.

    With peers, whatever stops one rank leaves the others in a collective: engine. So does what happens while the
    plan's rows and tables are applied, since the rank no longer knows them; what a decode slice was in; what the
    communicator said; and what is no ordinary exception.
    """
    ordinary = isinstance(error, Exception) and not isinstance(error, CommAborted | CommMismatch | RankDiverged)
    alone = world_size == 1
    prefill_only = not has_decode and phase is not StepPhase.ROWS
    return Scope.REQUEST if ordinary and alone and prefill_only else Scope.ENGINE
