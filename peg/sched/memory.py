"""KV memory of all groups together: a sequence gets blocks in every group, or in none."""

from __future__ import annotations

from dataclasses import dataclass

from peg.plan import GroupCapacity, Recurrent, SlidingWindow
from peg.sched.blocks import BlockPool
from peg.sched.tables import Blocks, BlockTables


@dataclass(frozen=True, slots=True)
class _Paged:
    """A group that has blocks: its place among all groups, its pool, and its window if it has one."""

    index: int
    pool: BlockPool
    window: int | None

    def __str__(self) -> str:
        kind = "full attention" if self.window is None else f"sliding window of {self.window}"
        return f"KV group {self.index} ({kind})"


class KVMemory:
    """The pools of all groups. Owned by the loop.

    A full group holds all of a sequence and takes the blocks of its text at once; a sliding one holds the window and
    the chunk being computed, and takes blocks as they are needed.
    """

    def __init__(self, capacities: tuple[GroupCapacity, ...], block_size: int) -> None:
        self._block_size = block_size
        self._num_groups = len(capacities)
        self._paged: list[_Paged] = []
        for index, capacity in enumerate(capacities):
            if not isinstance(capacity.group, Recurrent):
                window = capacity.group.window if isinstance(capacity.group, SlidingWindow) else None
                self._paged.append(_Paged(index, BlockPool(capacity.num_blocks), window))
        self._windows = [(paged.index, paged.window) for paged in self._paged if paged.window is not None]
        self.slides = bool(self._windows)
        self._pools = {paged.index: paged.pool for paged in self._paged}

    def new_tables(self) -> BlockTables:
        return BlockTables(self._num_groups, tuple(self._pools), self._block_size)

    def why_never(self, tokens: int, max_chunk: int) -> str | None:
        """Why a sequence of `tokens` could not even run alone, prefilled in chunks of up to `max_chunk`; or None."""
        for paged in self._paged:
            needed = self._blocks(tokens)
            if paged.window is not None:
                # Window and chunk start anywhere in a block, so they may touch one more.
                needed = min(needed, self._blocks(paged.window + min(max_chunk, tokens)) + 1)
            there = paged.pool.num_blocks - 1
            if needed > there:
                return f"{tokens} tokens need {needed} blocks of {self._block_size} in {paged}, which has {there}"
        return None

    def admit(self, tables: BlockTables, tokens: int, chunk: int, spare_blocks: int) -> bool:
        """Blocks for a text of `tokens` whose first `chunk` comes next, with `spare_blocks` left in each pool.

        False, and nothing changes, where some pool has too few.
        """
        wanted = [(paged, self._blocks(tokens if paged.window is None else chunk)) for paged in self._paged]
        if any(count + spare_blocks > paged.pool.free_blocks for paged, count in wanted):
            return False
        tables.fill([(paged.index, paged.pool.take(count)) for paged, count in wanted])
        return True

    def reach(self, tables: BlockTables, tokens: int) -> int:
        """How many tokens, up to `tokens`, the tables could hold with what is free."""
        for paged in self._paged:
            blocks = len(tables.tables[paged.index]) + paged.pool.free_blocks
            tokens = min(tokens, blocks * self._block_size)
        return tokens

    def grow(self, tables: BlockTables, tokens: int) -> bool:
        """Room for `tokens` in all; false, and nothing changes, where some pool has too few blocks."""
        if self.reach(tables, tokens) < tokens:
            return False
        missing = [(paged, self._blocks(tokens) - len(tables.tables[paged.index])) for paged in self._paged]
        tables.extend([(paged.index, paged.pool.take(count)) for paged, count in missing if count > 0])
        return True

    def take_passed(self, tables: BlockTables, frontier: int) -> Blocks:
        """Take out of the tables what no token from `frontier` on can see: (b + 1)·B + window ≤ frontier."""
        taken: Blocks = []
        for group, window in self._windows:
            passed = (frontier - window) // self._block_size
            if passed > tables.passed[group]:
                taken.append((group, tables.take_passed(group, passed)))
        return taken

    def give(self, blocks: Blocks) -> None:
        """Back to the pools. No step that is out may name these blocks."""
        for group, ids in blocks:
            self._pools[group].give(ids)

    def usage(self) -> tuple[tuple[int, int] | None, ...]:
        """Blocks in use and blocks in all, for each group; None for a recurrent one, which has no blocks."""
        pools = (self._pools.get(group) for group in range(self._num_groups))
        return tuple(None if pool is None else (pool.used_blocks, pool.num_blocks - 1) for pool in pools)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
