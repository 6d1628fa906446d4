"""Where a kernel runs: the plain PyTorch reference on the CPU, Triton on CUDA, nothing anywhere else."""

from __future__ import annotations

from torch import Tensor


def on_cpu(kernel: str, tensor: Tensor) -> bool:
    """True for a tensor on the CPU, False on CUDA; elsewhere NotImplementedError, naming the kernel.

    A tensor is never moved, and a CUDA tensor never falls back on the reference.
    """
    if not tensor.is_cpu and not tensor.is_cuda:
        raise NotImplementedError(f"{kernel} has no kernel for {tensor.device.type}")
    return tensor.is_cpu
