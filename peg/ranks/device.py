"""What a rank computes on: how numbers get there and back, and when what was asked for is done."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from peg.ranks.machine import cores_per_rank, kv_budget_bytes

HostArray: TypeAlias = npt.NDArray[Any]


class Landing(Protocol):
    """Tensors on their way to the host: `tensors` may be read once `done`, which asks the device without waiting."""

    @property
    def tensors(self) -> Sequence[Tensor]: ...

    def done(self) -> bool: ...


class Device(Protocol):
    """One rank's device. `name` and `place` may be read by any thread, all else belongs to the rank's own.

    `stream` is the handle of the stream that its work is enqueued on, 0 where there are no streams.

    Work is in order: what `fetch` brings is what all that was asked for before it leaves.
    """

    name: str
    place: torch.device
    stream: int
    shared: bool  # whether other ranks of this process use it too, and may have to wait for one another on it
    launches: bool  # whether work goes on after it was asked for, so that the rank can meanwhile ask for more

    def enter(self) -> None:
        """Make the calling thread the rank's. Raises ConfigError where the device cannot be had."""

    def begin_step(self) -> None:
        """Reuse what the step before the last one used for `upload` and `fetch`; that step must be done."""

    def upload(self, arrays: Sequence[HostArray]) -> list[Tensor]:
        """The arrays on the device, in order; they may not be changed by whoever gave them."""

    def fetch(self, tensors: Sequence[Tensor]) -> Landing:
        """Bring tensors to the host."""

    def mark(self, tensors: Sequence[Tensor]) -> Landing:
        """Tensors that are on the host, and that what was asked for last writes to."""

    def workspace(self, more_bytes: int) -> AbstractContextManager[None]:
        """Keep what the body needed at its height, some more, and `more_bytes`, for all steps to come."""

    def pools(self) -> AbstractContextManager[None]:
        """Allocate what the body does apart from all else, for good."""

    def used_bytes(self) -> int:
        """What is in use of its memory, by whomever; 0 where nobody plans it."""

    def kv_budget_bytes(self) -> int:
        """What this rank's KV pools may take by default, once everything else is there."""

    def done(self) -> bool:
        """Whether all that was asked for is done; returns at once."""

    def synchronize(self) -> None:
        """Wait for all that was asked for."""

    def usable(self) -> bool:
        """Whether a small allocation succeeds: after an error, whether the device is of any further use."""


class Landed:
    """What was on the host all along."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def done(self) -> bool:
        return True


class CpuDevice:
    """A share of this machine's cores. Threads as in `Device`; every call returns when its work is done."""

    name = "cpu"
    place = torch.device("cpu")
    stream = 0
    shared = False  # cores are not waited for
    launches = False

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        torch.get_num_threads()  # settles this thread's own number, which would else become what a rank sets for itself

    def enter(self) -> None:
        torch.set_num_threads(cores_per_rank(self._world_size))

    def begin_step(self) -> None:
        pass

    def upload(self, arrays: Sequence[HostArray]) -> list[Tensor]:
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]

    def fetch(self, tensors: Sequence[Tensor]) -> Landed:
        return Landed(tensors)

    def mark(self, tensors: Sequence[Tensor]) -> Landed:
        return Landed(tensors)

    def workspace(self, more_bytes: int) -> AbstractContextManager[None]:
        return nullcontext()

    def pools(self) -> AbstractContextManager[None]:
        return nullcontext()

    def used_bytes(self) -> int:
        return 0

    def kv_budget_bytes(self) -> int:
        return kv_budget_bytes(self._world_size)

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def usable(self) -> bool:
        try:
            torch.empty(1 << 20, dtype=torch.uint8)
        except (MemoryError, RuntimeError):
            return False
        return True
