"""Rotary position embedding (Su et al. 2021) with rotate-half pairs: element d turns with element d + D/2."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from peg.kernels.device import on_cpu


def default_frequencies(head_dim: int, theta: float, factor: float = 1.0) -> Tensor:
    """theta^(−2i/D) for i < D/2, divided by `factor` (linear scaling). Returns float32 [D/2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / (theta**exponents) / factor


def llama3_frequencies(
    frequencies: Tensor, factor: float, low_freq_factor: float, high_freq_factor: float, original_context: int
) -> Tensor:
    """Llama 3.1's scaling of float32 [D/2] `frequencies`.

    With r = original_context / wavelength: r above `high_freq_factor` is kept, r below `low_freq_factor` is divided
    by `factor`, what lies between is blended linearly in r.
    """
    ratio = original_context * frequencies / (2 * math.pi)
    kept = ((ratio - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / factor


def proportional_frequencies(head_dim: int, theta: float, rotated: float, factor: float = 1.0) -> Tensor:
    """Gemma 4's: the first `rotated` part of the D/2 pairs turns as in `default_frequencies`, the rest stands still.

    Unlike a partial rope, the exponent is over the whole head and the pairs stay D/2 apart. Returns float32 [D/2].
    """
    frequencies = default_frequencies(head_dim, theta, factor)
    frequencies[int(rotated * head_dim // 2) :] = 0
    return frequencies


def rope_angles(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines for `apply_rope`: computed in fp32, rounded to `dtype`.

    positions int64 [T], frequencies float32 [D/2]. Returns two [T, 1, D]; the first half of the sines is negated.
    """
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn every head: x [T, heads, D]; cos and sin from `rope_angles`, of x's dtype. Returns x's shape and dtype."""
    if on_cpu("apply_rope", x):
        swapped = x.view(*x.shape[:-1], 2, -1).flip(-2).view(x.shape)
        return torch.addcmul(x * cos, swapped, sin)
    return _apply_rope(x, cos, sin)


@triton.jit
def _rope_kernel(
    p_x, p_cos, p_sin, p_out, stride_t, stride_head,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: elements d and d + HALF turn together. Sines without the sign lie from HALF on."""
    i_t = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    o_d = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (o_h < HEADS) & (o_d < HALF)
    o_angle = i_t * 2 * HALF + o_d
    b_cos = tl.load(p_cos + o_angle, mask=o_d < HALF, other=0.0).to(tl.float32)
    b_sin = tl.load(p_sin + o_angle + HALF, mask=o_d < HALF, other=0.0).to(tl.float32)
    p_x += i_t * stride_t + o_h * stride_head + o_d
    b_low = tl.load(p_x, mask=inside, other=0.0).to(tl.float32)
    b_high = tl.load(p_x + HALF, mask=inside, other=0.0).to(tl.float32)
    p_out += (i_t * HEADS + o_h) * 2 * HALF + o_d
    tl.store(p_out, (b_low * b_cos - b_high * b_sin).to(p_out.dtype.element_ty), mask=inside)
    tl.store(p_out + HALF, (b_high * b_cos + b_low * b_sin).to(p_out.dtype.element_ty), mask=inside)


def _apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    T, heads, D = x.shape
    assert x.stride(2) == 1, x.stride()
    assert cos.is_contiguous(), cos.stride()
    assert sin.is_contiguous(), sin.stride()
    out = torch.empty((T, heads, D), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(D // 2)
    block_heads = min(triton.next_power_of_2(heads), max(1, 1024 // block))
    grid = (T, triton.cdiv(heads, block_heads))
    _rope_kernel[grid](x, cos, sin, out, x.stride(0), x.stride(1), heads, D // 2, block_heads, block)
    return out
