"""Causal attention of a batch of slices over a paged cache.

A slice is some consecutive tokens of one sequence whose K and V are already in the cache, its own among them. With a
window, the query at position i sees the keys at i − window + 1 to i; without, those at 0 to i. What lies outside is
not read, or is replaced by zeros, so that no number there (NaN included) can reach a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from torch.nn import functional

from peg.kernels.attention_tiles import combine_kernel, decode_kernel, prefill_kernel
from peg.kernels.device import on_cpu

_LOG2_E = 1.4426950408889634
_FEW_KEYS = 128  # fewer cost a call of the reference as much as these
_MAX_SPLITS = 64
_AT_ONCE = 32  # splits that a program of combine_kernel takes at once,
_PIECE = 128  # of so many elements of a head
_LEAST_DOT = 16  # elements that the matrix units take of a head
_FILLING = 264  # programs that keep a large card busy: two a multiprocessor of an H200


@dataclass(frozen=True, slots=True)
class SliceLayout:
    """Where a step's slices lie.

    query_starts int32 [S + 1]: slice s is tokens query_starts[s] to query_starts[s + 1] - 1. context_lens int32 [S]:
    its sequence's tokens in the cache. The same on the host: query_lens and context_lens_host.
    """

    query_starts: Tensor
    context_lens: Tensor
    query_lens: tuple[int, ...]
    context_lens_host: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the dense kernel: slices of equal length over keys gathered from `blocks`, int64 [slices · width].

    Of each slice's gathered keys, `keys` tokens from `first` on are used. `unseen`, int64, are those among all
    gathered that must not be looked at; `mask` [slices, 1, queries, keys] is 0 or −inf. Where `run` is not None the
    blocks are those from `run` on, one after the other, and need not be gathered.
    """

    start: int
    slices: int
    queries: int
    blocks: Tensor
    first: int
    keys: int
    causal: bool = False
    unseen: Tensor | None = None
    mask: Tensor | None = None
    run: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of one KV group share in one step; made by `plan_attention`. `calls` are the reference's."""

    layout: SliceLayout
    tables: Tensor
    window: int | None
    calls: tuple[_Call, ...] = ()


def plan_attention(layout: SliceLayout, tables: Tensor, k_cache: Tensor, window: int | None = None) -> AttentionPlan:
    """Prepare a step's attention for one KV group.

    tables int32 [S, W]: entry i of a row is the block of positions i · B to i · B + B − 1. k_cache [N, B, G, D] is
    any of the group's: it gives block size and dtype. `window` counts the query itself.
    """
    if not on_cpu("attention", k_cache):
        return AttentionPlan(layout, tables, window)
    calls, start = [], 0
    for first, stop in _runs(layout, window):
        queries, contexts = layout.query_lens[first], layout.context_lens_host[first:stop]
        if stop - first == 1:
            calls.append(_plan_slice(start, queries, contexts[0], tables[first], k_cache, window))
        else:
            calls.append(_plan_decodes(start, contexts, tables[first:stop], k_cache, window))
        start += queries * (stop - first)
    return AttentionPlan(layout, tables, window, tuple(calls))


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """softmax(scale · q kᵀ) v for every token; softmax and sums in fp32.

    q [T, H, D]; caches [N, B, G, D]; query heads h · H/G to (h + 1) · H/G − 1 use KV head h. Returns [T, H, D].
    """
    if not on_cpu("paged_attention", q):
        return _paged_attention(q, k_cache, v_cache, plan, scale)
    outputs = [_attend(q, k_cache, v_cache, call, scale) for call in plan.calls]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _runs(layout: SliceLayout, window: int | None) -> Iterator[tuple[int, int]]:
    """Split the slices into those that one call takes: a chunk, or decodes that padding does not make twice as long."""
    first = longest = total = 0
    for index, (queries, context) in enumerate(zip(layout.query_lens, layout.context_lens_host, strict=True)):
        keys = max(_FEW_KEYS, min(context, window or context))
        wasteful = max(longest, keys) * (index - first + 1) > 2 * (total + keys)
        if index > first and (wasteful or queries > 1 or layout.query_lens[first] > 1):
            yield first, index
            first, longest, total = index, 0, 0
        longest, total = max(longest, keys), total + keys
    yield first, len(layout.query_lens)


def _plan_slice(start: int, queries: int, context: int, table: Tensor, k_cache: Tensor, window: int | None) -> _Call:
    block = k_cache.shape[1]
    oldest = max(0, context - queries - window + 1) if window else 0
    first = oldest // block
    blocks = table[first : -(-context // block)].long()
    keys = context - oldest
    causal = queries == keys and not (window and keys > window)
    mask = None
    if queries > 1 and not causal:
        age = torch.arange(context - queries, context)[:, None] - torch.arange(oldest, context)
        mask = _minus_inf(age < 0 if window is None else (age < 0) | (age >= window), k_cache.dtype)[None, None]
    run = int(blocks[0]) if bool((blocks.diff() == 1).all()) else None
    return _Call(start, 1, queries, blocks, oldest - first * block, keys, causal and queries > 1, mask=mask, run=run)


def _plan_decodes(start: int, contexts: tuple[int, ...], tables: Tensor, k_cache: Tensor, window: int | None) -> _Call:
    block = k_cache.shape[1]
    stop = torch.tensor(contexts)[:, None]
    oldest = (stop - window).clamp_(min=0) if window else torch.zeros_like(stop)
    first, last = oldest // block, (stop - 1) // block
    width = int((last - first).max()) + 1
    # A slice with fewer blocks repeats its last one, so that every entry names a block of its own.
    columns = (first + torch.arange(width)).minimum(last)
    position = first * block + torch.arange(width * block)
    outside = (position < oldest) | (position >= stop)
    skipped = int((oldest - first * block).min())
    keys = int((stop - first * block).max()) - skipped
    call = _Call(start, len(contexts), 1, tables.gather(1, columns).flatten().long(), skipped, keys)
    hidden = outside[:, skipped : skipped + keys]
    if not hidden.any():
        return call
    return replace(
        call, unseen=outside.flatten().nonzero().flatten(), mask=_minus_inf(hidden, k_cache.dtype)[:, None, None]
    )


def _minus_inf(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, call: _Call, scale: float) -> Tensor:
    heads, dim = q.shape[1:]
    k, v = _gather(k_cache, call), _gather(v_cache, call)  # [slices, G, keys, D]
    queries = q[call.start : call.start + call.slices * call.queries]
    if call.queries == 1:  # the query heads of one KV head share its keys like queries of one sequence
        grouped = queries.view(call.slices, k.shape[1], -1, dim)
        out = functional.scaled_dot_product_attention(grouped, k, v, attn_mask=call.mask, scale=scale)
        return out.reshape(call.slices, heads, dim)
    out = functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None], k, v, attn_mask=call.mask, is_causal=call.causal, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def _gather(cache: Tensor, call: _Call) -> Tensor:
    if call.run is not None:
        _, block, heads, dim = cache.shape
        start = cache.storage_offset() + (call.run * block + call.first) * heads * dim
        return cache.as_strided((1, heads, call.keys, dim), (0, dim, heads * dim, 1), start)  # in one call
    rows = cache.index_select(0, call.blocks).view(-1, *cache.shape[2:])
    if call.unseen is not None:
        rows.index_fill_(0, call.unseen, 0)
    return rows.view(call.slices, -1, *cache.shape[2:]).narrow(1, call.first, call.keys).transpose(1, 2)


# --- CUDA -------------------------------------------------------------------------------------------------


def _paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    assert q.stride()[1:] == (q.shape[2], 1), q.stride()
    assert k_cache.is_contiguous(), k_cache.stride()
    assert v_cache.is_contiguous(), v_cache.stride()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if 1 in plan.layout.query_lens:
        _decode(q, k_cache, v_cache, plan, scale, out)
    if max(plan.layout.query_lens) > 1:
        _prefill(q, k_cache, v_cache, plan, scale, out)
    return out


def _decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float, out: Tensor) -> None:
    """Attend for the slices of one token; the others are left alone."""
    layout, S, (H, D), (_, B, G, _) = plan.layout, len(plan.layout.query_lens), q.shape[1:], k_cache.shape
    block_d = max(_LEAST_DOT, triton.next_power_of_2(D))
    block_n = max(16, 16384 // q.element_size() // block_d)
    splits = _splits(plan, S * G, block_n)
    part = torch.empty((S, H, splits, D), dtype=torch.float32, device=q.device)
    lse = torch.empty((S, H, splits), dtype=torch.float32, device=q.device)
    decode_kernel[(S, G, splits)](
        q, k_cache, v_cache, plan.tables, layout.query_starts, layout.context_lens, part, lse, scale * _LOG2_E,
        q.stride(0), plan.tables.stride(0), splits, G, H // G, B, D, plan.window or 0,
        max(16, triton.next_power_of_2(H // G)), block_d, block_n, num_warps=4, num_stages=3,
    )  # fmt: skip
    piece = min(block_d, _PIECE)
    combine_kernel[(S, H, triton.cdiv(D, piece))](
        part, lse, layout.query_starts, layout.context_lens, out, splits,
        H, D, plan.window or 0, block_n, _AT_ONCE, piece,
    )  # fmt: skip


def _splits(plan: AttentionPlan, programs: int, block_n: int) -> int:
    """Into how many parts a context is cut so that there is work for the whole card; a power of two."""
    keys = max(plan.layout.context_lens_host)
    if plan.window:
        keys = min(keys, plan.window)
    wanted = min(_MAX_SPLITS, triton.cdiv(keys, block_n), triton.cdiv(_FILLING, programs))
    return int(triton.next_power_of_2(wanted))


def _prefill(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float, out: Tensor) -> None:
    """Attend for the slices of several tokens; the others are left alone."""
    layout, S, (T, H, D), (_, B, G, _) = plan.layout, len(plan.layout.query_lens), q.shape, k_cache.shape
    block_d = max(_LEAST_DOT, triton.next_power_of_2(D))
    block_m, block_n, warps, stages = _prefill_tile(block_d, q.element_size())
    assert block_m >= H // G, (H, G, block_m)
    prefill_kernel[(T // (block_m // (H // G)) + S, G)](
        q, k_cache, v_cache, plan.tables, layout.query_starts, layout.context_lens, out, scale * _LOG2_E,
        q.stride(0), plan.tables.stride(0), S, G, H // G, B, D, plan.window or 0,
        block_m, block_d, block_n, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _prefill_tile(block_d: int, item_bytes: int) -> tuple[int, int, int, int]:
    """Query rows, keys, warps and stages: what fits a Hopper multiprocessor's registers and shared memory."""
    if item_bytes == 4:  # without matrix units; for tests of the arithmetic, not for speed
        return 16, 16, 4, 1
    if block_d <= 64:
        return 128, 64, 4, 3
    if block_d <= 128:
        return 128, 64, 8, 3
    return (128, 64, 8, 2) if block_d <= 256 else (64, 32, 8, 2)
