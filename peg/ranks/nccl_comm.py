"""Collectives among rank threads on CUDA devices, through NCCL."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from peg.errors import CommAborted
from peg.ranks.capture import capture, is_capturing
from peg.ranks.nccl import Nccl
from peg.ranks.thread_comm import ThreadComm

_DTYPES: Mapping[torch.dtype, int] = {
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
}
_GRACE_S = 0.25
_HOLD_S = 60.0
# A GPU takes about a thousand launches in advance. Whoever has that many out waits in the driver, holding a lock of the
# process, until his GPU goes on; which it must be able to do with what the others have launched. So ranks meet after
# so many collectives, between which a model launches ten kernels at most.
_TOGETHER = 16
_FOR_EVER_S = 1e6  # the supervisor knows how long a step may take
_TICK_S = 0.001


class NcclComm:
    """One rank's NCCL communicator, made on the rank's thread and used on its stream.

    `poll` and `abort` may come from any thread, all else from the rank's own. Barriers are met on the host, through
    `host`. Collectives are enqueued and return; after an abort the kernels end as if all were well, with garbage in
    their outputs, so what a step computed may be handed out only if `poll` finds nothing once the step is done.

    NCCL frees a communicator when the last rank of the process aborts its own, and does not look whether kernels are
    still to come on our streams: they would read memory that is gone. But it does wait for captured collectives. So
    after `hold` there is one graph with a collective in it, which is never run, and which `close` gives back once the
    rank's stream is done: an abort raises the flags at once, and frees only then.

    `_busy` is true while the rank's thread may be inside NCCL: freeing a communicator under it would be fatal.
    `_lock` is held for a look at the communicator or for marking it gone, never while anything waits. `entered`, where
    there is one, is called inside every collective.

    `finish` is there where ranks share a GPU, and waits for all that was enqueued on this rank's stream. Loading a
    kernel, which cuBLAS does for shapes that it sees for the first time, and asking for memory wait until the GPU is
    idle, under a lock that every launch takes; a peer's collective that waits for this rank would keep it busy for
    ever. So there nobody launches anything but the collective between its beginning on any rank and its end, and
    nobody goes on from a replay before everyone has launched it.
    """

    def __init__(
        self, nccl: Nccl, host: ThreadComm, unique_id: bytes, stream: int, finish: Callable[[], None] | None = None
    ) -> None:
        self.kind = f"nccl {'.'.join(map(str, nccl.version))}"
        self.rank = host.rank
        self.world_size = host.world_size
        self.epoch = host.epoch
        self.entered: Callable[[], None] | None = None
        self.issued = 0
        self._nccl = nccl
        self._host = host
        self._stream = stream
        self._finish = finish
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._gone = False
        self._busy = False
        self._aborting = threading.Thread(target=self._abort, name=f"peg-abort-{host.rank}", daemon=True)
        self._comm = nccl.connect(host.world_size, host.rank, unique_id)
        self._held: torch.cuda.CUDAGraph | None = None

    def hold(self, device: torch.device) -> None:
        """Let nothing be freed before `close`. Every rank calls it, before all else."""
        nothing = torch.zeros(1, device=device)
        self._host.barrier(_HOLD_S)
        self.all_reduce_(nothing)
        torch.cuda.current_stream(device).synchronize()
        for turn in range(self.world_size):
            self._host.barrier(_HOLD_S)
            if turn == self.rank:
                self._held = capture(lambda: self.all_reduce_(nothing))
        self._host.barrier(_HOLD_S)

    @property
    def waits(self) -> bool:
        """Whether it sleeps in a barrier; in a collective it is the device that waits."""
        return self._host.waits

    def all_reduce_(self, tensor: Tensor) -> None:
        pointer, count, dtype = _describe(tensor)
        self._issue(self._nccl.all_reduce, pointer, pointer, count, dtype)

    def all_gather(self, out: Tensor, tensor: Tensor) -> None:
        assert out.shape == (self.world_size, *tensor.shape), (out.shape, tensor.shape)
        assert out.dtype == tensor.dtype, (out.dtype, tensor.dtype)
        pointer, count, dtype = _describe(tensor)
        self._issue(self._nccl.all_gather, pointer, _describe(out)[0], count, dtype)

    def broadcast_(self, tensor: Tensor, root: int) -> None:
        assert 0 <= root < self.world_size, root
        pointer, count, dtype = _describe(tensor)
        self._issue(self._nccl.broadcast, pointer, pointer, count, dtype, root)

    def replay(self, launch: Callable[[], None]) -> None:
        with self._inside():
            launch()
        if self._finish is not None:
            self._host.barrier(_FOR_EVER_S)

    def barrier(self, deadline_s: float) -> None:
        self._host.barrier(deadline_s)

    def poll(self) -> str | None:
        with self._lock:
            if self._reason is not None or self._gone:
                return self._reason
            error = self._nccl.error(self._comm)
        return None if error is None else f"NCCL on rank {self.rank}: {error}"

    def abort(self, reason: str) -> None:
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
        self._host.abort(reason)
        self._aborting.start()

    def close(self, deadline_s: float) -> None:
        """Abort, since a group that is done with has nothing left to flush; the rank's stream must be done.

        Raises TimeoutError if NCCL hangs in it.
        """
        self.abort("the communicator is closed")
        if self._held is not None:
            self._held.reset()
            self._held = None
        self._aborting.join(deadline_s)
        if self._aborting.is_alive():
            raise TimeoutError(f"rank {self.rank}: NCCL did not come back from an abort within {deadline_s:g} s")

    def _issue(self, call: Callable[..., None], *arguments: int) -> None:
        self.issued += 1
        launches = not is_capturing()
        apart = self._finish is not None or self.issued % _TOGETHER == 0
        if launches and apart:
            self._host.barrier(_FOR_EVER_S)
        with self._inside():
            call(*arguments, self._comm, self._stream)
        if launches and self._finish is not None:
            self._finish()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Raises CommAborted once there is a reason."""
        self._busy = True  # before the look at the reason: an abort stores its reason and then looks here
        try:
            if self._reason is not None:
                raise CommAborted(self._reason)
            if self.entered is not None:
                self.entered()
            yield
        finally:
            self._busy = False

    def _abort(self) -> None:
        """On a thread of its own: it may take as long as the device does.

        A rank that is inside NCCL is given a moment to come out. If it does not, it waits for a device that is stuck,
        and only the abort itself can free it.
        """
        deadline_s = time.monotonic() + _GRACE_S
        while self._busy and time.monotonic() < deadline_s:
            time.sleep(_TICK_S)
        with self._lock:
            self._gone = True
        self._nccl.abort(self._comm)


def _describe(tensor: Tensor) -> tuple[int, int, int]:
    """Address, number of elements and NCCL's code of the dtype."""
    assert tensor.is_contiguous(), tensor.stride()
    assert tensor.numel() > 0, tensor.shape
    return tensor.data_ptr(), tensor.numel(), _DTYPES[tensor.dtype]
