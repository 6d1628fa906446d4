"""One tensor-parallel rank: its thread, its queue, and what it answers."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from typing import Protocol

import torch

from peg.errors import CommAborted, CommMismatch, RankDiverged, UsageError
from peg.plan import (
    Cause,
    CauseKind,
    Connect,
    Heartbeat,
    LoadWeights,
    MakeCache,
    RankAck,
    RankCommand,
    Shutdown,
    Skipped,
    StepFailed,
    StepPlan,
    WarmUp,
)
from peg.ranks.blueprint import Blueprint
from peg.ranks.faults import RankComm, RankFaults
from peg.ranks.machine import can_allocate, cores_per_rank
from peg.ranks.runner import Runner
from peg.ranks.scope import Scope, failure_scope

IDLE = "idle"
"""The phase of a rank that waits for a command."""

_CLOSE_S = 1.0


class RankListener(Protocol):
    """Who hears from the ranks. Called on their threads; returns at once, never raises unless it says so."""

    def connect(self, rank: int, epoch: int) -> RankComm:
        """Make a rank's communicator. Raises CommAborted where the epoch is over already."""

    def done(self, rank: int) -> None:
        """A rank carried out a command that is not a step."""

    def answered(self, rank: int, answer: RankAck | StepFailed | Skipped) -> None:
        """A rank ran a step, or will not."""

    def failed(self, cause: Cause, usage: UsageError | None) -> None:
        """A rank failed, and takes no further step of this epoch. `usage` is set where the user is at fault."""


class Rank:
    """A rank's thread, named and not a daemon: it is started once and ends with `Shutdown`.

    `runner` and the fields below `thread` belong to it. Other threads start and join it, `put` commands, read the
    `heartbeat` and `poison`: each is one store or load, or a thread-safe queue.
    """

    def __init__(self, blueprint: Blueprint, rank: int, listener: RankListener, faults: RankFaults | None) -> None:
        self.rank = rank
        self.faults = faults
        self.runner = Runner(blueprint, rank, self._enter)
        self._world_size = blueprint.world_size
        self._listener = listener
        self._commands: queue.SimpleQueue[RankCommand] = queue.SimpleQueue()
        self._over_epoch = -1  # this epoch and those before it are over
        self._beat = (IDLE, -1, time.monotonic())
        self.thread = threading.Thread(target=self._run, name=f"peg-rank-{rank}", daemon=False)
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

    def heartbeat(self) -> Heartbeat:
        phase, step, since_s = self._beat
        return Heartbeat(self.rank, phase, step, since_s)

    # --- the rank's thread --------------------------------------------------------------------------------

    def _enter(self, phase: str) -> None:
        """One tuple, stored at once: who reads it sees a phase with its own step and time."""
        self._beat = (phase, self._step, time.monotonic())

    def _run(self) -> None:
        torch.set_num_threads(cores_per_rank(self._world_size))
        with torch.inference_mode():
            command: RankCommand | None = None
            while not isinstance(command, Shutdown):
                self._enter(IDLE)
                command = self._commands.get()
                try:
                    self._carry_out(command)
                except BaseException as error:  # whatever stops a rank, its peers must not wait for it in vain
                    self._fail(command, error)

    def _carry_out(self, command: RankCommand) -> None:
        if isinstance(command, StepPlan):
            self._run_step(command)
            return
        self._enter(type(command).__name__)
        match command:
            case Connect(epoch=epoch):
                self._connect(epoch)
            case LoadWeights():
                self.runner.load()
            case MakeCache(groups=groups):
                self.runner.make_cache(groups)
            case WarmUp():
                self.runner.warm_up()
            case Shutdown() if self._epoch >= 0:
                self.runner.close(_CLOSE_S)
        self._listener.done(self.rank)

    def _connect(self, epoch: int) -> None:
        comm = self._listener.connect(self.rank, epoch)
        self.runner.connect(comm if self.faults is None else self.faults.wrap(comm))
        self._epoch, self._step, self._failed_steps = epoch, -1, 0

    def _run_step(self, plan: StepPlan) -> None:
        if plan.epoch != self._epoch or plan.epoch <= self._over_epoch:
            return
        assert plan.step == self._step + 1, f"step {plan.step} came after step {self._step}"
        self._step = plan.step
        if plan.failures_seen < self._failed_steps:
            self._listener.answered(self.rank, Skipped(plan.step, plan.epoch))
            return
        if self.faults is not None:
            self.faults.begin_step()
        ack = self.runner.step(plan)
        if self.faults is not None:
            self.faults.end_step()
        self._listener.answered(self.rank, ack)

    def _fail(self, command: RankCommand, error: BaseException) -> None:
        """Tell what stopped a command, in plain strings: a traceback would keep the step's tensors alive."""
        phase, plan = self._beat[0], command if isinstance(command, StepPlan) else None
        message = f"{type(error).__name__}: {error}"
        if plan is not None:
            scope = failure_scope(has_decode=plan.has_decode, phase=phase, world_size=self._world_size, error=error)
            if scope is Scope.REQUEST and can_allocate():
                self._failed_steps += 1
                self._listener.answered(self.rank, StepFailed(plan.step, plan.epoch, message))
                return
        self.poison(self._epoch)
        cause = Cause(
            kind=_cause_kind(error),
            message=message,
            rank=self.rank,
            step=None if plan is None else plan.step,
            phase=phase,
            traceback="".join(traceback.format_exception(error)),
        )
        self._listener.failed(cause, error.with_traceback(None) if isinstance(error, UsageError) else None)


def _cause_kind(error: BaseException) -> CauseKind:
    match error:
        case CommAborted() | CommMismatch():
            return CauseKind.COMM_ERROR
        case RankDiverged():
            return CauseKind.RANK_DIVERGED
        case _:
            return CauseKind.RANK_RAISED
