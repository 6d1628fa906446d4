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
from functools import partial
from typing import Protocol

import structlog

from peg.deadlines import Deadlines, StepClock
from peg.errors import RankError
from peg.failure import Cause, CauseKind, EngineState, Heartbeat

log = structlog.get_logger("peg.supervisor")

_PUBLISHING = (EngineState.READY, EngineState.DRAINING)
_NEVER_REBUILT = (CauseKind.RANK_DIED, CauseKind.SUPERVISOR_FAILED, CauseKind.OPERATOR)


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

    def rebuild(self, epoch: int, deadline_s: float) -> None:
        """New communicators for a new epoch, weights kept. Raises RankError where a rank does not come back."""


class ProcessEnd:
    """The ways a process ends after a failure. Tests put a recorder in its place."""

    def arm(self, after_s: float) -> None:
        """Start the deadman: a C thread that needs no interpreter lock, dumps all stacks and ends with code 1."""
        faulthandler.dump_traceback_later(after_s, exit=True)

    def disarm(self) -> None:
        """The engine was rebuilt: no need for the deadman."""
        faulthandler.cancel_dump_traceback_later()

    def exit(self, code: int) -> None:
        """End now, whatever thread did not come back."""
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


@dataclass(frozen=True, slots=True)
class Rebuild:
    """One time that the engine was rebuilt: the epoch that began, why, and how long clients were refused."""

    epoch: int
    cause: Cause
    took_s: float


@dataclass(frozen=True, slots=True)
class EngineDoors:
    """What the supervisor asks of the engine, from its own thread; each hands over to the loop and returns at once.

    `answer_everyone` gives every open request its terminal, then calls `Supervisor.answered`. `begin_epoch` begins
    with empty pools, as the rebuilt ranks do, then calls `Supervisor.reopen`. `end`: all is wound up, the process
    should end with this code.
    """

    answer_everyone: Callable[[Cause], None]
    begin_epoch: Callable[[int], None]
    end: Callable[[int], None]


class Supervisor:
    """Watches one engine and winds it up when it fails.

    `state`, `epoch` and `cause` are read by any thread; they are written under the lock, and the first cause wins.
    Everything else belongs to the supervisor's thread.
    """

    def __init__(
        self,
        deadlines: Deadlines,
        end: ProcessEnd,
        doors: EngineDoors,
        *,
        rebuilds: bool = False,
    ) -> None:
        self.state = EngineState.STARTING
        self.epoch = 0
        self.cause: Cause | None = None
        self.secondary: deque[Cause] = deque(maxlen=16)
        self.rebuilt: tuple[Rebuild, ...] = ()
        self.deadlines = deadlines
        self.clock = StepClock(deadlines)
        self._end = end
        self._doors = doors
        self._rebuilds = rebuilds
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._answered = threading.Event()
        self._reopened = threading.Event()
        self._released = threading.Event()
        self._ranks: RankPort | None = None
        self._failed_in = EngineState.STARTING
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

    def reopen(self) -> None:
        """REBUILDING → READY: the scheduler has begun the new epoch."""
        with self._lock:
            if self.state is not EngineState.REBUILDING:
                return
            self.clock.restart()
            self.state, self.cause = EngineState.READY, None
            self.secondary.clear()
        log.info("engine state", state=str(self.state), was="rebuilding", epoch=self.epoch)
        self._reopened.set()

    def release(self, deadline_s: float) -> bool:
        """Stop watching, for good; whether the thread came back. The state becomes STOPPED unless BROKEN."""
        with self._lock:
            if self.state is not EngineState.BROKEN:
                self.state = EngineState.STOPPED
        self._released.set()
        self._wake.set()
        self._reopened.set()
        if self._thread.is_alive():
            self._thread.join(deadline_s)
        return not self._thread.is_alive()

    # --- called by any thread -----------------------------------------------------------------------------

    def fail(self, cause: Cause) -> None:
        """Something failed. The first cause breaks the engine, later ones are kept beside it."""
        with self._lock:
            first = self.cause is None and self.state is not EngineState.STOPPED
            if first:
                self.cause, self._failed_in = cause, self.state
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
                cause = self.cause
                if cause is None:
                    self._watch(time.monotonic())
                elif not self._wind_up(cause):
                    return
        except Exception as error:  # the supervisor's own failure must not leave a process that nobody watches
            self.fail(Cause(kind=CauseKind.SUPERVISOR_FAILED, message=repr(error), traceback=traceback.format_exc()))
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

    def _wind_up(self, cause: Cause) -> bool:
        """The order of closing; true if the engine was rebuilt, and goes on.

        Each wait is bounded; the deadman ends the process where even this sticks.
        """
        assert self._ranks is not None
        limits = self.deadlines
        found_s = time.monotonic()
        rebuilds = self._may_rebuild(cause)
        self._end.arm(limits.exit_s + 1.0 + (limits.rebuild_s if rebuilds else 0.0))
        log.error("engine broken", cause=str(cause), kind=str(cause.kind), rank=cause.rank, step=cause.step)
        if cause.traceback:
            log.error("first cause", traceback=cause.traceback)
        self._doors.answer_everyone(cause)
        self._ranks.poison(str(cause))
        aborted = self._ranks.abort(str(cause), limits.abort_s)
        if rebuilds and aborted and self._rebuild(cause, found_s):
            self._end.disarm()
            return True
        self._go(found_s if not rebuilds else time.monotonic())
        return False

    def _may_rebuild(self, cause: Cause) -> bool:
        """Whether policy, cause and the number of rebuilds so far allow another one."""
        recent = [past for past in self.rebuilt if time.monotonic() - past.cause.at_s < self.deadlines.rebuild_window_s]
        if self._rebuilds and len(recent) >= self.deadlines.rebuild_limit:
            log.error("rebuilt too often", times=len(recent), within_s=self.deadlines.rebuild_window_s)
            return False
        return self._rebuilds and self._failed_in is EngineState.READY and cause.kind not in _NEVER_REBUILT

    def _rebuild(self, cause: Cause, found_s: float) -> bool:
        """New communicators and empty pools under a new epoch; false where anything does not come back in time."""
        assert self._ranks is not None
        with self._lock:
            self.state = EngineState.REBUILDING
            self.epoch += 1
        log.warning("engine state", state=str(self.state), was="broken", epoch=self.epoch)
        self._wake.clear()
        self._reopened.clear()
        try:
            self._ranks.rebuild(self.epoch, self.deadlines.rebuild_s)
        except RankError as error:
            log.warning("not rebuilt", error=str(error))
        else:
            if self._answered.wait(self.deadlines.rebuild_s):
                self._answered.clear()
                self._doors.begin_epoch(self.epoch)
                self._reopened.wait(self.deadlines.rebuild_s)
        if self.state is EngineState.REBUILDING:
            with self._lock:
                self.state = EngineState.BROKEN
            return False
        self.rebuilt += (Rebuild(self.epoch, cause, time.monotonic() - found_s),)
        return True

    def _go(self, found_s: float) -> None:
        """End the process with 70: the threads joined, the listener up for a while after the last answer."""
        assert self._ranks is not None
        limits = self.deadlines
        joined = self._ranks.join(limits.join_s)
        log.info("ranks wound up", joined=joined, after_s=round(time.monotonic() - found_s, 3))
        left_s = partial(_left_s, found_s + limits.exit_s)
        self._answered.wait(left_s(limits.linger_s))
        self._released.wait(min(limits.linger_s, left_s(0.5)))
        self._doors.end(70)
        if not (self._released.wait(left_s(0.2)) and joined):
            self._end.exit(70)


def _left_s(until_s: float, before_s: float) -> float:
    """Seconds until `before_s` before a point in time."""
    return max(0.0, until_s - before_s - time.monotonic())
