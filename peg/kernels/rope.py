"""Rotary position embedding (Su et al. 2021) with rotate-half pairs: element d turns with element d + D/2."""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
    """Turn every head: x [T, heads, D]; cos and sin from `rope_angles`, of x's dtype. Returns x's shape and dtype.

    The reference; on CUDA heads turn in `heads.py`, on their way.
    """
    swapped = x.view(*x.shape[:-1], 2, -1).flip(-2).view(x.shape)
    return torch.addcmul(x * cos, swapped, sin)
