"""Waits with a deadline, and how long things took."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence


class Clock:
    """Runs from the moment it is made. Owned by the thread that made it."""

    def __init__(self, deadline_s: float) -> None:
        self._started_s = self._lap_s = time.monotonic()
        self._deadline_s = deadline_s
        self.laps: list[tuple[str, float]] = []

    @property
    def left_s(self) -> float:
        """Time until the deadline, not below zero."""
        return max(0.0, self._started_s + self._deadline_s - time.monotonic())

    def lap(self, name: str) -> None:
        """Note how long it took since the last lap."""
        now = time.monotonic()
        self.laps.append((name, now - self._lap_s))
        self._lap_s = now


def join_all(threads: Sequence[threading.Thread], deadline_s: float) -> bool:
    """Wait for threads to end; whether all did in time."""
    clock = Clock(deadline_s)
    for thread in threads:
        thread.join(clock.left_s)
    return not any(thread.is_alive() for thread in threads)
