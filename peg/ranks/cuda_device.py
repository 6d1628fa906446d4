"""A rank's GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from peg.errors import ConfigError, RankError
from peg.ranks.device import HostArray

_STAGING_BYTES = 4 << 20
_ALIGNMENT = 16
_STEPS_OUT = 2
_SMALL_PIECES = 64
_SPARE = 1.25
_SPARE_BYTES = 64 << 20
_TIMER_SLACK = 29  # PR_SET_TIMERSLACK


class CudaDevice:
    """One rank's share of a GPU, and a stream of its own on it. Threads as in `Device`.

    `sharing` ranks use this GPU; `utilization` is the part of its memory that they may take together. Work is
    launched and goes on by itself: what was uploaded for one step may be overwritten two steps later.
    """

    launches = True

    def __init__(self, index: int, sharing: int, utilization: float) -> None:
        from cuda.bindings import runtime  # noqa: PLC0415 (there only with CUDA)

        self.name = f"cuda:{index}"
        self.place = torch.device("cuda", index)
        self.stream = 0
        self.shared = sharing > 1
        self._cuda = runtime
        self._sharing = sharing
        self._utilization = utilization
        self._staging: tuple[_Staging, ...] = ()
        self._pool: torch.cuda.MemPool | None = None
        self._steps = 0

    def enter(self) -> None:
        _set_timer_slack()
        try:
            torch.cuda.set_device(self.place)
            torch.zeros(1, device=self.place)
        except RuntimeError as error:
            raise ConfigError(f"--devices {self.place.index}: the GPU cannot be had: {error}") from None
        flags = self._cuda.cudaStreamNonBlocking
        self.stream = int(_checked(self._cuda.cudaStreamCreateWithFlags(flags)))
        torch.cuda.set_stream(torch.cuda.ExternalStream(self.stream, self.place))  # type: ignore[no-untyped-call]
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # sums are taken in fp32
        triton.set_allocator(_scratch)  # of a kernel; the hook is a context variable, so each thread has its own
        self._staging = tuple(_Staging(self._cuda, self.place, self.stream) for _ in range(_STEPS_OUT))

    def begin_step(self) -> None:
        self._steps += 1
        self._staging[self._steps % _STEPS_OUT].reset()

    def upload(self, arrays: Sequence[HostArray]) -> list[Tensor]:
        return self._staging[self._steps % _STEPS_OUT].upload(arrays)

    def fetch(self, tensors: Sequence[Tensor]) -> CudaLanding:
        return self._staging[self._steps % _STEPS_OUT].fetch(tensors)

    def mark(self, tensors: Sequence[Tensor]) -> CudaLanding:
        return self._staging[self._steps % _STEPS_OUT].mark(tensors)

    @contextmanager
    def workspace(self, more_bytes: int) -> Iterator[None]:
        """After this nothing of the kind is asked of the driver any more: an allocation may wait for the whole GPU.

        What was allocated and freed stays with PyTorch's allocator. A step that frees and allocates in another order
        than those that were tried may find it in pieces that are too small, so there is one large piece more.
        """
        torch.cuda.reset_peak_memory_stats(self.place)
        before = torch.cuda.memory_allocated(self.place)
        yield
        self.synchronize()
        needed = torch.cuda.max_memory_allocated(self.place) - before
        pieces = [torch.empty(1 << 20, dtype=torch.uint8, device=self.place) for _ in range(_SMALL_PIECES)]
        del pieces  # those of up to this size come from segments of their own
        torch.empty(int(_SPARE * needed) + more_bytes + _SPARE_BYTES, dtype=torch.uint8, device=self.place)

    @contextmanager
    def pools(self) -> Iterator[None]:
        """In segments of their own: in those of the workspace they would take the large pieces away."""
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self._pool, self.place):
            yield

    def used_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.place)
        return total - free

    def kv_budget_bytes(self) -> int:
        _, total = torch.cuda.mem_get_info(self.place)
        return int(self._utilization * total - self.used_bytes()) // self._sharing

    def refuse_weights(self, rank_bytes: int) -> None:
        """Raises ConfigError, with the arithmetic, where the weights of the ranks on this GPU do not fit."""
        _, total = torch.cuda.mem_get_info(self.place)
        used, wanted, may = self.used_bytes(), self._sharing * rank_bytes, int(self._utilization * total)
        if wanted > may - used:
            raise ConfigError(
                f"GPU {self.place.index}: {self._sharing} x {rank_bytes:,} bytes of weights do not fit: of {total:,} "
                f"bytes --gpu-memory-utilization {self._utilization:g} allows {may:,}, {used:,} are in use: raise it, "
                "give --tensor-parallel-size more GPUs, or stop what else uses this one"
            )

    def done(self) -> bool:
        (error,) = self._cuda.cudaStreamQuery(self.stream)
        return bool(error != self._cuda.cudaError_t.cudaErrorNotReady)

    def synchronize(self) -> None:
        _checked(self._cuda.cudaStreamSynchronize(self.stream))

    def usable(self) -> bool:
        try:
            torch.empty(1 << 20, dtype=torch.uint8, device=self.place)
            self.synchronize()
        except (RuntimeError, RankError):  # after a sticky error every call fails
            return False
        return True


class CudaLanding:
    """Tensors on their way to pinned memory, and the event behind them. See `Landing`."""

    def __init__(self, cuda: Any, event: Any, tensors: Sequence[Tensor]) -> None:
        self._cuda = cuda
        self._event = event
        self._tensors = tensors
        self._error: Any = None

    def done(self) -> bool:
        """Releases the interpreter lock while it asks, unlike an event of PyTorch's."""
        (self._error,) = self._cuda.cudaEventQuery(self._event)
        return bool(self._error != self._cuda.cudaError_t.cudaErrorNotReady)

    @property
    def tensors(self) -> Sequence[Tensor]:
        assert self.done(), "read before it was done"
        _checked((self._error,))
        return self._tensors


class _Staging:
    """Pinned memory, its counterpart on the device, and an event, for the uploads and the fetch of one step."""

    def __init__(self, cuda: Any, place: torch.device, stream: int) -> None:
        self._cuda = cuda
        self._place = place
        self._stream = stream
        self._event = _checked(cuda.cudaEventCreateWithFlags(cuda.cudaEventDisableTiming))
        self._used = 0
        self._host = torch.empty(0, dtype=torch.uint8)
        self._there = torch.empty(0, dtype=torch.uint8)
        self._reserve(_STAGING_BYTES)

    def reset(self) -> None:
        self._used = 0

    def upload(self, arrays: Sequence[HostArray]) -> list[Tensor]:
        """One copy for all."""
        offsets, size = _places([array.nbytes for array in arrays])
        first = self._take(size)
        here, there = self._host[first : first + size], self._there[first : first + size]
        packed = here.numpy()
        for array, offset in zip(arrays, offsets, strict=True):
            packed[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        there.copy_(here, non_blocking=True)
        return [
            there[offset : offset + array.nbytes].view(_TORCH_DTYPES[array.dtype]).view(array.shape)
            for array, offset in zip(arrays, offsets, strict=True)
        ]

    def fetch(self, tensors: Sequence[Tensor]) -> CudaLanding:
        offsets, size = _places([tensor.nbytes for tensor in tensors])
        here = self._host[self._take(size) :]
        landed = [
            here[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, offset in zip(tensors, offsets, strict=True)
        ]
        for to, tensor in zip(landed, tensors, strict=True):
            to.copy_(tensor, non_blocking=True)
        return self.mark(landed)

    def mark(self, tensors: Sequence[Tensor]) -> CudaLanding:
        _checked(self._cuda.cudaEventRecord(self._event, self._stream))
        return CudaLanding(self._cuda, self._event, tensors)

    def _take(self, size: int) -> int:
        if self._used + size > len(self._host):
            self._reserve(2 * (self._used + size))
        self._used += size
        return self._used - size

    def _reserve(self, size: int) -> None:
        """More memory; what is on its way in the old one keeps that alive, and begins anew in this one."""
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._there = torch.empty(size, dtype=torch.uint8, device=self._place)


_TORCH_DTYPES: Mapping[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where pieces of these sizes begin, each aligned, and what they take together."""
    rounded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    return [sum(rounded[:index]) for index in range(len(sizes))], sum(rounded)


def _checked(result: tuple[Any, ...]) -> Any:
    """What a call of cuda-python returns besides its error. Raises RankError."""
    error, *values = result
    if error.value:
        raise RankError(f"CUDA: {error.name}")
    return values[0] if values else None


def _scratch(size: int, _alignment: int, _stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _set_timer_slack() -> None:
    """Let this thread's short sleeps end on time (measured: 20 µs late in place of 80)."""
    ctypes.CDLL(None).prctl(_TIMER_SLACK, 1, 0, 0, 0)
