"""What becomes of the heads of one product: Q for attention; K and V, which go straight into the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from peg.kernels.device import on_cpu
from peg.kernels.norm import rms_norm, rms_normalize
from peg.kernels.rope import apply_rope

Angles: TypeAlias = tuple[Tensor, Tensor]  # from `rope_angles`

_NO_NORM, _ROUND_FIRST, _ROUND_LAST, _NO_WEIGHT = 0, 1, 2, 3  # how the kernel normalises
_TILE = 1024  # elements a program: enough for its threads, and enough programs where there is one token


@dataclass(frozen=True, slots=True)
class HeadRules:
    """What a layer does with its product's heads: the first `queries` are Q's, the next ones K's, the last ones V's.

    Where the product has no part for V, the heads of K are V's too. `norm`, rms_norm or rms_norm_fp32, is for every
    head of Q and K before it turns, with weights `q_norm` and `k_norm` [D]; with `norm_values` those of V are
    normalised as well, without a weight. `k_norm` is None where only Q is asked for.
    """

    queries: int
    norm: Callable[[Tensor, Tensor, float], Tensor] | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    norm_values: bool = False


def turn_queries(heads: Tensor, rules: HeadRules, angles: Angles) -> Tensor:
    """Give Q [T, H, D], normalised and turned, of heads [T, N, D]: for a layer that reads another's K and V."""
    if on_cpu("turn_queries", heads):
        return apply_rope(_normed(heads[:, : rules.queries], rules.q_norm, rules), *angles)
    return _place_heads(heads, rules, angles)


def store_heads(
    heads: Tensor, rules: HeadRules, angles: Angles, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> Tensor:
    """Store each token's K and V at its slot (block id times block size plus offset); give Q like `turn_queries`.

    heads [T, N, D]; caches [N, B, G, D] of the same dtype; slots int64 [T]. Returns [T, H, D].
    """
    if not on_cpu("store_heads", heads):
        return _place_heads(heads, rules, angles, k_cache, v_cache, slots)
    H, G = rules.queries, k_cache.shape[2]
    v = heads.narrow(1, heads.shape[1] - G, G)
    if rules.norm is None:
        q, k = apply_rope(heads.narrow(1, 0, H + G), *angles).split_with_sizes((H, G), 1)
    else:
        q = apply_rope(_normed(heads[:, :H], rules.q_norm, rules), *angles)
        k = apply_rope(_normed(heads[:, H : H + G], rules.k_norm, rules), *angles)
    if rules.norm_values:
        v = rms_normalize(v, rules.eps)
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots, k)
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots, v)
    return q


def _normed(heads: Tensor, weight: Tensor | None, rules: HeadRules) -> Tensor:
    if rules.norm is None:
        return heads
    assert weight is not None, "these heads have no norm"
    return rules.norm(heads, weight, rules.eps)


@triton.jit
def _weighed(b_x, p_weight, o_d, HALF: tl.constexpr, o_half, NORM: tl.constexpr, DTYPE: tl.constexpr):
    """Half of each normalised head, times its weight where there is one, rounded where the model line rounds."""
    if NORM == 1:
        b_x = b_x.to(DTYPE).to(tl.float32)
    if NORM < 3:
        b_x = b_x * tl.load(p_weight + o_half + o_d, mask=o_d < HALF, other=0.0).to(tl.float32)
    return b_x.to(DTYPE).to(tl.float32)


@triton.jit
def _place(
    p_x, p_weight, p_cos, p_sin, p_out, i_block, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Some of HEADS heads, which are packed here and there; elements d and d + HALF turn together."""
    o_h = i_block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    o_d = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (o_h < HEADS) & (o_d < HALF)
    o_x = o_h * 2 * HALF + o_d
    b_low = tl.load(p_x + o_x, mask=inside, other=0.0).to(tl.float32)
    b_high = tl.load(p_x + o_x + HALF, mask=inside, other=0.0).to(tl.float32)
    dtype = p_out.dtype.element_ty
    if NORM > 0:
        b_scale = tl.rsqrt(tl.sum(b_low * b_low + b_high * b_high, 1) / (2 * HALF) + eps)[:, None]
        b_low = _weighed(b_low * b_scale, p_weight, o_d, HALF, 0, NORM, dtype)
        b_high = _weighed(b_high * b_scale, p_weight, o_d, HALF, HALF, NORM, dtype)
    if TURN:
        b_cos = tl.load(p_cos + o_d, mask=o_d < HALF, other=0.0).to(tl.float32)
        b_sin = tl.load(p_sin + o_d + HALF, mask=o_d < HALF, other=0.0).to(tl.float32)  # from HALF on, without the sign
        b_turned = b_low * b_cos - b_high * b_sin
        b_high = b_high * b_cos + b_low * b_sin
        b_low = b_turned
    tl.store(p_out + o_x, b_low.to(dtype), mask=inside)
    tl.store(p_out + o_x + HALF, b_high.to(dtype), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["p_slots"])
def _heads_kernel(
    p_x, p_q_norm, p_k_norm, p_cos, p_sin, p_q, p_k_cache, p_v_cache, p_slots, eps, stride_x,
    N: tl.constexpr, H: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, NORM_V: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: Q's first, then K's, then V's, a program never of two kinds. G is 0 for Q alone."""
    i_t, i_block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    D: tl.constexpr = 2 * HALF
    Q_BLOCKS: tl.constexpr = (H + BLOCK_HEADS - 1) // BLOCK_HEADS
    K_BLOCKS: tl.constexpr = (G + BLOCK_HEADS - 1) // BLOCK_HEADS
    p_x += i_t * stride_x
    p_cos += i_t * D
    p_sin += i_t * D
    if i_block < Q_BLOCKS:
        p_out = p_q + i_t * H * D
        _place(p_x, p_q_norm, p_cos, p_sin, p_out, i_block, eps, H, HALF, NORM, True, BLOCK_HEADS, BLOCK_HALF)
    elif G > 0:
        o_cache = tl.load(p_slots + i_t) * G * D
        i_block -= Q_BLOCKS
        if i_block < K_BLOCKS:
            p_k = p_x + H * D
            p_out = p_k_cache + o_cache
            _place(p_k, p_k_norm, p_cos, p_sin, p_out, i_block, eps, G, HALF, NORM, True, BLOCK_HEADS, BLOCK_HALF)
        else:
            p_v = p_x + (N - G) * D
            p_out = p_v_cache + o_cache
            i_block -= K_BLOCKS
            _place(p_v, None, p_cos, p_sin, p_out, i_block, eps, G, HALF, NORM_V, False, BLOCK_HEADS, BLOCK_HALF)


def _place_heads(
    heads: Tensor,
    rules: HeadRules,
    angles: Angles,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    T, N, D = heads.shape
    assert heads.stride()[1:] == (D, 1), heads.stride()
    H, G = rules.queries, 0 if k_cache is None else k_cache.shape[2]
    for packed in (*angles, k_cache, v_cache, slots):
        assert packed is None or packed.is_contiguous(), packed.stride()
    q = torch.empty((T, H, D), dtype=heads.dtype, device=heads.device)
    norm = _NO_NORM if rules.norm is None else _ROUND_FIRST if rules.norm is rms_norm else _ROUND_LAST
    norm_v = _NO_WEIGHT if rules.norm_values else _NO_NORM
    block_half = triton.next_power_of_2(D // 2)
    block_heads = min(triton.next_power_of_2(max(H, G)), max(1, _TILE // 2 // block_half))
    _heads_kernel[(T, triton.cdiv(H, block_heads) + 2 * triton.cdiv(G, block_heads))](
        heads, rules.q_norm, rules.k_norm, *angles, q, k_cache, v_cache, slots, rules.eps, heads.stride(0),
        N, H, G, D // 2, norm, norm_v, block_heads, block_half,
    )  # fmt: skip
    return q
