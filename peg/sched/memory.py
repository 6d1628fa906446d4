"""KV memory of all groups together: a sequence gets blocks in every group, or in none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from peg.plan import Full, GroupCapacity, Recurrent, SlidingWindow, TableChange
from peg.sched.blocks import BlockPool

Blocks: TypeAlias = list[tuple[int, list[int]]]
"""Block ids by group: what a sequence gives up at one time."""


class BlockTables:
    """One sequence's block table in each group. Entry i is positions i·B to i·B + B - 1; 0 was given back.

    `room` is the number of tokens that all tables hold, `firsts` the first entry of each that is still held, and
    `unsent` what the ranks have not been told: (group, index, block ids).
    """

    __slots__ = ("firsts", "room", "tables", "unsent")

    def __init__(self, num_groups: int) -> None:
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.firsts = [0] * num_groups
        self.unsent: list[tuple[int, int, tuple[int, ...]]] = []
        self.room = 0

    def take_all(self) -> Blocks:
        """Empty the tables; what was in them is the caller's."""
        both = zip(self.tables, self.firsts, strict=True)
        held = [(group, table[first:]) for group, (table, first) in enumerate(both) if table]
        for table in self.tables:
            table.clear()
        self.firsts = [0] * len(self.tables)
        self.unsent.clear()
        self.room = 0
        return held


@dataclass(frozen=True, slots=True)
class _Paged:
    """One group that has blocks: its place among the groups, its pool, and its window or None."""

    index: int
    pool: BlockPool
    window: int | None
    name: str


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """How much of one group's memory is taken: in blocks, or in state rows for a recurrent group."""

    kind: str
    used: int
    total: int


class KVMemory:
    """The pools of all groups. Every method changes all of them, or none. Owned by the loop."""

    def __init__(self, capacities: tuple[GroupCapacity, ...], block_size: int) -> None:
        self._block_size = block_size
        self._groups = tuple(capacity.group for capacity in capacities)
        self._paged: list[_Paged] = []
        for index, capacity in enumerate(capacities):
            match capacity.group:
                case Full():
                    name = f"KV group {index} (full attention)"
                    self._paged.append(_Paged(index, BlockPool(capacity.num_blocks), None, name))
                case SlidingWindow(window=window):
                    name = f"KV group {index} (sliding window of {window})"
                    self._paged.append(_Paged(index, BlockPool(capacity.num_blocks), window, name))
        self._windowed = [(paged.index, paged.window) for paged in self._paged if paged.window is not None]

    def new_tables(self) -> BlockTables:
        return BlockTables(len(self._groups))

    def why_never(self, tokens: int, chunk: int) -> str | None:
        """Why a sequence of `tokens`, prefilled in chunks of up to `chunk`, could not even run alone; or None."""
        for paged in self._paged:
            needed = self._blocks(tokens)
            if paged.window is not None:
                needed = min(needed, self._blocks(paged.window + min(chunk, tokens)) + 1)
            there = paged.pool.num_blocks - 1
            if needed > there:
                return f"{tokens} tokens need {needed} blocks of {self._block_size} in {paged.name}, which has {there}"
        return None

    def admit(self, tables: BlockTables, tokens: int, chunk: int, spare_blocks: int) -> bool:
        """Blocks for a whole text, behind a window for its first chunk, leaving `spare_blocks` free in each pool."""
        wanted = [self._blocks(tokens if paged.window is None else chunk) for paged in self._paged]
        if any(want + spare_blocks > paged.pool.free_blocks for want, paged in zip(wanted, self._paged, strict=True)):
            return False
        for want, paged in zip(wanted, self._paged, strict=True):
            tables.tables[paged.index] = paged.pool.take(want)
        self._measure(tables)
        return True

    def reach(self, tables: BlockTables, tokens: int) -> int:
        """How many tokens, up to `tokens`, the tables could hold with what is free."""
        for paged in self._paged:
            blocks = len(tables.tables[paged.index]) + paged.pool.free_blocks
            tokens = min(tokens, blocks * self._block_size)
        return tokens

    def grow(self, tables: BlockTables, tokens: int) -> bool:
        """Make room for `tokens` in all; false, and nothing changes, where some group has too few blocks."""
        if tokens <= tables.room:
            return True
        if self.reach(tables, tokens) < tokens:
            return False
        for paged in self._paged:
            table = tables.tables[paged.index]
            missing = self._blocks(tokens) - len(table)
            if missing > 0:
                added = paged.pool.take(missing)
                tables.unsent.append((paged.index, len(table), tuple(added)))
                table += added
        self._measure(tables)
        return True

    def behind_window(self, tables: BlockTables, frontier: int) -> Blocks:
        """Take out of the tables what no token from `frontier` on can see: (b + 1)·B + window ≤ frontier."""
        passed: Blocks = []
        for group, window in self._windowed:
            first = (frontier - window) // self._block_size
            held_from = tables.firsts[group]
            if first > held_from:
                table = tables.tables[group]
                passed.append((group, table[held_from:first]))
                table[held_from:first] = [0] * (first - held_from)
                tables.firsts[group] = first
        return passed

    def take_back(self, tables: BlockTables, changes: Iterable[TableChange]) -> None:
        """Undo the growth that these changes told of, and any that came after it."""
        for change in changes:
            table = tables.tables[change.group]
            self.give([(change.group, table[change.index :])])
            del table[change.index :]
        tables.unsent = [growth for growth in tables.unsent if growth[1] < len(tables.tables[growth[0]])]
        self._measure(tables)

    def give(self, blocks: Blocks) -> None:
        """Back to the pools: no step that is still out names these blocks."""
        pools = {paged.index: paged.pool for paged in self._paged}
        for group, ids in blocks:
            pools[group].give(ids)

    def usage(self, used_rows: int, rows: int) -> tuple[GroupUsage, ...]:
        """One entry per group; a recurrent group has a state row for each row."""
        pools = {paged.index: paged.pool for paged in self._paged}
        return tuple(
            GroupUsage("recurrent", used_rows, rows)
            if isinstance(group, Recurrent)
            else GroupUsage(
                "full" if isinstance(group, Full) else "sliding_window",
                pools[index].used_blocks,
                pools[index].num_blocks - 1,
            )
            for index, group in enumerate(self._groups)
        )

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _measure(self, tables: BlockTables) -> None:
        lengths = [len(tables.tables[paged.index]) for paged in self._paged]
        tables.room = min(lengths) * self._block_size if lengths else 1 << 62
