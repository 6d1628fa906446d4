"""Writing K and V into the paged cache."""

from __future__ import annotations

from torch import Tensor

from peg.kernels.device import require_cpu


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store each token's K and V at its slot (block id times block size plus offset).

    k and v [T, G, D]; caches [N, B, G, D] of the same dtype; slots int64 [T].
    """
    require_cpu("write_kv", k)
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots, k)
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots, v)
