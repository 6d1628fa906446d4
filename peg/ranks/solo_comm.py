"""The communicator of a group of one."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from peg.errors import CommAborted


class SoloComm:
    """One rank: every collective is the identity. `poll` and `abort` may come from any thread, all else from its own.

    `entered`, where there is one, is called inside every collective.
    """

    rank = 0
    world_size = 1
    kind = "solo"
    waits = False  # nobody is waited for

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.issued = 0
        self.entered: Callable[[], None] | None = None
        self._reason: str | None = None

    def all_reduce_(self, tensor: Tensor) -> None:
        self._enter()

    def all_gather(self, out: Tensor, tensor: Tensor) -> None:
        self._enter()
        out[0].copy_(tensor)

    def broadcast_(self, tensor: Tensor, root: int) -> None:
        self._enter()

    def replay(self, launch: Callable[[], None]) -> None:
        self._enter()
        launch()

    def barrier(self, deadline_s: float) -> None:
        self._enter()

    def poll(self) -> str | None:
        return self._reason

    def abort(self, reason: str) -> None:
        if self._reason is None:
            self._reason = reason

    def close(self, deadline_s: float) -> None:
        self.abort("the communicator is closed")

    def _enter(self) -> None:
        if self._reason is not None:
            raise CommAborted(self._reason)
        self.issued += 1
        if self.entered is not None:
            self.entered()
