"""Writing K and V into the paged cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from peg.kernels.device import on_cpu


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store each token's K and V at its slot (block id times block size plus offset).

    k and v [T, G, D]; caches [N, B, G, D] of the same dtype; slots int64 [T].
    """
    if on_cpu("write_kv", k):
        k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots, k)
        v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots, v)
    else:
        _write_kv(k, v, k_cache, v_cache, slots)


@triton.jit
def _write_kv_kernel(
    p_k, p_v, p_k_cache, p_v_cache, p_slots, stride_k, stride_v, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    i_t = tl.program_id(0).to(tl.int64)
    o_i = tl.arange(0, BLOCK)
    inside = o_i < WIDTH
    o_cache = tl.load(p_slots + i_t) * WIDTH + o_i
    tl.store(p_k_cache + o_cache, tl.load(p_k + i_t * stride_k + o_i, mask=inside), mask=inside)
    tl.store(p_v_cache + o_cache, tl.load(p_v + i_t * stride_v + o_i, mask=inside), mask=inside)


def _write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    T, G, D = k.shape
    assert k.stride()[1:] == v.stride()[1:] == (D, 1), (k.stride(), v.stride())
    assert k_cache.is_contiguous(), k_cache.stride()
    assert v_cache.is_contiguous(), v_cache.stride()
    block = triton.next_power_of_2(G * D)
    _write_kv_kernel[(T,)](k, v, k_cache, v_cache, slots, k.stride(0), v.stride(0), G * D, block)
