"""NVIDIA's bindings of NCCL: the few calls that a communicator is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_SUM = 0
_SUCCESS, _IN_PROGRESS = 0, 7


class Nccl:
    """The libnccl of this process, through nccl4py's low-level calls, each of which releases the interpreter lock.

    Making it loads the library; any thread may use it. Pointers, streams, counts and dtypes are plain integers: these
    calls are made many times a step.
    """

    def __init__(self) -> None:
        from nccl.bindings import nccl  # noqa: PLC0415 (there only with CUDA)

        self._nccl = nccl
        version = int(nccl.get_version())
        self.version = (version // 10000, version // 100 % 100, version % 100)
        self.path = str(nccl.get_library_path())
        self.all_gather: Callable[[int, int, int, int, Any, int], None] = nccl.all_gather
        self.broadcast: Callable[[int, int, int, int, int, Any, int], None] = nccl.broadcast

    def unique_id(self) -> bytes:
        """What the ranks of one group recognise each other by."""
        return bytes(self._nccl.get_unique_id())

    def connect(self, world_size: int, rank: int, unique_id: bytes) -> Any:
        """Join a group on the current device; blocks until every rank does."""
        return self._nccl.comm_init_rank_scalable(world_size, rank, 1, bytearray(unique_id), 0)

    def all_reduce(self, send: int, receive: int, count: int, dtype: int, comm: Any, stream: int) -> None:
        """Sum."""
        self._nccl.all_reduce(send, receive, count, dtype, _SUM, comm, stream)

    def error(self, comm: Any) -> str | None:
        """What went wrong on a communicator since, if anything; returns at once."""
        code = int(self._nccl.comm_get_async_error(comm))
        if code in {_SUCCESS, _IN_PROGRESS}:
            return None
        return f"{self._nccl.get_error_string(code)} ({self._nccl.get_last_error(comm)})"

    def abort(self, comm: Any) -> None:
        """Raise the communicator's flag, at which its kernels end, and free it.

        What the ranks of a process share is freed by the last one's call, which therefore returns only once every
        captured graph with a collective in it is gone.
        """
        self._nccl.comm_abort(comm)
