"""One tensor-parallel rank: its thread, its queue, and what it answers."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from typing import Protocol, TypeAlias

import torch

from peg.errors import CommAborted, CommMismatch, RankDiverged, UsageError
from peg.failure import Cause, CauseKind, FaultPlace, Heartbeat
from peg.plan import (
    Connect,
    LoadWeights,
    MakeCache,
    RankAck,
    RankCommand,
    Settle,
    Shutdown,
    Skipped,
    StepFailed,
    StepPlan,
    Unread,
    WarmUp,
)
from peg.ranks.blueprint import Blueprint
from peg.ranks.device import Device
from peg.ranks.faults import InjectedDeath, RankComm, RankFaults
from peg.ranks.launched import Launched
from peg.ranks.pace import Pace
from peg.ranks.runner import Runner, StepPhase
from peg.ranks.scope import Scope, failure_scope

IDLE = "idle"
"""The phase of a rank that waits for a command."""

_CLOSE_S = 1.0
_SETTLE_TICK_S = 1e-3
_PLACES: Mapping[type[RankCommand], FaultPlace] = {
    LoadWeights: FaultPlace.LOAD,
    Connect: FaultPlace.CONNECT,
    WarmUp: FaultPlace.WARM_UP,
    MakeCache: FaultPlace.MAKE_CACHE,
}

_Due: TypeAlias = Launched | StepFailed | Skipped


class RankListener(Protocol):
    """Who hears from the ranks. Called on their threads; returns at once, never raises unless it says so."""

    def connect(self, rank: int, epoch: int) -> RankComm:
        """Make a rank's communicator. Raises CommAborted where the epoch is over already."""

    def done(self, rank: int) -> None:
        """A rank carried out a command that is not a step."""

    def answered(self, rank: int, answer: RankAck | StepFailed | Unread | Skipped) -> None:
        """A rank ran a step, or will not."""

    def failed(self, cause: Cause, usage: UsageError | None) -> None:
        """A rank failed, and takes no further step of this epoch. `usage` is set where the user is at fault."""


class Rank:
    """A rank's thread, named and not a daemon: it is started once and ends with `Shutdown`.

    `runner` and the fields below `thread` belong to it. Other threads start and join it, `put` commands, read the
    `heartbeat` and `poison`: each is one store or load, or a thread-safe queue.

    `_due` are the steps that were begun or refused but not answered yet, oldest first: on a device that works by
    itself the next step is begun while the last one still runs.
    """

    def __init__(
        self, blueprint: Blueprint, rank: int, device: Device, listener: RankListener, faults: RankFaults | None
    ) -> None:
        self.rank = rank
        self.faults = faults
        self.runner = Runner(blueprint, rank, device, self._enter)
        self._world_size = blueprint.world_size
        self._listener = listener
        self._commands: queue.SimpleQueue[RankCommand] = queue.SimpleQueue()
        self._over_epoch = -1  # this epoch and those before it are over
        self._beat = (IDLE, -1, time.monotonic())
        self.thread = threading.Thread(target=self._run, name=f"peg-rank-{rank}", daemon=False)
        self._due: deque[_Due] = deque()
        self._pace = Pace()
        self._step = -1
        self._epoch = -1
        self._failed_steps = 0

    # --- any thread -------------------------------------------------------------------------------------

    def put(self, command: RankCommand) -> None:
        """Queue a command; never blocks."""
        self._commands.put(command)

    def poison(self, epoch: int) -> None:
        """Begin no further step of this epoch."""
        self._over_epoch = max(self._over_epoch, epoch)
        if self.faults is not None:
            self.faults.over(epoch)

    def heartbeat(self) -> Heartbeat:
        phase, step, since_s = self._beat
        return Heartbeat(self.rank, phase, step, since_s)

    # --- the rank's thread --------------------------------------------------------------------------------

    def _enter(self, phase: str) -> None:
        """One tuple, stored at once: who reads it sees a phase with its own step and time."""
        self._beat = (phase, self._step, time.monotonic())

    def _run(self) -> None:
        with torch.inference_mode():
            work: RankCommand | _Due | None = None
            while not isinstance(work, Shutdown):
                work = self._next()
                try:
                    self._do(work)
                except InjectedDeath:
                    return
                except BaseException as error:  # whatever stops a rank, its peers must not wait for it in vain
                    self._fail(work, error)

    def _next(self) -> RankCommand | _Due:
        """The oldest step that is due, once its device is done with it, or until then a command."""
        while self._due:
            oldest, newest = self._due[0], self._due[-1]
            if not isinstance(oldest, Launched) or oldest.landing.done():
                return self._due.popleft()
            wait_s = self._pace.wait_s()
            if isinstance(newest, Launched) and newest.alone:
                time.sleep(wait_s)
                continue
            try:
                return self._commands.get(timeout=wait_s)
            except queue.Empty:
                continue
        self._enter(IDLE)
        return self._commands.get()

    def _do(self, work: RankCommand | _Due) -> None:
        match work:
            case StepPlan():
                self._begin_step(work)
            case Launched():
                self._end_step(work)
            case StepFailed() | Skipped():
                self._listener.answered(self.rank, work)
            case _:
                self._carry_out(work)

    def _carry_out(self, command: RankCommand) -> None:
        self._enter(type(command).__name__)
        place = _PLACES.get(type(command))
        if self.faults is not None and place is not None:
            self.faults.begin(place, command.epoch if isinstance(command, Connect) else 0)
        match command:
            case LoadWeights():
                self.runner.load()
            case Connect(epoch=epoch):
                self._connect(epoch)
            case WarmUp():
                self.runner.warm_up()
            case MakeCache(groups=groups):
                self.runner.make_cache(groups)
            case Settle():
                self._settle(_CLOSE_S)
            case Shutdown() if self._epoch >= 0:
                self._settle(_CLOSE_S)
                self.runner.disconnect(_CLOSE_S)
        if self.faults is not None and place is not None:
            self.faults.end()
        self._listener.done(self.rank)

    def _connect(self, epoch: int) -> None:
        if self._epoch >= 0:
            self._settle(_CLOSE_S)
            self.runner.disconnect(_CLOSE_S)
        self.runner.connect(self._listener.connect(self.rank, epoch))
        self._epoch, self._step, self._failed_steps, self._pace = epoch, -1, 0, Pace()

    def _begin_step(self, plan: StepPlan) -> None:
        if plan.epoch != self._epoch or plan.epoch <= self._over_epoch:
            return
        assert plan.step == self._step + 1, f"step {plan.step} came after step {self._step}"
        self._step = plan.step
        if plan.failures_seen < self._failed_steps:
            self._due.append(Skipped(plan.step, plan.epoch))
            return
        if self.faults is not None:
            self.faults.begin(FaultPlace.STEP, plan.epoch, plan.step)
        launched = self.runner.launch(plan)
        if self.faults is not None:
            self.faults.end()
        self._pace.begun(plan)
        self._due.append(launched)

    def _end_step(self, launched: Launched) -> None:
        self._pace.ended()
        if launched.plan.epoch > self._over_epoch:
            ack = self.runner.finish(launched)
            self._listener.answered(self.rank, ack if self.faults is None else self.faults.alter(ack))
        if self._due:
            self._enter(StepPhase.WAIT)

    def _settle(self, deadline_s: float) -> None:
        """Wait for the device, and answer what is still due. Raises TimeoutError where it does not come back."""
        until_s = time.monotonic() + deadline_s
        while self._due:
            oldest = self._due[0]
            if not isinstance(oldest, Launched) or oldest.landing.done():
                self._do(self._due.popleft())
            elif time.monotonic() > until_s:
                self._due.clear()
                raise TimeoutError(f"the device was not done with step {oldest.plan.step} after {deadline_s:g} s")
            else:
                time.sleep(self._pace.wait_s())
        while not self.runner.device.done():  # with what a step had launched when it failed
            if time.monotonic() > until_s:
                raise TimeoutError(f"the device was not done after {deadline_s:g} s")
            time.sleep(_SETTLE_TICK_S)

    def _fail(self, work: RankCommand | _Due, error: BaseException) -> None:
        """Tell what stopped a command or a step, in plain strings: a traceback would keep the step's tensors alive."""
        phase, plan = self._beat[0], _plan_of(work)
        message = f"{type(error).__name__}: {error}"
        if plan is not None:
            scope = failure_scope(has_decode=plan.has_decode, phase=phase, world_size=self._world_size, error=error)
            if scope is Scope.REQUEST and self.runner.device.usable():
                if phase == StepPhase.READ:
                    self._listener.answered(self.rank, Unread(plan.step, plan.epoch, message))
                    return
                self._failed_steps += 1
                self._due.append(StepFailed(plan.step, plan.epoch, message))
                return
        self.poison(self._epoch)
        if isinstance(error, CommAborted):
            return  # an echo: whoever aborted has told why, or is about to
        cause = Cause(
            kind=_cause_kind(error),
            message=message,
            rank=self.rank,
            step=None if plan is None else plan.step,
            phase=phase,
            traceback="".join(traceback.format_exception(error)),
        )
        self._listener.failed(cause, error.with_traceback(None) if isinstance(error, UsageError) else None)


def _plan_of(work: RankCommand | _Due) -> StepPlan | None:
    match work:
        case Launched(plan=plan) | (StepPlan() as plan):
            return plan
        case _:
            return None


def _cause_kind(error: BaseException) -> CauseKind:
    match error:
        case CommMismatch():
            return CauseKind.COMM_ERROR
        case RankDiverged():
            return CauseKind.RANK_DIVERGED
        case _:
            return CauseKind.RANK_RAISED
