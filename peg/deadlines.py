"""Every deadline of the engine, and the clock of the steps in flight."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from peg.plan import Connect, LoadWeights, MakeCache, RankCommand, StepPlan, WarmUp


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Every wait of the supervisor, in seconds, in one place.

    The start may take `start_s`, and each of its phases its own time.

    A step may take `step_factor` times the slowest step of its shape seen so far, at least `step_floor_s`, at most
    `step_cap_s`; the first step of a shape has the cap alone. After a failure, aborting, joining and lingering run
    one after another and the process has ended `exit_s` after the failure was found. Where the engine is to be
    rebuilt, that takes at most `rebuild_s`, and happens at most `rebuild_limit` times in `rebuild_window_s`. An error
    that a communicator reports is a cause only after `comm_grace_s`, so that a rank that has more to tell goes first.
    """

    start_s: float = 600.0
    load_s: float = 600.0
    connect_s: float = 120.0
    warm_up_s: float = 300.0
    make_cache_s: float = 60.0
    step_cap_s: float = 60.0
    step_floor_s: float = 10.0
    step_factor: float = 20.0
    pickup_s: float = 30.0
    abort_s: float = 1.0
    join_s: float = 2.0
    linger_s: float = 2.0
    exit_s: float = 5.0
    rebuild_s: float = 10.0
    rebuild_limit: int = 3
    rebuild_window_s: float = 600.0
    comm_grace_s: float = 0.05
    tick_s: float = 0.01

    def phases_s(self) -> Mapping[type[RankCommand], float]:
        """What each phase of the start may take."""
        return {
            LoadWeights: self.load_s,
            Connect: self.connect_s,
            WarmUp: self.warm_up_s,
            MakeCache: self.make_cache_s,
        }

    def deadman_s(self, *, starting: bool) -> float:
        """When the deadman strikes, counted from the supervisor's last sign of life: all other deadlines are over."""
        return (self.start_s if starting else self.step_cap_s) + self.exit_s + 1.0


@dataclass(slots=True)
class IssuedStep:
    """One step in flight. Written by the loop, read by the supervisor's thread."""

    step: int
    shape: tuple[int, int]
    clock_s: float


class StepClock:
    """The deadlines of the steps in flight.

    `issued` and `committed` are called by the loop, `oldest` and `excuse` by the supervisor's thread; the deque's ends
    are the only thing both touch.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._flight: deque[IssuedStep] = deque()
        self._slowest: dict[tuple[int, int], float] = {}
        self.last_commit_s = time.monotonic()

    def issued(self, plan: StepPlan) -> None:
        """A step was put into the queues; its clock runs from now unless another step is before it."""
        shape = (plan.num_tokens.bit_length(), len(plan.slices).bit_length())
        self._flight.append(IssuedStep(plan.step, shape, time.monotonic()))

    def committed(self, step: int) -> None:
        """The oldest step in flight is done; the one behind it starts its clock now."""
        now = time.monotonic()
        done = self._flight.popleft()
        assert done.step == step, f"step {step} committed while {done.step} is the oldest in flight"
        took = now - done.clock_s
        self._slowest[done.shape] = max(took, self._slowest.get(done.shape, 0.0))
        if self._flight:
            self._flight[0].clock_s = now
        self.last_commit_s = now

    def excuse(self, lost_s: float, now: float) -> None:
        """The whole process stood still (a machine put to sleep, SIGSTOP, a debugger): nobody was late meanwhile.

        A call that keeps the interpreter lock looks the same from here; the deadman ends one that never returns.
        """
        oldest = self.oldest()
        if oldest is not None:
            oldest.clock_s = min(now, oldest.clock_s + lost_s)

    def restart(self) -> None:
        """A new epoch: nothing is in flight."""
        self._flight.clear()

    def limit_s(self, shape: tuple[int, int]) -> float:
        """What a step of this shape may take."""
        limits = self._deadlines
        slowest = self._slowest.get(shape)
        if slowest is None:
            return limits.step_cap_s
        return min(limits.step_cap_s, max(limits.step_floor_s, limits.step_factor * slowest))

    def oldest(self) -> IssuedStep | None:
        """The step that runs now, as far as the loop knows."""
        try:
            return self._flight[0]
        except IndexError:
            return None
