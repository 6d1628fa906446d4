"""Which rows are in use on one rank, how many tokens each has stored, and in which blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from peg.plan import StepPlan


class RowTables:
    """The rows of one rank, kept by itself from the changes that plans bring. Owned by the rank's thread.

    `stored` int64 [rows] counts the tokens that each row has in the caches; it moves when they were stored.
    `blocks` has an int32 [rows, W] block table per KV group; entries past a row's length are what was there before.
    """

    def __init__(self, num_rows: int, num_groups: int, max_blocks: int) -> None:
        self.stored: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.blocks: list[npt.NDArray[np.int32]] = [
            np.zeros((num_rows, max_blocks), np.int32) for _ in range(num_groups)
        ]
        self._used = [False] * num_rows

    @property
    def free_rows(self) -> int:
        return self._used.count(False)

    def apply(self, plan: StepPlan) -> None:
        """Released rows, then new rows, then changes of tables."""
        for row in plan.released_rows:
            assert self._used[row], f"row {row} is released but not in use"
            self._used[row] = False
        for new in plan.new_rows:
            assert not self._used[new.row], f"row {new.row} is taken but in use"
            self._used[new.row] = True
            self.stored[new.row] = 0
            for group, table in enumerate(new.tables):
                self.blocks[group][new.row, : len(table)] = table
        for change in plan.table_changes:
            assert self._used[change.row], f"row {change.row} gets blocks but is not in use"
            end = change.index + len(change.block_ids)
            self.blocks[change.group][change.row, change.index : end] = change.block_ids

    def advance(self, rows: Sequence[int], counts: Sequence[int]) -> list[int]:
        """These rows stored so many tokens more; how many each has now."""
        self.stored[rows] += counts
        return [int(self.stored[row]) for row in rows]
