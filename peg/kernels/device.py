"""Where a kernel can run. A tensor on a device that a kernel has no code for is refused, never moved or emulated."""

from __future__ import annotations

from torch import Tensor


def require_cpu(kernel: str, tensor: Tensor) -> None:
    """Raise NotImplementedError, naming the kernel, unless `tensor` lies on the CPU."""
    if not tensor.is_cpu:
        raise NotImplementedError(f"{kernel} has no kernel for {tensor.device.type}, only its CPU reference")
