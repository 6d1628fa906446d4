"""Fault injection: what may go wrong on a rank, made to go wrong. Built in only when it was asked for at start."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import Tensor

from peg.errors import CommAborted, InjectedFault
from peg.failure import Fault, FaultKind, FaultPoint
from peg.ranks.nccl_comm import NcclComm
from peg.ranks.solo_comm import SoloComm
from peg.ranks.thread_comm import ThreadComm

RankComm: TypeAlias = SoloComm | ThreadComm | NcclComm
"""The communicators that have an inside to strike in."""

_STALL_TICK_S = 0.002


class RankFaults:
    """The faults armed on one rank. `add` may be called by any thread, all else by the rank's own.

    A fault strikes once, at its point of the first collective of its step; a step without one is struck at its end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._added: list[Fault] = []
        self._waiting: list[tuple[int, Fault]] = []
        self._due: list[Fault] = []
        self._comm: RankComm | None = None

    def add(self, fault: Fault) -> None:
        """Arm one more; its steps are counted from the next one that the rank begins."""
        with self._lock:
            self._added.append(fault)

    def wrap(self, comm: RankComm) -> FaultyComm:
        """The communicator of a new epoch."""
        self._comm = comm
        return FaultyComm(comm, self.strike)

    def begin_step(self) -> None:
        """Count down; what was not struck before is forgotten."""
        with self._lock:
            added, self._added = self._added, []
        self._waiting += [(max(1, fault.after_steps), fault) for fault in added]
        self._due = [fault for left, fault in self._waiting if left == 1]
        self._waiting = [(left - 1, fault) for left, fault in self._waiting if left > 1]

    def end_step(self) -> None:
        """Strike what found no collective."""
        for point in FaultPoint:
            self.strike(point)

    def strike(self, point: FaultPoint) -> None:
        """Do what is due at this point."""
        for fault in self._due:
            if fault.point is point:
                self._due.remove(fault)
                assert self._comm is not None
                _ACTIONS[fault.kind](fault, self._comm)
                return


class FaultyComm:
    """A communicator that is struck before, inside and after its collectives. Threads as in the one it wraps."""

    def __init__(self, comm: RankComm, strike: Callable[[FaultPoint], None]) -> None:
        self._comm = comm
        self._strike = strike
        self.rank = comm.rank
        self.world_size = comm.world_size
        self.epoch = comm.epoch
        comm.entered = lambda: strike(FaultPoint.INSIDE)

    def all_reduce_(self, tensor: Tensor) -> None:
        self._strike(FaultPoint.BEFORE)
        self._comm.all_reduce_(tensor)
        self._strike(FaultPoint.AFTER)

    def all_gather(self, out: Tensor, tensor: Tensor) -> None:
        self._strike(FaultPoint.BEFORE)
        self._comm.all_gather(out, tensor)
        self._strike(FaultPoint.AFTER)

    def broadcast_(self, tensor: Tensor, root: int) -> None:
        self._strike(FaultPoint.BEFORE)
        self._comm.broadcast_(tensor, root)
        self._strike(FaultPoint.AFTER)

    def barrier(self, deadline_s: float) -> None:
        self._strike(FaultPoint.BEFORE)
        self._comm.barrier(deadline_s)
        self._strike(FaultPoint.AFTER)

    def poll(self) -> str | None:
        return self._comm.poll()

    def abort(self, reason: str) -> None:
        self._comm.abort(reason)

    def close(self, deadline_s: float) -> None:
        self._comm.close(deadline_s)


def _raise(fault: Fault, comm: RankComm) -> None:
    raise InjectedFault(f"injected on rank {comm.rank} {fault.point} a collective")


def _stall(fault: Fault, comm: RankComm) -> None:
    """Hang until the communicator is aborted."""
    assert fault.rank == comm.rank
    while (reason := comm.poll()) is None:
        time.sleep(_STALL_TICK_S)
    raise CommAborted(reason)


_ACTIONS: Mapping[FaultKind, Callable[[Fault, RankComm], None]] = {
    FaultKind.RAISE: _raise,
    FaultKind.STALL: _stall,
}
