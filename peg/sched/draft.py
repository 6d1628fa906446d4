"""A step plan while it is being made."""

from __future__ import annotations

from peg.plan import NewRow, Slice, StepPlan, TableChange
from peg.sched.sequence import Sequence


class Draft:
    """Collects slices under the token budget. Lives for one call of the planner."""

    def __init__(self, step: int, budget_tokens: int) -> None:
        self.step = step
        self.budget_tokens = budget_tokens
        self.sequences: list[Sequence] = []
        self._slices: list[Slice] = []
        self._new_rows: list[NewRow] = []
        self._changes: list[TableChange] = []

    def admit(self, sequence: Sequence) -> None:
        """The sequence takes its row with this step."""
        self._new_rows.append(sequence.new_row())

    def add(self, sequence: Sequence, count: int) -> None:
        """The next `count` tokens of the sequence, and what its tables have grown by since a plan named it."""
        self._slices.append(sequence.slice(count))
        self.sequences.append(sequence)
        self.budget_tokens -= count
        sequence.planned += count
        sequence.last_step = self.step
        unsent = sequence.tables.unsent
        if unsent:
            self._changes += [TableChange(sequence.row, *growth) for growth in unsent]
            unsent.clear()

    def plan(self, epoch: int, released_rows: tuple[int, ...], failures_seen: int) -> StepPlan:
        return StepPlan(
            step=self.step,
            epoch=epoch,
            slices=tuple(self._slices),
            released_rows=released_rows,
            new_rows=tuple(self._new_rows),
            table_changes=tuple(self._changes),
            failures_seen=failures_seen,
        )
