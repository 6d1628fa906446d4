"""The gated halves of an MLP, from one fused matrix product."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from peg.kernels.device import require_cpu


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up. gate_up [T, 2I], gate first. Returns [T, I] of the same dtype."""
    require_cpu("silu_and_mul", gate_up)
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate).mul_(up)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) · up, gelu in its tanh form. gate_up [T, 2I], gate first. Returns [T, I] of the same dtype."""
    require_cpu("gelu_tanh_and_mul", gate_up)
    gate, up = gate_up.chunk(2, -1)
    return functional.gelu(gate, approximate="tanh").mul_(up)
