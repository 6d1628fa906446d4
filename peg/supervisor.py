"""The supervisor: engine state, the first cause, deadlines, and the order of closing.

It has a thread of its own, so that it sees a blocked loop as well as a blocked rank. Everything that fails ends in
`Supervisor.fail`, which any thread may call; what happens then happens on the supervisor's thread, in the order of
`_wind_up`.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import structlog

from peg.deadlines import Deadlines, StepClock
from peg.errors import RankError
from peg.failure import Cause, CauseKind, EngineState
from peg.process_end import ProcessEnd
from peg.vitals import Rebuild, Vitals
from peg.watch import RankPort, Watch

log = structlog.get_logger("peg.supervisor")

_PUBLISHING = (EngineState.READY, EngineState.DRAINING)
_NEVER_REBUILT = (CauseKind.RANK_DIED, CauseKind.SUPERVISOR_FAILED, CauseKind.OPERATOR_STOP)
_REARM_S = 1.0


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
        self.failures: Counter[tuple[CauseKind, int | None]] = Counter()
        self._watch = Watch(deadlines, self.clock)
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
        self._armed_s = self._found_s = 0.0
        self._armed_starting = True
        self._thread = threading.Thread(target=self._run, name="peg-supervisor", daemon=False)

    # --- called by the loop -----------------------------------------------------------------------------

    def start(self, ranks: RankPort) -> None:
        """Begin to watch."""
        self._ranks = ranks
        log.info("deadlines", **asdict(self.deadlines))
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
            assert self.cause is not None
            self.clock.restart()
            self.rebuilt += (Rebuild(self.epoch, self.cause, time.monotonic() - self._found_s),)
            self.state, self.cause = EngineState.READY, None
            self.secondary.clear()
        self._tell("ready", EngineState.REBUILDING)
        self._reopened.set()

    def release(self, deadline_s: float) -> bool:
        """Stop watching, for good; whether the thread came back. The state becomes STOPPED unless BROKEN."""
        with self._lock:
            failed = self.state is EngineState.BROKEN
            if not failed:
                self.state = EngineState.STOPPED
        self._released.set()
        self._wake.set()
        self._reopened.set()
        if self._thread.is_alive():
            self._thread.join(deadline_s)
        if not failed:
            self._end.disarm()  # after a failure the deadman stays, until the process has ended
        return not self._thread.is_alive()

    # --- called by any thread -----------------------------------------------------------------------------

    def fail(self, cause: Cause) -> None:
        """Something failed. The first cause breaks the engine, later ones are kept beside it."""
        with self._lock:
            first = self.cause is None and self.state is not EngineState.STOPPED
            if first:
                self.cause, self._failed_in = cause, self.state
                self.state = EngineState.BROKEN
                self.failures[cause.kind, cause.rank] += 1
                self._wake.set()  # under the lock: set later it could outlive the rebuild, and nobody would clear it
            else:
                self.secondary.append(cause)

    def vitals(self) -> Vitals:
        """A reading of now, in constant time."""
        oldest, now = self.clock.oldest(), time.monotonic()
        beats = () if self._ranks is None else self._ranks.heartbeats()
        with self._lock:
            return Vitals(
                state=self.state,
                epoch=self.epoch,
                cause=self.cause,
                secondary=tuple(self.secondary),
                heartbeats=beats,
                step=None if oldest is None else oldest.step,
                step_s=None if oldest is None else now - oldest.clock_s,
                step_limit_s=self.deadlines.step_cap_s if oldest is None else self.clock.limit_s(oldest.shape),
                failures=dict(self.failures),
                rebuilt=self.rebuilt,
            )

    def may_publish(self, epoch: int) -> bool:
        """The publish gate: whether a result of this epoch may leave its rank, and be committed."""
        return self.state in _PUBLISHING and epoch == self.epoch

    # --- the supervisor's thread --------------------------------------------------------------------------

    def _move(self, old: EngineState, new: EngineState) -> bool:
        with self._lock:
            if self.state is not old:
                return False
            self.state = new
        self._tell(new, old)
        return True

    def _tell(self, state: str, was: EngineState, cause: Cause | None = None) -> None:
        """One event for each transition, with its cause where it has one."""
        event = {"state": str(state), "was": str(was), "epoch": self.epoch}
        if cause is None:
            log.info("engine state", **event)
            return
        log.error("engine state", **event, cause=str(cause), kind=str(cause.kind), rank=cause.rank, step=cause.step)

    def _run(self) -> None:
        try:
            self._supervise()
        except Exception as error:  # the supervisor's own failure must not leave a process that nobody watches
            self.fail(Cause(kind=CauseKind.SUPERVISOR_FAILED, message=repr(error), traceback=traceback.format_exc()))
            self._close_without_watch()

    def _supervise(self) -> None:
        """Until the engine is released or wound up: tick, look, and wind up what is found broken."""
        while not self._released.is_set():
            self._wake.wait(self.deadlines.tick_s)
            cause = self.cause
            if cause is None:
                self._tick()
            elif not self._wind_up(cause):
                return

    def _tick(self) -> None:
        """Put the deadman off, and look."""
        assert self._ranks is not None
        now = time.monotonic()
        starting = self.state is EngineState.STARTING
        if now - self._armed_s > _REARM_S or starting is not self._armed_starting:
            self._armed_s, self._armed_starting = now, starting
            self._end.arm(self.deadlines.deadman_s(starting=starting))
        found = self._watch.look(self.state, self._ranks)
        if found is not None and not self._released.is_set():
            self.fail(found)

    def _close_without_watch(self) -> None:
        """The same order of closing, once more and without a rebuild; whatever sticks now ends the process at once."""
        try:
            assert self.cause is not None
            self._rebuilds = False
            self._wind_up(self.cause)
        except Exception:  # nothing is left to try
            log.exception("the supervisor failed again")
            self._end.exit(70)

    def _wind_up(self, cause: Cause) -> bool:
        """The order of closing; true if the engine was rebuilt, and goes on.

        Each wait is bounded; the deadman ends the process where even this sticks.
        """
        assert self._ranks is not None
        limits = self.deadlines
        found_s = self._found_s = time.monotonic()
        rebuilds = self._may_rebuild(cause)
        self._end.arm(limits.exit_s + 1.0 + (limits.rebuild_s if rebuilds else 0.0))
        self._doors.answer_everyone(cause)
        self._ranks.poison(str(cause))
        aborted = self._ranks.abort(str(cause), limits.abort_s)
        self._tell("broken", self._failed_in, cause)  # only now: writing a log line may take its time
        if cause.traceback:
            log.error("first cause", traceback=cause.traceback)
        if rebuilds and aborted:
            if self._rebuild(cause, found_s):
                self._armed_s = 0.0
                return True
            self._ranks.abort(str(cause), limits.abort_s)
        left_s = limits.join_s + min(1.0, limits.exit_s / 4)  # a rebuild that failed late leaves at least that much
        self._go(max(found_s, time.monotonic() + left_s - limits.exit_s))
        return False

    def _may_rebuild(self, cause: Cause) -> bool:
        """Whether policy, cause and the number of rebuilds so far allow another one."""
        recent = [past for past in self.rebuilt if time.monotonic() - past.cause.at_s < self.deadlines.rebuild_window_s]
        if self._rebuilds and len(recent) >= self.deadlines.rebuild_limit:
            log.error("rebuilt too often", times=len(recent), within_s=self.deadlines.rebuild_window_s)
            return False
        wanted = self._rebuilds or cause.kind is CauseKind.OPERATOR_REBUILD
        return wanted and self._failed_in is EngineState.READY and cause.kind not in _NEVER_REBUILT

    def _rebuild(self, cause: Cause, found_s: float) -> bool:
        """New communicators and empty pools under a new epoch; false where anything does not come back in time."""
        assert self._ranks is not None
        with self._lock:
            self.state = EngineState.REBUILDING
            self.epoch += 1
            self._wake.clear()
        self._reopened.clear()
        left_s = partial(_left_s, found_s + self.deadlines.rebuild_s, 0.0)
        self._tell("rebuilding", EngineState.BROKEN, cause)
        try:
            self._ranks.rebuild(self.epoch, left_s(), self.deadlines.join_s)
        except RankError as error:
            self.fail(Cause(kind=CauseKind.STARTUP_FAILED, message=f"not rebuilt: {error}"))
            log.warning("not rebuilt", error=str(error))
        else:
            if self._answered.wait(left_s()):
                self._answered.clear()
                self._doors.begin_epoch(self.epoch)
                self._reopened.wait(left_s())
        with self._lock:
            if self.state is EngineState.REBUILDING:
                self.state = EngineState.BROKEN
                return False
            done = self.rebuilt[-1]
        log.info("engine rebuilt", epoch=done.epoch, took_s=round(done.took_s, 3), times=len(self.rebuilt))
        return True

    def _go(self, found_s: float) -> None:
        """End the process with 70: the threads joined, the listener up for a while after the last answer."""
        assert self._ranks is not None
        limits = self.deadlines
        joined = self._ranks.join(limits.join_s)
        log.info("ranks wound up", joined=joined, after_s=round(time.monotonic() - found_s, 3))
        if not joined:
            log.error("left behind", threads=[thread.name for thread in threading.enumerate()])
        left_s = partial(_left_s, found_s + limits.exit_s)
        self._answered.wait(left_s(limits.linger_s))
        self._released.wait(min(limits.linger_s, left_s(0.5)))
        self._doors.end(70)
        if not (self._released.wait(left_s(0.2)) and joined):
            self._end.exit(70)


def _left_s(until_s: float, before_s: float) -> float:
    """Seconds until `before_s` before a point in time."""
    return max(0.0, until_s - before_s - time.monotonic())
