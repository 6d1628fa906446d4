"""The communicator protocol, as models and ranks consume it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Communicator(Protocol):
    """Collectives among the ranks of one group, for one epoch.

    1. Every rank issues the same sequence of (operation, shape, dtype).
    2. Sums are the same bits on every rank.
    3. A call returns once enqueued (CUDA) or done (CPU); it blocks the host only in an abortable wait.
    4. `abort` is idempotent, may come from any thread, takes no lock a blocked rank can hold and never waits
       for a device. Blocked and later calls raise `CommAborted` with the reason.
    5. Nothing computed in an aborted epoch may be published.

    All other methods are called by the owning rank's thread only.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def issued(self) -> int:
        """How many collectives this rank has issued, the same on all ranks at the same point of a step."""

    def all_reduce_(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over all ranks, summed in rank order."""

    def all_gather(self, out: Tensor, tensor: Tensor) -> None:
        """Fill `out` [R, *tensor.shape] with every rank's `tensor`, in rank order."""

    def broadcast_(self, tensor: Tensor, root: int) -> None:
        """Replace `tensor` by that of rank `root`."""

    def replay(self, launch: Callable[[], None]) -> None:
        """Launch collectives of this communicator that were captured, all in one."""

    def barrier(self, deadline_s: float) -> None:
        """Return once every rank is here; raises TimeoutError after `deadline_s`."""

    def poll(self) -> str | None:
        """The reason of an abort or an asynchronous error, None while all is well. Any thread."""

    def abort(self, reason: str) -> None:
        """Wake everyone who waits, for good. Any thread."""

    def close(self, deadline_s: float) -> None:
        """Give back what the communicator holds; a later call on it raises `CommAborted`."""
