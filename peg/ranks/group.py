"""The ranks of one engine, together: started, driven, compared, wound up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf

from peg.config import EngineConfig
from peg.errors import CommAborted, ConfigError, InvalidRequest, RankError, UsageError
from peg.failure import Cause, CauseKind, FailureCallback, Fault, FaultKind, Heartbeat
from peg.plan import (
    Connect,
    EngineInfo,
    LoadWeights,
    MakeCache,
    RankCommand,
    Settle,
    Shutdown,
    StepOutcome,
    StepPlan,
    WarmUp,
)
from peg.ranks.aborts import Aborts
from peg.ranks.blueprint import Blueprint, draw_blueprint
from peg.ranks.clock import Clock, join_all
from peg.ranks.device import Device
from peg.ranks.devices import open_devices, open_nccl, refuse_weights
from peg.ranks.faults import GroupFaults, RankComm, RankFaults
from peg.ranks.lockstep import Lockstep
from peg.ranks.meeting import Meeting
from peg.ranks.memory import tell_memory
from peg.ranks.nccl import Nccl
from peg.ranks.rank import Rank
from peg.ranks.tickets import Answer, Ticket

_ABORT_S = 1.0
_JOIN_S = 2.0


class RankGroup:
    """Drives all ranks alike: whatever one gets, all get, in the same order, before anyone is waited for.

    `start` and `rebuild` run on a thread that may wait, `run` on the loop, `connect` to `failed` on the ranks'
    threads, all else on any. What several of them touch is guarded by `_lock`, which is held for a few assignments.

    `on_result` is called on the thread of the last rank to end a step, once a step, in the order of the plans, and
    only while `may_publish` says so of its epoch and no communicator reports an error. `on_failure` may be called
    by any rank's thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_result: Callable[[StepOutcome], None],
        on_failure: FailureCallback,
        may_publish: Callable[[int], bool],
    ) -> None:
        self._config = config
        self._world_size = config.tensor_parallel_size
        self._on_result = on_result
        self._on_failure = on_failure
        self._may_publish = may_publish
        self._lock = threading.Lock()
        self._ranks: tuple[Rank, ...] = ()
        self._nccl: Nccl | None = None
        self._meeting = Meeting(self._world_size, 0, None)
        self._comms: dict[int, RankComm] = {}
        self._tickets: dict[int, Ticket] = {}
        self._lockstep: Lockstep | None = None
        self._last_step = -1
        inject = config.enable_fault_injection
        self._faults = GroupFaults() if inject else None
        self._rank_faults = [RankFaults(rank) if inject else None for rank in range(self._world_size)]
        self._aborts: Aborts | None = None
        self._reason: str | None = None  # of the poison; no step runs any more
        self._closing = False

    # --- life -------------------------------------------------------------------------------------------

    def start(self, deadline_s: float, phases_s: Mapping[type[RankCommand], float] | None = None) -> EngineInfo:
        """Start the threads and load the model, all ranks phase by phase, each within its own limit if it has one.

        Raises UsageError where the checkpoint or the configuration is at fault. Where a rank failed or was late,
        `on_failure` is called and RankError raised. Whatever is raised, the threads are told to end.
        """
        clock = Clock(deadline_s)
        limits = phases_s or {}

        def within(phase: type[RankCommand]) -> float:
            return min(clock.left_s, limits.get(phase, clock.left_s))

        loaded = False
        try:
            devices, self._nccl = open_devices(self._config), open_nccl(self._config)
            blueprint = draw_blueprint(self._config)
            refuse_weights(devices, blueprint.rank_weight_bytes)
            clock.lap("validate")
            self._meeting = Meeting(self._world_size, 0, self._nccl)
            self._start_threads(blueprint, devices)
            self._all_do(LoadWeights(), within(LoadWeights))
            clock.lap("load")
            self._all_do(Connect(0), within(Connect))
            clock.lap("connect")
            self._all_do(WarmUp(), within(WarmUp))
            capacities = blueprint.capacities(self._kv_budget_bytes())
            self._all_do(MakeCache(capacities), within(MakeCache))
            clock.lap("warm up")
            tell_memory(
                [(rank.runner.device, rank.runner.used) for rank in self._ranks], blueprint.kv_bytes(capacities)
            )
            loaded = True
        finally:
            if not loaded:
                self.poison("the start failed")
                self.close(_JOIN_S)
        names = tuple(device.name for device in devices)
        return blueprint.describe(capacities, names, self._comms[0].kind, clock.laps)

    def rebuild(self, epoch: int, deadline_s: float, back_s: float = inf) -> None:
        """Begin a new epoch after a failure: new communicators, empty rows; weights and pools stay.

        Raises RankError where a rank is not back at its queue within `back_s`, or not connected in time. What the
        ranks have to tell of the old epoch they have told by the time this returns.
        """
        clock = Clock(deadline_s)
        self._all_do(Settle(), min(back_s, clock.left_s))
        meeting = Meeting(self._world_size, epoch, self._nccl)
        with self._lock:
            self._meeting, self._comms, self._aborts, self._reason = meeting, {}, None, None
            self._last_step = -1
        self._all_do(Connect(epoch), clock.left_s)

    def close(self, deadline_s: float) -> bool:
        """End the threads, once the steps that are out are done or the deadline is over; whether all have ended."""
        if self.join(deadline_s if self._reason is None else 0.0):
            return True
        self.abort("the ranks are closed", _ABORT_S)
        return self.join(_JOIN_S)

    def join(self, deadline_s: float) -> bool:
        """Let every thread end once its queue is empty; whether all did in time, helpers included."""
        with self._lock:
            ranks, first = self._ranks, not self._closing
            self._closing = True
        if first:
            for rank in ranks:
                rank.put(Shutdown())
        helpers = () if self._aborts is None else self._aborts.threads
        threads = (*(rank.thread for rank in ranks), *helpers)
        return join_all(threads, deadline_s)

    # --- steps ------------------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> None:
        """Put a step into every rank's queue. Never blocks; after `poison`, or for an old epoch, it does nothing."""
        with self._lock:
            if self._reason is not None or self._closing or plan.epoch != self._meeting.epoch:
                return
            self._tickets[plan.step] = Ticket(self._world_size)
            self._last_step = plan.step
        if self._faults is not None:
            self._faults.issue(plan.step)
        self._put(plan)

    def inject(self, fault: Fault) -> None:
        """Arm a fault. Raises InvalidRequest for a rank that is not there, ConfigError if injection is off."""
        if self._faults is None:
            raise ConfigError("faults can be injected only with --enable-fault-injection")
        if not 0 <= fault.rank < self._world_size:
            raise InvalidRequest(f"rank {fault.rank}: must be 0 to {self._world_size - 1}", "rank")
        step, faults = self._last_step + fault.after_steps, self._rank_faults[fault.rank]
        assert faults is not None
        if fault.kind in (FaultKind.LOOP_RAISES, FaultKind.SUPERVISOR_RAISES):
            self._faults.arm(fault, step)
        else:
            faults.arm(fault, self._meeting.epoch, step)

    # --- what the supervisor needs ----------------------------------------------------------------------

    def heartbeats(self) -> tuple[Heartbeat, ...]:
        """Where each rank is."""
        comms = dict(self._comms)
        beats = (rank.heartbeat() for rank in self._ranks)
        return tuple(replace(beat, waits=beat.rank in comms and comms[beat.rank].waits) for beat in beats)

    def dead_rank(self) -> int | None:
        """A rank whose thread has ended although nobody asked it to."""
        dead = [rank.rank for rank in self._ranks if not rank.thread.is_alive()]
        return dead[0] if dead and not self._closing else None

    def poll(self) -> str | None:
        """The error of a communicator; None while all is well, and once the group is being closed."""
        if self._faults is not None:
            self._faults.look()
        error = self._comm_error()
        return None if self._closing else error  # in this order: closing is known before a communicator is closed

    def poison(self, reason: str) -> None:
        """No rank takes another step, nothing is published; a start that waits ends. The first reason stays."""
        with self._lock:
            if self._reason is None:
                self._reason = reason
            self._tickets.clear()
            if self._lockstep is not None:
                self._lockstep.end(RankError(reason))
            epoch, ranks = self._meeting.epoch, self._ranks
        for rank in ranks:
            rank.poison(epoch)

    def abort(self, reason: str, deadline_s: float) -> bool:
        """Poison, and abort every communicator, each once and on a thread of its own; whether all came back."""
        self.poison(reason)
        with self._lock:
            if self._aborts is None:
                self._aborts = Aborts(tuple(self._comms.values()), reason, self._on_failure)
            aborts = self._aborts
        return aborts.wait(deadline_s)

    # --- what the ranks tell ----------------------------------------------------------------------------

    def connect(self, rank: int, epoch: int) -> RankComm:
        """See `RankListener`."""
        plain, faults = self._meeting.join(rank, self._ranks[rank].runner.device), self._rank_faults[rank]
        comm = plain if faults is None else faults.wrap(plain)
        assert comm.epoch == epoch, (comm.epoch, epoch)
        with self._lock:
            reason = self._reason
            if reason is None:
                self._comms[rank] = comm
        if reason is not None:
            comm.abort(reason)
            raise CommAborted(reason)
        return comm

    def done(self, rank: int) -> None:
        """See `RankListener`."""
        with self._lock:
            if self._lockstep is not None:
                self._lockstep.done(rank)

    def answered(self, rank: int, answer: Answer) -> None:
        """See `RankListener`. The last answer to a step publishes it, or finds that the ranks differ."""
        with self._lock:
            ticket = self._tickets.get(answer.step)
            if ticket is None or not ticket.add(rank, answer):
                return
            del self._tickets[answer.step]
        outcome = ticket.conclude()
        if isinstance(outcome, Cause):
            self._on_failure(outcome)
        elif self._comm_error() is None and self._may_publish(outcome.epoch):
            self._on_result(outcome)

    def failed(self, cause: Cause, usage: UsageError | None) -> None:
        """See `RankListener`."""
        with self._lock:
            if self._lockstep is not None and cause.step is None:
                cause = replace(cause, kind=CauseKind.STARTUP_FAILED)
                self._lockstep.end(usage or RankError(str(cause)))
        if usage is None:
            self._on_failure(cause)

    # --- helpers ----------------------------------------------------------------------------------------

    def _put(self, command: RankCommand) -> None:
        """The one place that drives ranks: all of them, before anyone is waited for."""
        for rank in self._ranks:
            rank.put(command)

    def _start_threads(self, blueprint: Blueprint, devices: Sequence[Device]) -> None:
        made = zip(devices, self._rank_faults, strict=True)
        ranks = tuple(Rank(blueprint, rank, device, self, faults) for rank, (device, faults) in enumerate(made))
        with self._lock:
            if self._closing:
                raise RankError("closed before it was started")
            for rank in ranks:
                rank.thread.start()
            self._ranks = ranks

    def _all_do(self, command: RankCommand, within_s: float) -> None:
        """Let every rank carry out a command, and wait for all."""
        lockstep = Lockstep(self._world_size)
        with self._lock:
            if self._reason is not None and not isinstance(command, Settle):
                raise RankError(self._reason)
            self._lockstep = lockstep
        self._put(command)
        in_time = lockstep.over.wait(within_s)
        with self._lock:
            self._lockstep = None
        if lockstep.error is not None:
            raise lockstep.error
        if not in_time:
            cause = self._late(type(command).__name__, lockstep.waiting, within_s)
            self._on_failure(cause)
            raise RankError(cause.message)

    def _late(self, phase: str, ranks: set[int], limit_s: float) -> Cause:
        """Who held a phase up: of the ranks that are not done, the one that does not wait for the others."""
        busy = [beat.rank for beat in self.heartbeats() if beat.rank in ranks and not beat.waits]
        told = ", ".join(map(str, sorted(busy or ranks)))
        return Cause(
            kind=CauseKind.STARTUP_DEADLINE,
            message=f"{phase} took over {limit_s:.1f} s on rank {told}",
            rank=busy[0] if len(busy) == 1 else None,
            phase=phase,
        )

    def _comm_error(self) -> str | None:
        return next((error for comm in tuple(self._comms.values()) if (error := comm.poll()) is not None), None)

    def _kv_budget_bytes(self) -> int:
        """What the pools of one rank may take: the same on all, as much as the poorest has."""
        return self._config.kv_cache_memory_bytes or min(rank.runner.kv_budget_bytes for rank in self._ranks)
