"""RMS norm in the places where model lines round: before the weight, or after it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from peg.kernels.device import on_cpu

_ROUND_FIRST, _ROUND_LAST = 0, 1  # how the kernels apply a weight


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Give x · rsqrt(mean(x²) + eps) in fp32, rounded to x's dtype, then times `weight` (Llama, Qwen3).

    x [..., D], weight [D] in x's dtype. Returns x's shape and dtype.
    """
    if on_cpu("rms_norm", x):
        if x.numel() == weight.numel() and x.dtype == torch.bfloat16:
            return _one_row(x, eps).mul_(weight)
        return _rows(x, eps) * weight
    return _norm(x, weight, eps, _ROUND_FIRST)


def add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of residual + x; the sum is rounded to the dtype and stays in `residual`.

    x and residual [T, D], weight [D], one dtype. Returns x's shape and dtype.
    """
    if on_cpu("add_rms_norm_", x):
        return rms_norm(residual.add_(x), weight, eps)
    return _add_norm(x, residual, weight, eps)


def rms_norm_fp32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Give x · rsqrt(mean(x²) + eps) · weight in fp32, rounded once to x's dtype (Gemma).

    x [..., D]; weight [D] in any dtype: Gemma 4's w, or 1 + w in fp32 for Gemma 3. Returns x's shape and dtype.
    """
    if on_cpu("rms_norm_fp32", x):
        return functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
    return _norm(x, weight, eps, _ROUND_LAST)


def rms_norm_add_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """Add `rms_norm_fp32` of x to `residual` (Gemma's norms behind attention and MLP). x and residual [T, D]."""
    if on_cpu("rms_norm_add_", x):
        residual.add_(rms_norm_fp32(x, weight, eps))
    else:
        _norm_add(x, residual, weight, eps)


def rms_norm_add_rms_norm_(
    x: Tensor, residual: Tensor, weight: Tensor, next_weight: Tensor, eps: float, scale: Tensor | None = None
) -> Tensor:
    """`rms_norm_add_`, then `rms_norm_fp32` of the residual with `next_weight` (Gemma, up to the next block).

    With `scale` [1], of x's dtype, the residual is multiplied by it in between, and rounded once more (Gemma 4).
    x and residual [T, D]. Returns x's shape and dtype.
    """
    if not on_cpu("rms_norm_add_rms_norm_", x):
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _norm_add(x, residual, weight, eps, scale, next_weight, out)
        return out
    rms_norm_add_(x, residual, weight, eps)
    if scale is not None:
        residual.mul_(scale)
    return rms_norm_fp32(residual, next_weight, eps)


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """Give x · rsqrt(mean(x²) + eps) in fp32, rounded to x's dtype; no weight (Gemma 4's values). x [..., D].

    The reference; on CUDA values are normalised in `heads.py`, on their way.
    """
    return functional.rms_norm(x, x.shape[-1:], None, eps)


def _one_row(x: Tensor, eps: float) -> Tensor:
    """`rms_normalize` of a single bf16 row: three calls of PyTorch where its own rms_norm makes ten."""
    norm = torch.linalg.vector_norm(x, dtype=torch.float32).item()
    return x.mul((norm * norm / x.numel() + eps) ** -0.5)


def _rows(x: Tensor, eps: float) -> Tensor:
    """`rms_normalize` as the layer norm of x beside −x, whose mean is zero: three calls of PyTorch instead of ten."""
    D = x.shape[-1]
    return functional.layer_norm(torch.cat((x, -x), -1), (2 * D,), eps=eps)[..., :D]


@triton.jit
def _normalized(b_x, p_weight, o_d, eps, D: tl.constexpr, WEIGHT: tl.constexpr, DTYPE: tl.constexpr):
    """Rows b_x float32 [ROWS, BLOCK_D], zero from D on, normalised and rounded to DTYPE."""
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)[:, None]
    b_w = tl.load(p_weight + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
    if WEIGHT == 0:
        b_y = b_y.to(DTYPE).to(tl.float32)
    return (b_y * b_w).to(DTYPE)


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    p_x, p_weight, p_out, eps, rows, stride_outer, stride_inner,
    INNER: tl.constexpr, D: tl.constexpr, WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Row r of x lies at r // INNER · stride_outer + r % INNER · stride_inner; the rows of out are packed."""
    o_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_d = tl.arange(0, BLOCK_D)
    inside = (o_r < rows)[:, None] & (o_d < D)[None, :]
    o_x = o_r // INNER * stride_outer + o_r % INNER * stride_inner
    b_x = tl.load(p_x + o_x[:, None] + o_d[None, :], mask=inside, other=0.0).to(tl.float32)
    b_y = _normalized(b_x, p_weight, o_d, eps, D, WEIGHT, p_out.dtype.element_ty)
    tl.store(p_out + o_r[:, None] * D + o_d[None, :], b_y, mask=inside)


@triton.jit
def _add_norm_kernel(
    p_x, p_residual, p_weight, p_out, eps, stride_x, stride_residual, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    i_t = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    inside = (o_d < D)[None, :]
    o_residual = i_t * stride_residual + o_d[None, :]
    b_x = tl.load(p_x + i_t * stride_x + o_d[None, :], mask=inside, other=0.0).to(tl.float32)
    b_sum = tl.load(p_residual + o_residual, mask=inside, other=0.0).to(tl.float32) + b_x
    b_sum = b_sum.to(p_residual.dtype.element_ty)
    tl.store(p_residual + o_residual, b_sum, mask=inside)
    b_y = _normalized(b_sum.to(tl.float32), p_weight, o_d, eps, D, 0, p_out.dtype.element_ty)
    tl.store(p_out + i_t * D + o_d[None, :], b_y, mask=inside)


@triton.jit
def _norm_add_kernel(
    p_x, p_residual, p_weight, p_scale, p_next_weight, p_out, eps, stride_x, stride_residual,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i_t = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    inside = (o_d < D)[None, :]
    o_residual = i_t * stride_residual + o_d[None, :]
    dtype = p_residual.dtype.element_ty
    b_x = tl.load(p_x + i_t * stride_x + o_d[None, :], mask=inside, other=0.0).to(tl.float32)
    b_y = _normalized(b_x, p_weight, o_d, eps, D, 1, dtype).to(tl.float32)
    b_sum = (tl.load(p_residual + o_residual, mask=inside, other=0.0).to(tl.float32) + b_y).to(dtype)
    if p_scale is not None:
        b_sum = (b_sum.to(tl.float32) * tl.load(p_scale).to(tl.float32)).to(dtype)
    tl.store(p_residual + o_residual, b_sum, mask=inside)
    if p_out is not None:
        b_next = _normalized(b_sum.to(tl.float32), p_next_weight, o_d, eps, D, 1, dtype)
        tl.store(p_out + i_t * D + o_d[None, :], b_next, mask=inside)


def _norm(x: Tensor, weight: Tensor, eps: float, how: int) -> Tensor:
    """x [T, D] or [T, heads, D]; its rows may lie apart, the elements of a row not."""  # noqa: D403
    assert x.stride(-1) == 1, x.stride()
    D, inner = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, block = out.numel() // D, triton.next_power_of_2(D)
    step = max(1, 1024 // block)
    _norm_kernel[(triton.cdiv(rows, step),)](
        x, weight, out, eps, rows, x.stride(0), x.stride(-2), inner, D, how, step, block, num_warps=_warps(block)
    )
    return out


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    assert x.stride(1) == residual.stride(1) == 1, (x.stride(), residual.stride())
    T, D = x.shape
    out = torch.empty((T, D), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(D)
    _add_norm_kernel[(T,)](
        x, residual, weight, out, eps, x.stride(0), residual.stride(0), D, block, num_warps=_warps(block)
    )
    return out


def _norm_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    scale: Tensor | None = None,
    next_weight: Tensor | None = None,
    out: Tensor | None = None,
) -> None:
    assert x.stride(1) == residual.stride(1) == 1, (x.stride(), residual.stride())
    T, D = x.shape
    block = triton.next_power_of_2(D)
    _norm_add_kernel[(T,)](
        x, residual, weight, scale, next_weight, out, eps, x.stride(0), residual.stride(0),
        D, block, num_warps=_warps(block),
    )  # fmt: skip


def _warps(block: int) -> int:
    return 8 if block > 2048 else 4
