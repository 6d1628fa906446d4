"""Row numbers: a running sequence's place in the ranks' tables and sampling state."""

from __future__ import annotations


class RowPool:
    """Hands out rows 0 … num_rows - 1, and remembers which of those given back the ranks still have. Loop only."""

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows - 1, -1, -1))  # a stack, lowest row on top
        self._unreleased: list[int] = []

    @property
    def free_rows(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def give(self, row: int) -> None:
        """A row that the ranks know: the next plan releases it, before it brings new rows."""
        self._free.append(row)
        self._unreleased.append(row)

    def give_unknown(self, row: int) -> None:
        """A row that no rank was ever told of."""
        self._free.append(row)

    def release(self) -> tuple[int, ...]:
        """The rows for the next plan to release."""
        released = tuple(self._unreleased)
        self._unreleased.clear()
        return released

    def unrelease(self, rows: tuple[int, ...]) -> None:
        """The plan that released these was taken back: another one has to."""
        self._unreleased[:0] = rows
