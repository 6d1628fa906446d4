"""What the supervisor finds by looking: that which raises nothing by itself."""

from __future__ import annotations

import time
from typing import Protocol

from peg.deadlines import Deadlines, IssuedStep, StepClock
from peg.failure import Cause, CauseKind, EngineState, Heartbeat

_IDLE = "idle"
_PAUSED_S = 1.0  # a supervisor that did not come round for so long was stopped, and so was everyone else


class RankPort(Protocol):
    """What the supervisor needs of the ranks. All of it may be called from the supervisor's thread."""

    def heartbeats(self) -> tuple[Heartbeat, ...]:
        """Where each rank is; its thread wrote it."""

    def dead_rank(self) -> int | None:
        """A rank whose thread has ended although nobody asked it to, None while all live."""

    def poll(self) -> str | None:
        """An asynchronous error of a communicator, None while all is well."""

    def poison(self, reason: str) -> None:
        """Wake every rank that waits for a command; it takes no further one."""

    def abort(self, reason: str, deadline_s: float) -> bool:
        """Abort every communicator, each from a helper thread; whether all did it and came back in time."""

    def join(self, deadline_s: float) -> bool:
        """Wait for the rank threads to end; whether all did."""

    def rebuild(self, epoch: int, deadline_s: float, back_s: float) -> None:
        """New communicators for a new epoch, weights kept. Raises RankError where a rank is not back in `back_s`."""


class Watch:
    """Looks at the ranks and at the steps that are out. Owned by the supervisor's thread."""

    def __init__(self, deadlines: Deadlines, clock: StepClock) -> None:
        self._deadlines = deadlines
        self._clock = clock
        self._started_s = self._looked_s = time.monotonic()
        self._error_since_s: float | None = None

    def look(self, state: EngineState, ranks: RankPort) -> Cause | None:
        """The first thing that is wrong, None while all is well."""
        now = time.monotonic()
        if now - self._looked_s > _PAUSED_S:
            self._clock.excuse(now - self._looked_s, now)
        self._looked_s = now
        return (
            self._start_overdue(state, now)
            or self._rank_dead(ranks)
            or self._comm_error(ranks, now)
            or self._step_overdue(ranks, now)
        )

    def _start_overdue(self, state: EngineState, now: float) -> Cause | None:
        if state is not EngineState.STARTING or now - self._started_s <= self._deadlines.start_s:
            return None
        message = f"not ready {self._deadlines.start_s:g} s after start"
        return Cause(kind=CauseKind.STARTUP_DEADLINE, message=message)

    def _rank_dead(self, ranks: RankPort) -> Cause | None:
        rank = ranks.dead_rank()
        if rank is None:
            return None
        beat = next((beat for beat in ranks.heartbeats() if beat.rank == rank), None)
        return Cause(
            kind=CauseKind.RANK_DIED,
            rank=rank,
            step=None if beat is None or beat.step < 0 else beat.step,
            phase=None if beat is None else beat.phase,
            message="the rank's thread has ended",
        )

    def _comm_error(self, ranks: RankPort, now: float) -> Cause | None:
        """A communicator also reports what a rank is just about to tell, with its traceback: that rank goes first."""
        error = ranks.poll()
        if error is None:
            self._error_since_s = None
            return None
        self._error_since_s = self._error_since_s or now
        if now - self._error_since_s < self._deadlines.comm_grace_s:
            return None
        return Cause(kind=CauseKind.COMM_ERROR, message=error)

    def _step_overdue(self, ranks: RankPort, now: float) -> Cause | None:
        """The oldest step in flight is late: say which rank holds it up, and whether it was ever picked up."""
        issued = self._clock.oldest()
        if issued is None:
            return None
        limit = self._clock.limit_s(issued.shape)
        beats = ranks.heartbeats()
        return self._not_picked_up(issued, beats, now, limit) or self._not_done(issued, beats, now, limit)

    def _not_picked_up(
        self, issued: IssuedStep, beats: tuple[Heartbeat, ...], now: float, limit: float
    ) -> Cause | None:
        for beat in beats:
            idle = now - max(beat.since_s, issued.clock_s)
            waiting = beat.step < issued.step and beat.phase == _IDLE
            if waiting and idle > min(limit, self._deadlines.pickup_s):
                message = f"step {issued.step} not picked up for {idle:.2f} s"
                return Cause(kind=CauseKind.PICKUP_DEADLINE, rank=beat.rank, step=issued.step, message=message)
        return None

    def _not_done(self, issued: IssuedStep, beats: tuple[Heartbeat, ...], now: float, limit: float) -> Cause | None:
        """Whoever sleeps in a collective until its peers come is late for their sake."""
        if now - issued.clock_s <= limit:
            return None
        late = [beat for beat in beats if beat.phase != _IDLE]
        slowest = min((beat for beat in late if not beat.waits), key=lambda beat: beat.since_s, default=None)
        told = [f"rank {beat.rank} in {beat.phase}{', waiting for the others' if beat.waits else ''}" for beat in late]
        return Cause(
            kind=CauseKind.STEP_DEADLINE,
            rank=None if slowest is None else slowest.rank,
            step=issued.step,
            phase=None if slowest is None else slowest.phase,
            message=f"step {issued.step} took over {limit:g} s ({'; '.join(told) or 'all ranks done, not committed'})",
        )
