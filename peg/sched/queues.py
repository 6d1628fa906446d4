"""Who runs and who waits, in order."""

from __future__ import annotations

from bisect import bisect_left, insort

from peg.sched.sequence import NO_ROW, Sequence


def _order(sequence: Sequence) -> tuple[int, int]:
    """Who goes first, and is preempted last: by priority, smaller first, then by arrival, which sequence ids count."""
    return sequence.request.priority, sequence.seq_id


class Queues:
    """The open sequences: those with a row in `running`, the others in `waiting`. Owned by the loop."""

    def __init__(self) -> None:
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []

    def wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_order)

    def run(self, sequence: Sequence) -> None:
        insort(self.running, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        queue = self.waiting if sequence.row == NO_ROW else self.running
        place = bisect_left(queue, _order(sequence), key=_order)
        assert queue[place] is sequence, f"sequence {sequence.seq_id} is not where its row {sequence.row} says"
        del queue[place]
