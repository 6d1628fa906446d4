"""The steps that are issued and not committed, and what returns to the pools with each of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from peg.plan import StepPlan
from peg.sched.memory import Blocks, KVMemory
from peg.sched.rows import RowPool
from peg.sched.sequence import NO_ROW, Sequence


@dataclass(slots=True)
class Issued:
    """One step that is out: its plan, the sequence of each slice, and what it is the last to hold."""

    plan: StepPlan
    sequences: list[Sequence]
    blocks: Blocks = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


class Flight:
    """The steps that are out, oldest first. Owned by the loop.

    A step holds every block and row that its plan names. What a sequence gives up goes back when the last issued
    step that names it has landed, never earlier, so nobody has to reason about the order of streams.
    """

    def __init__(self, memory: KVMemory, rows: RowPool) -> None:
        self._memory = memory
        self._rows = rows
        self._out: deque[Issued] = deque()

    def __len__(self) -> int:
        return len(self._out)

    def names(self, sequence: Sequence) -> bool:
        """Whether a step that is out names the sequence."""
        return bool(self._out) and sequence.last_step >= self._out[0].plan.step

    def issue(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        self._out.append(Issued(plan, sequences))

    def give_up(self, sequence: Sequence, blocks: Blocks, row: int = NO_ROW) -> None:
        """The sequence needs these no more: they go back with the last step that names it, at once if none is out."""
        for issued in self._out:
            if issued.plan.step == sequence.last_step:
                issued.blocks += blocks
                if row != NO_ROW:
                    issued.rows.append(row)
                return
        self._memory.give(blocks)
        if row != NO_ROW:
            self._rows.give(row)

    def land(self, step: int) -> Issued:
        """The oldest step is done: what it was the last to hold goes back."""
        issued = self._out.popleft()
        assert issued.plan.step == step, f"step {step} came back, step {issued.plan.step} is the oldest that is out"
        self._memory.give(issued.blocks)
        for row in issued.rows:
            self._rows.give(row)
        return issued

    def recall(self) -> Issued | None:
        """Take back the oldest step that is out, which no rank has applied anything of; None where none is out."""
        if not self._out:
            return None
        issued = self._out.popleft()
        self._rows.unrelease(issued.plan.released_rows)
        self._memory.give(issued.blocks)
        unknown = {new.row for new in issued.plan.new_rows}
        for row in issued.rows:
            if row in unknown:
                self._rows.give_unknown(row)
            else:
                self._rows.give(row)
        return issued
