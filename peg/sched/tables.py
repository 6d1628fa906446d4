"""Block tables: where one sequence's tokens lie, in each KV group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from peg.plan import TableChange

Blocks: TypeAlias = list[tuple[int, list[int]]]
"""Block ids by group: what a sequence gives up at one time."""

BOUNDLESS = 1 << 62


class BlockTables:
    """One sequence's block table in each group. Entry i is positions i·B to i·B + B - 1. Owned by the loop.

    The first `passed[group]` entries lie behind the window and were given up; they are 0. The table of a recurrent
    group, one not in `paged`, stays empty. `room` is the number of tokens that all tables hold. `unsent` is how they
    grew since a plan last named the sequence: (group, index, block ids).
    """

    __slots__ = ("_block_size", "_paged", "passed", "room", "tables", "unsent")

    def __init__(self, num_groups: int, paged: tuple[int, ...], block_size: int) -> None:
        self._paged = paged
        self._block_size = block_size
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.passed = [0] * num_groups
        self.unsent: list[tuple[int, int, tuple[int, ...]]] = []
        self.room = 0
        self._measure()

    def fill(self, blocks: Blocks) -> None:
        """The first blocks of a sequence; its new row tells the ranks of them."""
        for group, ids in blocks:
            self.tables[group] += ids
        self._measure()

    def extend(self, blocks: Blocks) -> None:
        """More blocks; the next plan that names the sequence tells the ranks of them."""
        for group, ids in blocks:
            self.unsent.append((group, len(self.tables[group]), tuple(ids)))
            self.tables[group] += ids
        self._measure()

    def take_passed(self, group: int, passed: int) -> list[int]:
        """Give up the first `passed` entries: those of them that were still held."""
        table, before = self.tables[group], self.passed[group]
        taken = table[before:passed]
        table[before:passed] = [0] * len(taken)
        self.passed[group] = passed
        return taken

    def take_back(self, changes: Iterable[TableChange]) -> Blocks:
        """Undo the latest growth, which these changes told of."""
        assert not self.unsent, "the tables have grown since"
        taken: Blocks = []
        for change in changes:
            table = self.tables[change.group]
            taken.append((change.group, table[change.index :]))
            del table[change.index :]
        self._measure()
        return taken

    def take_all(self) -> Blocks:
        """Empty the tables of all that they hold."""
        taken = [(group, self.tables[group][self.passed[group] :]) for group in self._paged]
        for group in self._paged:
            self.tables[group].clear()
            self.passed[group] = 0
        self.unsent.clear()
        self._measure()
        return taken

    def _measure(self) -> None:
        held = [len(self.tables[group]) for group in self._paged]
        self.room = min(held) * self._block_size if held else BOUNDLESS
