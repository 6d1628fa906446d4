"""Block ids of one KV group."""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    """Hands out the block ids 1 … num_blocks - 1; block 0 is reserved for padding rows. Owned by the loop.

    A block counts how many hold it, so that a prefix may come to be shared; it is free when that is zero.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, num_blocks
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))  # a stack, lowest id on top
        self._holders = [0] * num_blocks

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - 1 - len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free blocks, each with one holder from now on. The caller has looked that they are there."""
        assert 0 <= count <= len(self._free), (count, len(self._free))
        if not count:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        for block in taken:
            self._holders[block] = 1
        return taken

    def give(self, block_ids: Sequence[int]) -> None:
        """One holder fewer for each block; a block without a holder is free.

        The first of them is the next to be taken, so that what was consecutive is so again: a CPU reads it in place.
        """
        for block in reversed(block_ids):
            holders = self._holders[block] - 1
            assert holders >= 0, f"block {block} given back, held by nobody"
            self._holders[block] = holders
            if holders == 0:
                self._free.append(block)
