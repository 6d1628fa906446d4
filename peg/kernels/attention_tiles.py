"""Attention over a paged cache in Triton: one kernel for slices of one token, one for all others.

Both walk the cache in tiles of BLOCK_N keys, found through the block table, and keep the softmax online in fp32
(Dao et al. 2022), in powers of two: `scale` has log2(e) in it. The query heads of one KV head share its tiles, so
that the matrix units see several rows even in decode. Lengths and tables are read on the device. `attention.py` has
the reference, and launches these.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sweep(
    b_max, b_sum, b_acc, b_q, o_pos, begin, end, lo, p_k, p_v, p_table, scale, stride,
    B: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take keys begin to end - 1 into the online softmax (max, sum, acc) of the query rows at positions o_pos.

    Not MASKED means: every row sees every one of these keys, and they are a whole number of tiles.
    """
    o_d = tl.arange(0, BLOCK_D)
    for n in range(begin, end, BLOCK_N):
        o_n = n + tl.arange(0, BLOCK_N)
        live = (o_n >= lo) & (o_n < end) if MASKED else o_n >= 0
        i_block = tl.load(p_table + o_n // B, mask=live, other=0).to(tl.int64)
        o_kv = (i_block * B + o_n % B)[:, None] * stride + o_d[None, :]  # [BLOCK_N, BLOCK_D]
        inside = live[:, None] & (o_d < D)[None, :]
        b_k = tl.load(p_k + o_kv, mask=inside, other=0.0)
        b_v = tl.load(p_v + o_kv, mask=inside, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
        if MASKED:
            seen = (o_n[None, :] <= o_pos[:, None]) & live[None, :]
            if WINDOW > 0:
                seen = seen & (o_n[None, :] > o_pos[:, None] - WINDOW)
            b_s = tl.where(seen, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_ref = tl.where(b_new == float("-inf"), 0.0, b_new) if MASKED else b_new
        b_p = tl.exp2(b_s - b_ref[:, None])
        b_alpha = tl.exp2(b_max - b_ref)
        b_sum = b_sum * b_alpha + tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_alpha[:, None], input_precision="ieee")
        b_max = b_new
    return b_max, b_sum, b_acc


@triton.jit
def _cut(n_ctx, num_splits, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tiles of keys that the last of n_ctx tokens sees: the first, how many, and how many of them a split takes.

    The splits that are left without a tile, the last ones, are dead: nobody writes them, nobody reads them.
    """
    first = tl.maximum(n_ctx - WINDOW, 0) // BLOCK_N if WINDOW > 0 else 0
    tiles = tl.cdiv(n_ctx, BLOCK_N) - first
    return first, tiles, tl.cdiv(tiles, num_splits)


@triton.jit(
    do_not_specialize=["stride_table", "num_splits"],
    do_not_specialize_on_alignment=["p_tables", "p_starts", "p_lens"],
)
def decode_kernel(
    p_q, p_k, p_v, p_tables, p_starts, p_lens, p_part, p_lse, scale, stride_q, stride_table, num_splits,
    G: tl.constexpr, GROUP: tl.constexpr, B: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One split of the context of one slice of one token, for the query heads of one KV head."""
    i_s, i_g, i_p = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_t = tl.load(p_starts + i_s)
    if tl.load(p_starts + i_s + 1) - i_t != 1:
        return
    n_ctx = tl.load(p_lens + i_s)
    first, tiles, per_split = _cut(n_ctx, num_splits, WINDOW, BLOCK_N)
    if i_p * per_split >= tiles:
        return
    begin = (first + i_p * per_split) * BLOCK_N
    end = tl.minimum(n_ctx, begin + per_split * BLOCK_N)
    lo = tl.maximum(n_ctx - WINDOW, 0) if WINDOW > 0 else 0

    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    o_head = i_g * GROUP + o_m
    inside = (o_m < GROUP)[:, None] & (o_d < D)[None, :]
    b_q = tl.load(p_q + i_t.to(tl.int64) * stride_q + o_head[:, None] * D + o_d[None, :], mask=inside, other=0.0)
    o_pos = tl.zeros([BLOCK_M], tl.int32) + (n_ctx - 1)
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    b_max, b_sum, b_acc = _sweep(
        b_max, b_sum, b_acc, b_q, o_pos, begin, end, lo, p_k + i_g * D, p_v + i_g * D,
        p_tables + i_s * stride_table, scale, G * D, B, D, WINDOW, BLOCK_D, BLOCK_N, True,
    )  # fmt: skip
    o_part = (i_s * G * GROUP + o_head).to(tl.int64) * num_splits + i_p
    tl.store(p_part + o_part[:, None] * D + o_d[None, :], b_acc / b_sum[:, None], mask=inside)
    tl.store(p_lse + o_part, b_max + tl.log2(b_sum), mask=o_m < GROUP)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["p_starts", "p_lens"])
def combine_kernel(
    p_part, p_lse, p_starts, p_lens, p_out, num_splits,
    H: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
    AT_ONCE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The live splits of a piece of one query head, weighed by their shares of the softmax; zeros without a context.

    One compiled form for any number of splits: a kernel that is loaded while a peer waits may wait for it for ever.
    """
    i_s, i_h = tl.program_id(0), tl.program_id(1)
    i_t = tl.load(p_starts + i_s)
    if tl.load(p_starts + i_s + 1) - i_t != 1:
        return
    _, tiles, per_split = _cut(tl.load(p_lens + i_s), num_splits, WINDOW, BLOCK_N)
    live = tl.cdiv(tiles, tl.maximum(per_split, 1))
    o_d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = (i_s * H + i_h).to(tl.int64) * num_splits
    b_max = tl.full([1], float("-inf"), tl.float32)
    b_sum = tl.zeros([1], tl.float32)
    b_out = tl.zeros([BLOCK_D], tl.float32)
    for begin in range(0, live, AT_ONCE):
        o_p = begin + tl.arange(0, AT_ONCE)
        inside = (o_p < live)[:, None] & (o_d < D)[None, :]
        b_lse = tl.load(p_lse + first + o_p, mask=o_p < live, other=float("-inf"))
        b_part = tl.load(p_part + (first + o_p)[:, None] * D + o_d[None, :], mask=inside, other=0.0)
        b_new = tl.maximum(b_max, tl.max(b_lse, 0))
        b_share = tl.exp2(b_lse - b_new)
        b_alpha = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_alpha + tl.sum(b_share, 0)
        b_out = b_out * b_alpha + tl.sum(b_part * b_share[:, None], 0)
        b_max = b_new
    b_out = b_out / tl.where(b_sum > 0, b_sum, 1.0)
    tl.store(p_out + (i_t.to(tl.int64) * H + i_h) * D + o_d, b_out.to(p_out.dtype.element_ty), mask=o_d < D)


@triton.jit(
    do_not_specialize=["stride_table", "num_slices"],
    do_not_specialize_on_alignment=["p_tables", "p_starts", "p_lens"],
)
def prefill_kernel(
    p_q, p_k, p_v, p_tables, p_starts, p_lens, p_out, scale, stride_q, stride_table, num_slices,
    G: tl.constexpr, GROUP: tl.constexpr, B: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile of consecutive tokens of one slice of several, for the query heads of one KV head.

    Slice s has the tiles from starts[s] // QUERIES + s on: room for the partial last tile of every slice before it.
    """
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    i_tile, i_g = tl.program_id(0), tl.program_id(1)
    i_s = 0
    above = num_slices
    while above - i_s > 1:
        middle = (i_s + above) // 2
        if tl.load(p_starts + middle) // QUERIES + middle <= i_tile:
            i_s = middle
        else:
            above = middle
    start = tl.load(p_starts + i_s)
    count = tl.load(p_starts + i_s + 1) - start
    token = (i_tile - start // QUERIES - i_s) * QUERIES
    if (count == 1) | (token >= count):
        return
    n_ctx = tl.load(p_lens + i_s)
    pos_first = n_ctx - count + token
    pos_last = tl.minimum(pos_first + QUERIES, n_ctx) - 1
    lo = tl.maximum(pos_first - WINDOW + 1, 0) if WINDOW > 0 else 0

    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    o_t = token + o_m // GROUP
    mine = (o_m < QUERIES * GROUP) & (o_t < count)
    inside = mine[:, None] & (o_d < D)[None, :]
    o_q = (start + o_t).to(tl.int64)
    o_head = i_g * GROUP + o_m % GROUP
    b_q = tl.load(p_q + o_q[:, None] * stride_q + o_head[:, None] * D + o_d[None, :], mask=inside, other=0.0)
    o_pos = tl.minimum(n_ctx - count + o_t, pos_last)
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    p_k += i_g * D
    p_v += i_g * D
    p_table = p_tables + i_s * stride_table

    # Between the tiles that the window cuts and those that causality cuts lie tiles that every row sees whole.
    begin = lo // BLOCK_N * BLOCK_N
    diagonal = tl.maximum((pos_first + 1) // BLOCK_N * BLOCK_N, begin)
    whole = begin
    if WINDOW > 0:
        whole = tl.minimum(tl.cdiv(tl.maximum(pos_last - WINDOW + 1, 0), BLOCK_N) * BLOCK_N, diagonal)
        b_max, b_sum, b_acc = _sweep(
            b_max, b_sum, b_acc, b_q, o_pos, begin, whole, lo, p_k, p_v,
            p_table, scale, G * D, B, D, WINDOW, BLOCK_D, BLOCK_N, True,
        )  # fmt: skip
    b_max, b_sum, b_acc = _sweep(
        b_max, b_sum, b_acc, b_q, o_pos, whole, diagonal, lo, p_k, p_v,
        p_table, scale, G * D, B, D, WINDOW, BLOCK_D, BLOCK_N, False,
    )  # fmt: skip
    b_max, b_sum, b_acc = _sweep(
        b_max, b_sum, b_acc, b_q, o_pos, diagonal, pos_last + 1, lo, p_k, p_v,
        p_table, scale, G * D, B, D, WINDOW, BLOCK_D, BLOCK_N, True,
    )  # fmt: skip
    b_out = (b_acc / b_sum[:, None]).to(p_out.dtype.element_ty)
    tl.store(p_out + (o_q * G * GROUP + o_head)[:, None] * D + o_d[None, :], b_out, mask=inside)
