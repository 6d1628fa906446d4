"""One command that every rank carries out before any gets the next."""

from __future__ import annotations

import threading

from peg.errors import RankError, UsageError


class Lockstep:
    """Who has not carried it out yet. Guarded by the group's lock; whoever started it waits for `over`."""

    def __init__(self, world_size: int) -> None:
        self.waiting = set(range(world_size))
        self.over = threading.Event()
        self.error: UsageError | RankError | None = None

    def done(self, rank: int) -> None:
        """A rank has carried it out."""
        self.waiting.discard(rank)
        if not self.waiting:
            self.end()

    def end(self, error: UsageError | RankError | None = None) -> None:
        """It is over, for all or because of an error; the first one stays."""
        self.error = self.error or error
        self.over.set()
