"""Row numbers: a running sequence's place in the ranks' tables and sampling state."""

from __future__ import annotations


class RowPool:
    """Hands out rows 0 … num_rows - 1, and remembers which of those given back the ranks still have. Loop only."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))  # a stack, lowest row on top
        self._unreleased: list[int] = []

    @property
    def free_rows(self) -> int:
        return len(self._free)

    @property
    def used_rows(self) -> int:
        return self.num_rows - len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def give(self, row: int, *, sent: bool = True) -> None:
        """Free again. Where the ranks were told of the row, the next plan tells them that it is released."""
        self._free.append(row)
        if sent:
            self._unreleased.append(row)

    def release(self) -> tuple[int, ...]:
        """The rows for the next plan to release."""
        released = tuple(self._unreleased)
        self._unreleased.clear()
        return released

    def unrelease(self, rows: tuple[int, ...]) -> None:
        """The plan that released these was taken back: another one has to."""
        self._unreleased[:0] = rows
