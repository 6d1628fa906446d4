"""The fault table as data: which faults there are, where they can strike, and what must come of each."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from peg.failure import CauseKind, FaultKind, FaultPlace, FaultPoint


class Phase(enum.StrEnum):
    """What the engine does when the fault strikes."""

    LOAD = "load"
    WARM_UP = "warm_up"
    PREFILL = "prefill"
    SCORED = "scored"
    CHUNK = "chunk"
    MIXED = "mixed"
    DECODE = "decode"
    PIPELINED = "pipelined"
    DRAIN = "drain"
    REBUILD = "rebuild"


class Outcome(enum.StrEnum):
    """How it must end. `LEFT_BEHIND`: with 70, by force, as a thread did not come back."""

    REQUEST = "only the request fails"
    REBUILT = "rebuilt"
    EXIT = "exit 70"
    LEFT_BEHIND = "exit 70, a thread left behind"


STARTING = (Phase.LOAD, Phase.WARM_UP)
PREFILLS = (Phase.PREFILL, Phase.SCORED, Phase.CHUNK)
PLACES: Mapping[Phase, FaultPlace] = {
    Phase.LOAD: FaultPlace.LOAD,
    Phase.WARM_UP: FaultPlace.WARM_UP,
    Phase.REBUILD: FaultPlace.CONNECT,
}
POLICIES = ("exit", "rebuild")
EVERYWHERE = (FaultKind.RAISE, FaultKind.STALL)  # these vary over every rank and point
COLLECTIVE = (FaultKind.SKIP, FaultKind.EXTRA, FaultKind.WRONG_SHAPE)
TOLD = (FaultKind.WRONG_TOKEN, FaultKind.WRONG_DIGEST)
READ = (*TOLD, FaultKind.UNREADABLE)
RAISES = (FaultKind.RAISE, FaultKind.MEMORY_ERROR, FaultKind.ABORT_HANGS, FaultKind.ABORT_RAISES)
STANDS_STILL = (FaultKind.STALL, FaultKind.SPIN, FaultKind.HANG)
FOR_EVER = (FaultKind.SPIN, FaultKind.HANG)
ENGINE_WIDE = (FaultKind.LOOP_RAISES, FaultKind.SUPERVISOR_RAISES)


@dataclass(frozen=True)
class Cell:
    """One fault, in one phase of one engine. `policy` is what --on-failure says."""

    kind: FaultKind
    phase: Phase
    world_size: int
    rank: int
    point: FaultPoint
    policy: str

    def __str__(self) -> str:
        place = f"rank{self.rank}of{self.world_size}"
        return f"{self.kind}-{self.phase}-{place}-{self.point}-{self.policy}"

    @property
    def place(self) -> FaultPlace:
        return PLACES.get(self.phase, FaultPlace.STEP)

    @property
    def outcome(self) -> Outcome:
        if self.kind is FaultKind.UNREADABLE:
            return Outcome.REQUEST
        if self.world_size == 1 and self.phase in PREFILLS and self.kind in RAISES:
            return Outcome.REQUEST
        hangs_in_abort = self.kind is FaultKind.ABORT_HANGS and self.phase is not Phase.LOAD
        if self.kind in FOR_EVER or hangs_in_abort:
            return Outcome.LEFT_BEHIND
        never = (FaultKind.DIE, FaultKind.SUPERVISOR_RAISES, FaultKind.ABORT_RAISES)
        late = self.phase in (*STARTING, Phase.DRAIN, Phase.REBUILD)
        return Outcome.EXIT if self.policy == "exit" or self.kind in never or late else Outcome.REBUILT

    @property
    def causes(self) -> tuple[CauseKind, ...]:
        """What the first cause may be. More than one where it depends on who is quicker."""
        if self.phase is Phase.REBUILD:
            return (CauseKind.RANK_RAISED,)  # that of the fault before, which stays the first
        starting = self.phase in STARTING
        match self.kind:
            case FaultKind.DIE:
                return (CauseKind.RANK_DIED,)
            case FaultKind.LOOP_RAISES:
                return (CauseKind.LOOP_FAILED,)
            case FaultKind.SUPERVISOR_RAISES:
                return (CauseKind.SUPERVISOR_FAILED,)
            case FaultKind.COMM_ERROR:
                return (CauseKind.COMM_ERROR,)
            case FaultKind.WRONG_TOKEN | FaultKind.WRONG_DIGEST:
                return (CauseKind.RANK_DIVERGED,)
            case kind if kind in COLLECTIVE:
                found = (CauseKind.COMM_ERROR, CauseKind.RANK_DIVERGED, CauseKind.STEP_DEADLINE)
                return (CauseKind.STARTUP_FAILED,) if starting else found
            case kind if kind in STANDS_STILL:
                return (CauseKind.STARTUP_DEADLINE if starting else CauseKind.STEP_DEADLINE,)
            case _:
                return (CauseKind.STARTUP_FAILED if starting else CauseKind.RANK_RAISED,)

    @property
    def names_rank(self) -> bool:
        """Whether the cause must say which rank it was."""
        outvoted = self.world_size > 2 and self.kind in TOLD  # of two that differ nobody knows which is wrong
        return self.kind in (*RAISES, *STANDS_STILL, FaultKind.DIE) or outvoted

    @property
    def names_step(self) -> bool:
        """Whether the cause must say which step it was."""
        return self.place is FaultPlace.STEP and self.kind not in (*ENGINE_WIDE, FaultKind.COMM_ERROR)


def cells() -> list[Cell]:
    """Every cell that exists."""
    return [cell for cell, reason in table() if reason is None]


def table() -> Iterator[tuple[Cell, str | None]]:
    """Every combination, with the reason why it does not exist, None where it does."""
    for kind, phase, world_size, policy in product(FaultKind, Phase, (1, 2, 3), POLICIES):
        ranks = range(world_size) if kind in EVERYWHERE else (world_size // 2,)
        points = tuple(FaultPoint) if kind in EVERYWHERE else (FaultPoint.BEFORE,)
        for rank, (index, point) in product(ranks, enumerate(points)):
            cell = Cell(kind, phase, world_size, rank, point, policy)
            yield cell, why_not(cell) or _takes_turns(cell, index)


def _takes_turns(cell: Cell, index: int) -> str | None:
    """Where there are many cells, each has one of the policies, and all policies have cells."""
    if cell.kind in EVERYWHERE:
        turn = cell.rank + index
    elif cell.kind in FOR_EVER:
        turn = cell.world_size + list(Phase).index(cell.phase)
    else:
        return None
    other = replace(cell, policy=other_policy(cell.policy))
    its_turn = POLICIES[turn % 2] == cell.policy or why_not(other) is not None
    return None if its_turn else "the policies take turns over ranks, points and phases"


def other_policy(policy: str) -> str:
    return POLICIES[1 - POLICIES.index(policy)]


def why_not(cell: Cell) -> str | None:
    """Why there is no such cell, None if there is."""
    kind, phase = cell.kind, cell.phase
    if kind is FaultKind.SEIZE:
        return "nothing of this process would run any more, the test included: it is run as a process"
    if phase is Phase.REBUILD and cell.policy == "exit":
        return "nothing is rebuilt"
    if phase in (*STARTING, Phase.DRAIN) and cell.policy == "rebuild":
        return "what is not READY is never rebuilt: the same as exit"
    if phase in (Phase.LOAD, Phase.REBUILD) and cell.point is not FaultPoint.BEFORE:
        return "there is no collective in it, so its points are one"
    if phase in (Phase.LOAD, Phase.REBUILD) and kind in COLLECTIVE:
        return "there is no collective in it"
    if kind in (*COLLECTIVE, *TOLD) and cell.world_size == 1:
        return "one rank has no peers to differ from"
    if kind in READ and cell.place is not FaultPlace.STEP:
        return "ranks tell what they did only after steps"
    if kind in (FaultKind.WRONG_TOKEN, FaultKind.UNREADABLE) and phase is Phase.CHUNK:
        return "it samples nothing"
    return _why_not_there(kind, phase)


def _why_not_there(kind: FaultKind, phase: Phase) -> str | None:
    if kind is FaultKind.LOOP_RAISES and phase in PLACES:
        return "the loop issues no step then"
    if kind is FaultKind.SUPERVISOR_RAISES and phase is Phase.WARM_UP:
        return "the supervisor looks at all phases of the start alike: the cell of load"
    if kind is FaultKind.SUPERVISOR_RAISES and phase is Phase.REBUILD:
        return "the supervisor rebuilds, and looks at nothing meanwhile"
    if kind is FaultKind.COMM_ERROR and phase in PLACES:
        return "it is looked for once the engine is READY: the cells of steps"
    if kind in (FaultKind.ABORT_HANGS, FaultKind.ABORT_RAISES) and phase is Phase.LOAD:
        return "there is no communicator to abort"
    return None
