"""Looking tokens up in one rank's rows of the vocabulary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from peg.kernels.device import on_cpu

_BLOCK = 1024


def embed(token_ids: Tensor, weight: Tensor, first_id: int) -> Tensor:
    """Rows of the tokens that this rank holds, zeros for the others, so that the sum over ranks is exact.

    token_ids int64 [T]; weight [V/R, M], the rows of ids first_id, first_id + 1, … Returns [T, M].
    """
    if not on_cpu("embed", weight):
        return _embed(token_ids, weight, first_id)
    local = token_ids - first_id
    elsewhere = (local < 0) | (local >= weight.shape[0])
    rows = functional.embedding(local.masked_fill(elsewhere, 0), weight)
    return rows.masked_fill_(elsewhere[:, None], 0)


@triton.jit(do_not_specialize=["first_id"])
def _embed_kernel(p_ids, p_weight, p_out, first_id, ROWS: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr):
    i_t = tl.program_id(0).to(tl.int64)
    o_m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(p_ids + i_t) - first_id
    here = (row >= 0) & (row < ROWS)
    b_row = tl.load(p_weight + row * M + o_m, mask=here & (o_m < M), other=0.0)
    tl.store(p_out + i_t * M + o_m, b_row, mask=o_m < M)


def _embed(token_ids: Tensor, weight: Tensor, first_id: int) -> Tensor:
    assert weight.is_contiguous(), weight.stride()
    T, M = token_ids.shape[0], weight.shape[1]
    out = torch.empty((T, M), dtype=weight.dtype, device=weight.device)
    grid = (T, triton.cdiv(M, _BLOCK))
    _embed_kernel[grid](token_ids, weight, out, first_id, weight.shape[0], M, _BLOCK)
    return out
