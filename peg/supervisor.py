"""The supervisor: engine state, the first cause, deadlines, and the order of closing.

It has a thread of its own, so that it sees a blocked loop as well as a blocked rank. Everything that fails ends in
`Supervisor.fail`, which any thread may call; what happens then happens on the supervisor's thread, in the order of
`_wind_up`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from peg.plan import Cause, CauseKind, EngineState, Heartbeat, StepPlan

log = structlog.get_logger("peg.supervisor")

_PUBLISHING = (EngineState.READY, EngineState.DRAINING)


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
        """Abort every communicator, each from a helper thread; whether all came back in time."""

    def join(self, deadline_s: float) -> bool:
        """Wait for the rank threads to end; whether all did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Every wait of the supervisor, in seconds, in one place.

    A step may take `step_factor` times the slowest step of its shape seen so far, at least `step_floor_s`, at most
    `step_cap_s`; the first step of a shape has the cap alone. After a failure, aborting, joining and lingering run
    one after another and the process has ended `exit_s` after the failure was found.
    """

    start_s: float = 600.0
    step_cap_s: float = 60.0
    step_floor_s: float = 10.0
    step_factor: float = 20.0
    pickup_s: float = 30.0
    abort_s: float = 1.0
    join_s: float = 2.0
    linger_s: float = 2.0
    exit_s: float = 5.0
    tick_s: float = 0.01


class ProcessEnd:
    """The ways a process ends after a failure. Tests put a recorder in its place."""

    def arm(self, after_s: float) -> None:
        """Start the deadman: a C thread that needs no interpreter lock, dumps all stacks and ends with code 1."""
        faulthandler.dump_traceback_later(after_s, exit=True)

    def exit(self, code: int) -> None:
        """End now, whatever thread did not come back."""
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


@dataclass(slots=True)
class _Issued:
    """One step in flight. Written by the loop, read by the supervisor's thread."""

    step: int
    shape: tuple[int, int]
    clock_s: float


class StepClock:
    """The deadlines of the steps in flight.

    `issued` and `committed` are called by the loop, `late` by the supervisor's thread; the deque's ends are the only
    thing both touch.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._flight: deque[_Issued] = deque()
        self._slowest: dict[tuple[int, int], float] = {}
        self.last_commit_s = time.monotonic()

    def issued(self, plan: StepPlan) -> None:
        """A step was put into the queues; its clock runs from now unless another step is before it."""
        shape = (plan.num_tokens.bit_length(), len(plan.slices).bit_length())
        self._flight.append(_Issued(plan.step, shape, time.monotonic()))

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

    def limit_s(self, shape: tuple[int, int]) -> float:
        """What a step of this shape may take."""
        limits = self._deadlines
        slowest = self._slowest.get(shape)
        if slowest is None:
            return limits.step_cap_s
        return min(limits.step_cap_s, max(limits.step_floor_s, limits.step_factor * slowest))

    def oldest(self) -> _Issued | None:
        """The step that runs now, as far as the loop knows."""
        try:
            return self._flight[0]
        except IndexError:
            return None


class Supervisor:
    """Watches one engine and winds it up when it fails.

    `state`, `epoch` and `cause` are read by any thread; they are written under the lock, and the first cause wins.
    Everything else belongs to the supervisor's thread.
    """

    def __init__(
        self,
        deadlines: Deadlines,
        end: ProcessEnd,
        on_broken: Callable[[Cause], None],
        on_ended: Callable[[int], None],
    ) -> None:
        self.state = EngineState.STARTING
        self.epoch = 0
        self.cause: Cause | None = None
        self.secondary: deque[Cause] = deque(maxlen=16)
        self.deadlines = deadlines
        self.clock = StepClock(deadlines)
        self._end = end
        self._on_broken = on_broken
        self._on_ended = on_ended
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._answered = threading.Event()
        self._released = threading.Event()
        self._ranks: RankPort | None = None
        self._started_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="peg-supervisor", daemon=False)

    # --- called by the loop -----------------------------------------------------------------------------

    def start(self, ranks: RankPort) -> None:
        """Begin to watch."""
        self._ranks = ranks
        log.info("deadlines", **{name: getattr(self.deadlines, name) for name in self.deadlines.__slots__})
        self._thread.start()

    def ready(self) -> bool:
        """STARTING → READY; false where something failed in the meantime."""
        return self._move(EngineState.STARTING, EngineState.READY)

    def drain(self) -> bool:
        """READY → DRAINING: what is open is finished, nothing new is admitted."""
        return self._move(EngineState.READY, EngineState.DRAINING)

    def answered(self) -> None:
        """Every request that was open at the failure has its terminal."""
        self._answered.set()

    def release(self, deadline_s: float) -> bool:
        """Stop watching, for good; whether the thread came back. The state becomes STOPPED unless BROKEN."""
        with self._lock:
            if self.state is not EngineState.BROKEN:
                self.state = EngineState.STOPPED
        self._released.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(deadline_s)
        return not self._thread.is_alive()

    # --- called by any thread -----------------------------------------------------------------------------

    def fail(self, cause: Cause) -> None:
        """Something failed. The first cause breaks the engine, later ones are kept beside it."""
        with self._lock:
            first = self.cause is None and self.state is not EngineState.STOPPED
            if first:
                self.cause = cause
                self.state = EngineState.BROKEN
            else:
                self.secondary.append(cause)
        if first:
            self._wake.set()

    def may_publish(self, epoch: int) -> bool:
        """The publish gate: whether a result of this epoch may leave its rank, and be committed."""
        return self.state in _PUBLISHING and epoch == self.epoch

    # --- the supervisor's thread --------------------------------------------------------------------------

    def _move(self, old: EngineState, new: EngineState) -> bool:
        with self._lock:
            if self.state is not old:
                return False
            self.state = new
        log.info("engine state", state=str(new), was=str(old), epoch=self.epoch)
        return True

    def _run(self) -> None:
        try:
            while not self._released.is_set():
                self._wake.wait(self.deadlines.tick_s)
                if self.cause is not None:
                    self._wind_up(self.cause)
                    return
                self._watch(time.monotonic())
        except Exception as error:  # the supervisor's own failure must not leave a process that nobody watches
            self.fail(
                Cause(kind=CauseKind.SUPERVISOR_FAILED, message=repr(error), traceback=traceback.format_exc())
            )
            log.exception("the supervisor failed")
            self._end.exit(70)

    def _watch(self, now: float) -> None:
        """One tick: find what raises nothing by itself."""
        assert self._ranks is not None
        found = (
            self._start_overdue(now)
            or self._rank_dead(self._ranks)
            or self._comm_error(self._ranks)
            or self._step_overdue(self._ranks, now)
        )
        if found is not None and not self._released.is_set():
            self.fail(found)

    def _start_overdue(self, now: float) -> Cause | None:
        if self.state is not EngineState.STARTING or now - self._started_s <= self.deadlines.start_s:
            return None
        message = f"not ready {self.deadlines.start_s:g} s after start"
        return Cause(kind=CauseKind.STARTUP_DEADLINE, message=message)

    def _rank_dead(self, ranks: RankPort) -> Cause | None:
        rank = ranks.dead_rank()
        if rank is None:
            return None
        return Cause(kind=CauseKind.RANK_DIED, rank=rank, message="the rank's thread has ended")

    def _comm_error(self, ranks: RankPort) -> Cause | None:
        error = ranks.poll()
        return None if error is None else Cause(kind=CauseKind.COMM_ERROR, message=error)

    def _step_overdue(self, ranks: RankPort, now: float) -> Cause | None:
        """The oldest step in flight is late: say which rank holds it up, and whether it was ever picked up."""
        issued = self.clock.oldest()
        if issued is None:
            return None
        age = now - issued.clock_s
        limit = self.clock.limit_s(issued.shape)
        waiting = [beat for beat in ranks.heartbeats() if beat.step < issued.step and beat.phase == "idle"]
        for beat in waiting:
            idle = now - max(beat.since_s, issued.clock_s)
            if idle > min(limit, self.deadlines.pickup_s):
                message = f"step {issued.step} not picked up for {idle:.2f} s"
                return Cause(kind=CauseKind.PICKUP_DEADLINE, rank=beat.rank, step=issued.step, message=message)
        if age <= limit:
            return None
        late = [beat for beat in ranks.heartbeats() if beat.phase != "idle"]
        slowest = min(late, key=lambda beat: beat.since_s, default=None)
        where = ", ".join(f"rank {beat.rank} in {beat.phase}" for beat in late) or "all ranks done, not committed"
        return Cause(
            kind=CauseKind.STEP_DEADLINE,
            rank=None if slowest is None else slowest.rank,
            step=issued.step,
            phase=None if slowest is None else slowest.phase,
            message=f"step {issued.step} took over {limit:g} s ({where})",
        )

    def _wind_up(self, cause: Cause) -> None:
        """The order of closing. Each wait is bounded; the deadman ends the process where even this sticks."""
        assert self._ranks is not None
        limits = self.deadlines
        found_s = time.monotonic()
        reason = str(cause)
        self._end.arm(limits.exit_s + 1.0)
        log.error("engine broken", cause=reason, kind=str(cause.kind), rank=cause.rank, step=cause.step)
        if cause.traceback:
            log.error("first cause", traceback=cause.traceback)
        self._on_broken(cause)
        self._ranks.poison(reason)
        aborted = self._ranks.abort(reason, limits.abort_s)
        joined = self._ranks.join(limits.join_s)
        log.info("ranks wound up", aborted=aborted, joined=joined, after_s=round(time.monotonic() - found_s, 3))
        self._answered.wait(max(0.0, found_s + limits.exit_s - limits.linger_s - time.monotonic()))
        self._released.wait(min(limits.linger_s, max(0.0, found_s + limits.exit_s - 0.5 - time.monotonic())))
        self._on_ended(70)
        came_back = self._released.wait(max(0.0, found_s + limits.exit_s - 0.2 - time.monotonic())) and joined
        if not came_back:
            self._end.exit(70)
