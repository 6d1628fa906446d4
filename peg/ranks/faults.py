"""Fault injection: what may go wrong on a rank, made to go wrong. Built in only when it was asked for at start."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

import structlog
from torch import Tensor

from peg.errors import CommAborted, InjectedFault
from peg.failure import Fault, FaultKind, FaultPlace, FaultPoint
from peg.plan import RankAck
from peg.ranks.nccl_comm import NcclComm
from peg.ranks.solo_comm import SoloComm
from peg.ranks.thread_comm import ThreadComm

log = structlog.get_logger("peg.faults")

PlainComm: TypeAlias = SoloComm | ThreadComm | NcclComm
"""The communicators that have an inside to strike in."""

_STALL_TICK_S = 0.002
_FOR_EVER_S = 1 << 30
_ON_COLLECTIVES = (FaultKind.SKIP, FaultKind.EXTRA, FaultKind.WRONG_SHAPE)
_ON_ACKS = (FaultKind.WRONG_TOKEN, FaultKind.WRONG_DIGEST, FaultKind.UNREADABLE)


class InjectedDeath(BaseException):
    """Ends a rank's thread as if it had ended by itself: it must pass everything that catches exceptions."""


class RankFaults:
    """The faults armed on one rank. `arm`, `over` and `let_go` may be called by any thread, all else by the rank's own.

    A fault strikes at its point of the first collective; where there is none, at the end. `let_go` ends what
    else would go on for ever: nothing but a test, whose process must go on, ever calls it.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._armed: list[tuple[int, int, Fault]] = []
        self._due: list[Fault] = []
        self._now = (FaultPlace.LOAD, 0, -1)
        self._comm: FaultyComm | None = None
        self._over_epoch = -1
        self._held = threading.Event()
        self._actions: Mapping[FaultKind, Callable[[Fault], None]] = {
            FaultKind.RAISE: self._raise,
            FaultKind.MEMORY_ERROR: self._run_out_of_memory,
            FaultKind.STALL: self._stall,
            FaultKind.SPIN: self._spin,
            FaultKind.HANG: self._hang,
            FaultKind.SEIZE: self._seize,
            FaultKind.DIE: self._die,
            FaultKind.ABORT_HANGS: self._spoil_abort,
            FaultKind.ABORT_RAISES: self._spoil_abort,
            FaultKind.COMM_ERROR: self._report_error,
        }

    # --- any thread -------------------------------------------------------------------------------------

    def arm(self, fault: Fault, epoch: int, step: int) -> None:
        """One more. Where it strikes a step, it is this one of this epoch."""
        with self._lock:
            self._armed.append((epoch, step, fault))

    def over(self, epoch: int) -> None:
        """This epoch and those before it are over: a rank without a communicator stalls no longer."""
        self._over_epoch = max(self._over_epoch, epoch)

    def let_go(self) -> None:
        """End what would go on for ever."""
        self._held.set()

    # --- the rank's thread ------------------------------------------------------------------------------

    def wrap(self, comm: PlainComm) -> FaultyComm:
        """The communicator of a new epoch."""
        self._comm = FaultyComm(comm, self)
        return self._comm

    def begin(self, place: FaultPlace, epoch: int, step: int = -1) -> None:
        """The rank is about to do something."""
        self._now = (place, epoch, step)
        if place is FaultPlace.CONNECT:
            self._comm = None
        with self._lock:
            due = [entry for entry in self._armed if self._strikes_now(*entry)]
            self._armed = [entry for entry in self._armed if entry not in due and entry[0] >= epoch]
        self._due = [fault for _, _, fault in due]

    def end(self) -> None:
        """It is done: strike what found no collective."""
        for point in FaultPoint:
            self.strike(point)

    def strike(self, point: FaultPoint) -> None:
        """Do what is due at this point."""
        for fault in self._due:
            if fault.point is point and fault.kind in self._actions:
                self._due.remove(fault)
                self._tell(fault)
                self._actions[fault.kind](fault)
                return

    def take(self, kinds: tuple[FaultKind, ...]) -> FaultKind | None:
        """The kind of a fault that is due now and is one of `kinds`."""
        for fault in self._due:
            if fault.kind in kinds:
                self._due.remove(fault)
                self._tell(fault)
                return fault.kind
        return None

    def alter(self, ack: RankAck) -> RankAck:
        """What the rank tells of a step. Raises InjectedFault where that cannot be read."""
        with self._lock:
            armed = [fault for epoch, step, fault in self._armed if (epoch, step) == (ack.epoch, ack.step)]
        due = [fault for fault in armed if fault.kind in _ON_ACKS]
        kinds = [fault.kind for fault in due]
        for fault in due:
            self._tell(fault)
        if FaultKind.UNREADABLE in kinds:
            raise InjectedFault(f"injected on rank {self._rank} while it read step {ack.step}")
        if FaultKind.WRONG_DIGEST in kinds:
            ack = replace(ack, digest=ack.digest ^ 1)
        if FaultKind.WRONG_TOKEN in kinds and ack.token_ids:
            ack = replace(ack, token_ids=(ack.token_ids[0] ^ 1, *ack.token_ids[1:]))
        return ack

    def _tell(self, fault: Fault) -> None:
        """Log that a fault strikes, and when on the machine's monotonic clock: latencies are counted from there."""
        place, _, step = self._now
        log.warning("fault strikes", at_s=time.monotonic(), kind=fault.kind, rank=self._rank, place=place, step=step)

    def wait_for_ever(self) -> None:
        """Wait in a call that releases the interpreter lock."""
        self._held.wait()

    def _strikes_now(self, epoch: int, step: int, fault: Fault) -> bool:
        place, now_epoch, now_step = self._now
        if fault.kind in _ON_ACKS or fault.place is not place:
            return False
        return place is not FaultPlace.STEP or (epoch, step) == (now_epoch, now_step)

    # --- what strikes -----------------------------------------------------------------------------------

    def _raise(self, fault: Fault) -> None:
        raise InjectedFault(f"injected on rank {self._rank} {fault.point} a collective")

    def _run_out_of_memory(self, fault: Fault) -> None:
        raise MemoryError(f"injected on rank {self._rank} {fault.point} a collective")

    def _stall(self, fault: Fault) -> None:
        while (reason := self._over()) is None:
            time.sleep(_STALL_TICK_S)
        raise CommAborted(reason)

    def _over(self) -> str | None:
        if self._comm is not None:
            return self._comm.aborted
        return "the epoch is over" if self._over_epoch >= self._now[1] else None

    def _spin(self, fault: Fault) -> None:
        while not self._held.is_set():
            pass

    def _hang(self, fault: Fault) -> None:
        self.wait_for_ever()

    def _seize(self, fault: Fault) -> None:
        ctypes.PyDLL(None).sleep(_FOR_EVER_S)

    def _die(self, fault: Fault) -> None:
        raise InjectedDeath

    def _spoil_abort(self, fault: Fault) -> None:
        assert self._comm is not None
        self._comm.spoiled = fault.kind
        self._raise(fault)

    def _report_error(self, fault: Fault) -> None:
        assert self._comm is not None
        self._comm.error = f"injected into the communicator of rank {self._rank}"


class FaultyComm:
    """A communicator that is struck before, inside and after its collectives. Threads as in the one it wraps."""

    def __init__(self, comm: PlainComm, faults: RankFaults) -> None:
        self._comm = comm
        self._faults = faults
        self.rank = comm.rank
        self.world_size = comm.world_size
        self.epoch = comm.epoch
        self.kind = comm.kind
        self.error: str | None = None
        self.spoiled: FaultKind | None = None
        comm.entered = lambda: faults.strike(FaultPoint.INSIDE)

    @property
    def aborted(self) -> str | None:
        """Why the real communicator was aborted, None while it was not. Any thread."""
        return self._comm.poll()

    @property
    def waits(self) -> bool:
        return self._comm.waits

    @property
    def issued(self) -> int:
        return self._comm.issued

    def all_reduce_(self, tensor: Tensor) -> None:
        self._issue(tensor, self._comm.all_reduce_)

    def all_gather(self, out: Tensor, tensor: Tensor) -> None:
        self._issue(tensor, lambda tensor: self._comm.all_gather(out, tensor))

    def broadcast_(self, tensor: Tensor, root: int) -> None:
        self._issue(tensor, lambda tensor: self._comm.broadcast_(tensor, root))

    def replay(self, launch: Callable[[], None]) -> None:
        self._faults.strike(FaultPoint.BEFORE)
        if self._faults.take(_ON_COLLECTIVES) is None:  # whatever it is, the peers are left alone
            self._comm.replay(launch)
        self._faults.strike(FaultPoint.AFTER)

    def barrier(self, deadline_s: float) -> None:
        self._faults.strike(FaultPoint.BEFORE)
        self._comm.barrier(deadline_s)
        self._faults.strike(FaultPoint.AFTER)

    def poll(self) -> str | None:
        return self.error or self._comm.poll()

    def abort(self, reason: str) -> None:
        if self.spoiled is FaultKind.ABORT_HANGS:
            self._faults.wait_for_ever()
        if self.spoiled is FaultKind.ABORT_RAISES:
            raise InjectedFault(f"injected into the abort of rank {self.rank}")
        self._comm.abort(reason)

    def close(self, deadline_s: float) -> None:
        self._comm.close(deadline_s)

    def _issue(self, tensor: Tensor, call: Callable[[Tensor], None]) -> None:
        self._faults.strike(FaultPoint.BEFORE)
        match self._faults.take(_ON_COLLECTIVES):
            case FaultKind.SKIP:
                pass
            case FaultKind.EXTRA:
                call(tensor.clone())
                call(tensor)
            case FaultKind.WRONG_SHAPE:
                self._comm.all_reduce_(tensor.new_zeros(tensor.numel() + 1))
            case _:
                call(tensor)
        self._faults.strike(FaultPoint.AFTER)


RankComm: TypeAlias = PlainComm | FaultyComm
"""What a rank's thread computes with."""


class GroupFaults:
    """The faults that strike no rank: the loop that issues steps, and the supervisor that looks at the ranks.

    `arm` and `issue` are called by the loop, `look` by the supervisor's thread.
    """

    def __init__(self) -> None:
        self._armed: list[tuple[int, FaultKind]] = []
        self._blind = False

    def arm(self, fault: Fault, step: int) -> None:
        """Strike when this step is issued; at once where a fault is for no step."""
        if fault.place is FaultPlace.STEP:
            self._armed.append((step, fault.kind))
        else:
            self._blind = fault.kind is FaultKind.SUPERVISOR_RAISES

    def issue(self, step: int) -> None:
        """A step is issued."""
        due = [kind for when, kind in self._armed if when == step]
        self._armed = [(when, kind) for when, kind in self._armed if when != step]
        self._blind = self._blind or FaultKind.SUPERVISOR_RAISES in due
        if FaultKind.LOOP_RAISES in due:
            raise InjectedFault(f"injected into the loop as it issued step {step}")

    def look(self) -> None:
        """The supervisor looks at the ranks."""
        if self._blind:
            self._blind = False
            raise InjectedFault("injected into the supervisor")
