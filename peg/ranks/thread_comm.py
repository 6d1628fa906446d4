"""Collectives among rank threads of one process, on the CPU.

A collective is one rendezvous. Every rank puts its tensors down; the last to arrive looks whether all asked for the
same, does the work for all (they share memory), and wakes the others. So a rank sleeps at most once a collective, the
last one never, and nobody touches a tensor before its owner is awake.

Sharing the work out, which takes a second rendezvous, gains nothing on two cores even at 4 MB (measured).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from peg.errors import CommAborted, CommMismatch, RankError

Call: TypeAlias = tuple[object, ...]
"""What every rank must ask for alike: operation, shape, dtype, root."""

PutDown: TypeAlias = Sequence[tuple[Tensor, ...]]
"""The tensors of one collective, by rank."""


class Rendezvous:
    """Where the ranks of one group meet, for one epoch. Shared by all rank threads; any thread may abort it.

    `_mutex` guards what follows it and is held for a few assignments, never while a rank waits or works. A waiting
    rank sleeps on a bell of its own, a lock that is released to wake it. Once there is a `reason` nobody waits again:
    who comes later finds it under the mutex, who waits already is woken by the abort.
    """

    def __init__(self, world_size: int, epoch: int) -> None:
        self.world_size = world_size
        self.epoch = epoch
        self._bells = [threading.Lock() for _ in range(world_size)]
        for bell in self._bells:
            bell.acquire()
        self._mutex = threading.Lock()
        self._arrived = 0
        self._calls: list[Call] = [()] * world_size
        self._put_down: list[tuple[Tensor, ...]] = [()] * world_size
        self.asleep = [False] * world_size  # each written by its own rank
        self._reason: str | None = None
        self._error: type[RankError] = CommAborted

    @property
    def reason(self) -> str | None:
        """Why it was aborted, None while all is well. Any thread."""
        return self._reason

    def abort(self, reason: str, error: type[RankError] = CommAborted) -> None:
        """Wake everyone, for good; who is inside a collective gets `error`. The first reason stays. Any thread."""
        with self._mutex:
            if self._reason is not None:
                return
            self._reason, self._error = reason, error
        for bell in self._bells:
            _ring(bell)

    def meet(
        self,
        rank: int,
        call: Call,
        tensors: tuple[Tensor, ...] = (),
        work: Callable[[PutDown], None] | None = None,
        timeout_s: float | None = None,
        entered: Callable[[], None] | None = None,
    ) -> None:
        """Return once every rank is here, and the last to arrive has done `work` on what all put down.

        `entered` is called on arrival. Raises CommAborted, CommMismatch, and TimeoutError after `timeout_s`, which
        aborts the group.
        """
        last = self._arrive(rank, call, tensors)
        if entered is not None:
            entered()
        if last:
            self._finish(rank, work)
        else:
            self._wait(rank, timeout_s)

    def _arrive(self, rank: int, call: Call, tensors: tuple[Tensor, ...]) -> bool:
        """Whether this rank is the last, which must finish while the others wait."""
        with self._mutex:
            if self._reason is not None:
                raise CommAborted(self._reason)
            self._calls[rank], self._put_down[rank] = call, tensors
            self._arrived = (self._arrived + 1) % self.world_size
            return self._arrived == 0

    def _wait(self, rank: int, timeout_s: float | None) -> None:
        """Sleep until the last has finished."""
        self.asleep[rank] = True
        woken = self._bells[rank].acquire(timeout=-1 if timeout_s is None else timeout_s)
        self.asleep[rank] = False
        if not woken:
            message = f"rank {rank} waited over {timeout_s:g} s for the others in {self._calls[rank][0]}"
            self.abort(message)
            raise TimeoutError(message)
        self._check()

    def _finish(self, rank: int, work: Callable[[PutDown], None] | None) -> None:
        """Compare what all asked for, do `work` on what they put down, wake them."""
        for other, call in enumerate(self._calls):
            if call != self._calls[0]:
                told = f"rank 0 {_spell(self._calls[0])}, rank {other} {_spell(call)}"
                self.abort(f"ranks issued different collectives: {told}", CommMismatch)
        self._check()
        done = work is None
        try:
            if work is not None:
                work(self._put_down)
                done = True
        finally:
            if not done:
                self.abort(f"rank {rank} failed inside {_spell(self._calls[rank])}")
        for other, bell in enumerate(self._bells):
            if other != rank:
                _ring(bell)

    def _check(self) -> None:
        if self._reason is not None:
            raise self._error(self._reason)


class ThreadComm:
    """One rank's end of a rendezvous. `poll` and `abort` may come from any thread, all else from the rank's own.

    Sums are taken in rank order in fp32 (integers in their own type) and rounded once, by one rank for all, so all
    get the same bits. `entered`, where there is one, is called once this rank has arrived, before it waits or works.
    """

    kind = "thread"

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        self.rank = rank
        self.world_size = rendezvous.world_size
        self.epoch = rendezvous.epoch
        self.entered: Callable[[], None] | None = None
        self.issued = 0
        self._rendezvous = rendezvous

    @property
    def waits(self) -> bool:
        """Whether this rank sleeps until its peers come. Any thread."""
        return self._rendezvous.asleep[self.rank]

    def all_reduce_(self, tensor: Tensor) -> None:
        self._collective(("all_reduce", tuple(tensor.shape), tensor.dtype), (tensor,), _sum)

    def all_gather(self, out: Tensor, tensor: Tensor) -> None:
        assert out.shape == (self.world_size, *tensor.shape), (out.shape, tensor.shape)
        self._collective(("all_gather", tuple(tensor.shape), tensor.dtype), (tensor, out), _gather)

    def broadcast_(self, tensor: Tensor, root: int) -> None:
        assert 0 <= root < self.world_size, root
        call = ("broadcast", tuple(tensor.shape), tensor.dtype, f"root {root}")
        self._collective(call, (tensor,), lambda put_down: _spread(put_down, root))

    def replay(self, launch: Callable[[], None]) -> None:
        raise AssertionError("collectives that meet on the host cannot be captured")

    def barrier(self, deadline_s: float) -> None:
        self._rendezvous.meet(self.rank, ("barrier",), timeout_s=deadline_s, entered=self.entered)

    def poll(self) -> str | None:
        return self._rendezvous.reason

    def abort(self, reason: str) -> None:
        self._rendezvous.abort(reason)

    def close(self, deadline_s: float) -> None:
        """Close this end; peers may be in the last collective that both arrived at, and are left in peace."""
        self._rendezvous = Rendezvous(self.world_size, self.epoch)
        self._rendezvous.abort("the communicator is closed")

    def _collective(self, call: Call, tensors: tuple[Tensor, ...], work: Callable[[PutDown], None]) -> None:
        self.issued += 1
        self._rendezvous.meet(self.rank, call, tensors, work, entered=self.entered)


def _ring(bell: threading.Lock) -> None:
    """Wake who sleeps on a bell. It may ring already: an abort and the last to arrive can do so at the same time."""
    try:
        bell.release()
    except RuntimeError:
        return


def _spell(call: Call) -> str:
    return f"{call[0]}({', '.join(map(str, call[1:]))})"


def _sum(put_down: PutDown) -> None:
    """Replace each tensor by the sum of all, added up in rank order."""
    first = put_down[0][0]
    total = first if first.dtype.itemsize >= 4 else first.float()
    for (part,) in put_down[1:]:
        total.add_(part)
    for (part,) in put_down:
        if part is not total:
            part.copy_(total)


def _gather(put_down: PutDown) -> None:
    for _, out in put_down:
        for rank, (part, _) in enumerate(put_down):
            out[rank].copy_(part)


def _spread(put_down: PutDown, root: int) -> None:
    for rank, (tensor,) in enumerate(put_down):
        if rank != root:
            tensor.copy_(put_down[root][0])
