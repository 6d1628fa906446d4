"""How long a rank sleeps before it looks at its device again."""

from __future__ import annotations

import time
from collections import deque

from peg.plan import StepPlan

_SLEPT = 0.9  # of a step; the rest is left for one that is quicker, also than all before it
_LONGEST_S = 0.05
_LOOK_S = 30e-6
_WEIGHT = 0.25  # of the latest step in the average


class Pace:
    """The steps that a rank's device works on, one after another, and how long one of their shape takes.

    Owned by the rank's thread.
    """

    def __init__(self) -> None:
        self._running: deque[tuple[int, int]] = deque()
        self._started_s = 0.0
        self._average_s: dict[tuple[int, int], float] = {}

    def begun(self, plan: StepPlan) -> None:
        """The device has one more step to do."""
        if not self._running:
            self._started_s = time.monotonic()
        self._running.append((plan.num_tokens.bit_length(), len(plan.slices).bit_length()))

    def ended(self) -> None:
        """The oldest step is done; the next one has had the device to itself since now."""
        now, shape = time.monotonic(), self._running.popleft()
        took_s = now - self._started_s
        average_s = self._average_s.get(shape, took_s)
        self._average_s[shape] = average_s + _WEIGHT * (took_s - average_s)
        self._started_s = now

    def wait_s(self) -> float:
        """What to sleep now: most of what the oldest step is expected to take, then little by little."""
        expected_s = self._average_s.get(self._running[0], 0.0)
        rest_s = self._started_s + _SLEPT * expected_s - time.monotonic()
        return min(_LONGEST_S, max(_LOOK_S, rest_s))
