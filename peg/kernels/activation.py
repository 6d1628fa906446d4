"""The gated halves of an MLP, from one fused matrix product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from peg.kernels.device import on_cpu

_BLOCK = 1024


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up. gate_up [T, 2I], gate first. Returns [T, I] of the same dtype."""
    if on_cpu("silu_and_mul", gate_up):
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate).mul_(up)
    return _gated(gate_up, _silu_and_mul_kernel)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) · up, gelu in its tanh form. gate_up [T, 2I], gate first. Returns [T, I] of the same dtype."""
    if on_cpu("gelu_tanh_and_mul", gate_up):
        gate, up = gate_up.chunk(2, -1)
        return functional.gelu(gate, approximate="tanh").mul_(up)
    return _gated(gate_up, _gelu_tanh_and_mul_kernel)


@triton.jit
def _load_halves(p_gate_up, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Gate and up as float32, where they go in the output, and which of it exists."""
    i_t = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o_i < WIDTH
    p_gate = p_gate_up + i_t * 2 * WIDTH + o_i
    b_gate = tl.load(p_gate, mask=inside, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + WIDTH, mask=inside, other=0.0).to(tl.float32)
    return b_gate, b_up, i_t * WIDTH + o_i, inside


@triton.jit
def _silu_and_mul_kernel(p_gate_up, p_out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    b_gate, b_up, o_out, inside = _load_halves(p_gate_up, WIDTH, BLOCK)
    dtype = p_out.dtype.element_ty
    b_act = (b_gate * tl.sigmoid(b_gate)).to(dtype).to(tl.float32)
    tl.store(p_out + o_out, (b_act * b_up).to(dtype), mask=inside)


@triton.jit
def _gelu_tanh_and_mul_kernel(p_gate_up, p_out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    b_gate, b_up, o_out, inside = _load_halves(p_gate_up, WIDTH, BLOCK)
    dtype = p_out.dtype.element_ty
    # (1 + tanh z) / 2 is sigmoid(2z); 2 · sqrt(2 / π) = 1.5957691216057308
    b_twice = 1.5957691216057308 * (b_gate + 0.044715 * b_gate * b_gate * b_gate)
    b_act = (b_gate * tl.sigmoid(b_twice)).to(dtype).to(tl.float32)
    tl.store(p_out + o_out, (b_act * b_up).to(dtype), mask=inside)


def _gated(gate_up: Tensor, kernel: triton.JITFunction) -> Tensor:
    assert gate_up.is_contiguous(), gate_up.stride()
    T, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((T, width), dtype=gate_up.dtype, device=gate_up.device)
    kernel[(T, triton.cdiv(width, _BLOCK))](gate_up, out, width, _BLOCK)
    return out
