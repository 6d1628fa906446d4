"""The steps that are issued and not committed, and what returns to the pools with each of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from peg.plan import StepPlan
from peg.sched.memory import KVMemory
from peg.sched.rows import RowPool
from peg.sched.sequence import NO_ROW, Sequence
from peg.sched.tables import Blocks


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
        self.memory = memory
        self.rows = rows
        self._out: deque[Issued] = deque()

    def __len__(self) -> int:
        return len(self._out)

    def names(self, sequence: Sequence) -> bool:
        """Whether a step that is out names the sequence."""
        return bool(self._out) and sequence.last_step >= self._out[0].plan.step

    def issue(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        self._out.append(Issued(plan, sequences))

    def give_up_passed(self, sequence: Sequence) -> None:
        """The sequence gives up what lies behind its windows, as its committed frontier has it."""
        if self.memory.slides and (passed := self.memory.take_passed(sequence.tables, sequence.committed)):
            self._give_up(sequence.last_step, passed, NO_ROW)

    def give_up_all(self, sequence: Sequence) -> None:
        """The sequence gives up its blocks and its row; `row` still says which it was."""
        self._give_up(sequence.last_step, sequence.tables.take_all(), sequence.row)

    def _give_up(self, last_step: int, blocks: Blocks, row: int) -> None:
        for issued in self._out:
            if issued.plan.step == last_step:
                issued.blocks += blocks
                if row != NO_ROW:
                    issued.rows.append(row)
                return
        self.memory.give(blocks)
        if row != NO_ROW:
            self.rows.give(row)

    def land(self, step: int) -> Issued:
        """The oldest step is back: what it was the last to hold returns."""
        issued = self._out.popleft()
        assert issued.plan.step == step, f"step {step} came back, step {issued.plan.step} is the oldest that is out"
        self._return(issued, unsent_rows=frozenset())
        return issued

    def recall(self) -> list[Sequence]:
        """Take back every step that is out: the ranks skip them whole.

        A sequence that is still open is as it was before the step: frontier and tables, and no row where the step
        was to bring it one. Those without a row are returned.
        """
        rowless: list[Sequence] = []
        while self._out:
            issued = self._out.pop()
            brought = frozenset(new.row for new in issued.plan.new_rows)
            for piece, sequence in zip(issued.plan.slices, issued.sequences, strict=True):
                if sequence.finished:
                    continue  # it gave up what it held when it ended
                if piece.row in brought:
                    issued.blocks += sequence.tables.take_all()
                    issued.rows.append(piece.row)
                    rowless.append(sequence)
                else:
                    sequence.planned = piece.start
                    grown = [change for change in issued.plan.table_changes if change.row == piece.row]
                    issued.blocks += sequence.tables.take_back(grown)
            self._return(issued, unsent_rows=brought)
            self.rows.unrelease(issued.plan.released_rows)
        return rowless

    def _return(self, issued: Issued, unsent_rows: frozenset[int]) -> None:
        self.memory.give(issued.blocks)
        for row in issued.rows:
            self.rows.give(row, sent=row not in unsent_rows)
