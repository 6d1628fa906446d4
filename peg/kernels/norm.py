"""RMS norm in the two places where model lines round: before the weight, or after it."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from peg.kernels.device import require_cpu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Give x · rsqrt(mean(x²) + eps) in fp32, rounded to x's dtype, then times `weight` (Llama, Qwen3).

    x [..., D], weight [D] in x's dtype. Returns x's shape and dtype.
    """
    require_cpu("rms_norm", x)
    return functional.rms_norm(x, weight.shape, None, eps) * weight


def add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of residual + x; the sum is rounded to the dtype and stays in `residual`.

    x and residual [..., D], weight [D], one dtype. Returns x's shape and dtype.
    """
    require_cpu("add_rms_norm_", x)
    return rms_norm(residual.add_(x), weight, eps)


def rms_norm_fp32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Give x · rsqrt(mean(x²) + eps) · weight in fp32, rounded once to x's dtype (Gemma).

    x [..., D]; weight float32 [D]: Gemma 4's w, or 1 + w for Gemma 3. Returns x's shape and dtype.
    """
    require_cpu("rms_norm_fp32", x)
    return functional.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def rms_norm_add_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """Add `rms_norm_fp32` of x to `residual` (Gemma's norms behind attention and MLP). Shapes as there."""
    require_cpu("rms_norm_add_", x)
    residual.add_(rms_norm_fp32(x, weight, eps))


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """Give x · rsqrt(mean(x²) + eps) in fp32, rounded to x's dtype; no weight (Gemma 4's values). x [..., D]."""
    require_cpu("rms_normalize", x)
    return functional.rms_norm(x, x.shape[-1:], None, eps)
