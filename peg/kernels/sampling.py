"""From logits to each row's best token: greedy, or sampled by adding Gumbel noise, in one pass over the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from peg.kernels.device import on_cpu
from peg.kernels.gumbel import gumbel, gumbel_noise
from peg.kernels.ordering import order_key, order_keys

_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Choice:
    """How each row chooses among its tokens.

    temperatures float32 [rows], 0 for greedy; noise int64 [rows, 2] are `noise_key`s. Where there are `floors`
    float32 [rows], tokens with a smaller logit cannot be chosen; those that `forbidden` bool [V] names cannot
    either, in any row.
    """

    temperatures: Tensor
    noise: Tensor
    floors: Tensor | None = None
    forbidden: Tensor | None = None


def best_keys(logits: Tensor, choice: Choice, first_id: int) -> Tensor:
    """The `order_keys` int64 [rows] of each row's best token: logit / temperature + noise; the lowest id among equals.

    logits float32 [rows, V] of the ids from `first_id` on; they are left as they are. A NaN counts as infinite.
    """
    if not on_cpu("best_keys", logits):
        return _best_keys(logits, choice, first_id)
    if choice.forbidden is not None:
        logits = logits.masked_fill(choice.forbidden, float("-inf"))
    ids = torch.arange(first_id, first_id + logits.shape[1], dtype=torch.int32)
    floors = [float("-inf")] * len(logits) if choice.floors is None else choice.floors.tolist()
    rows = zip(logits, choice.temperatures.tolist(), choice.noise.tolist(), floors, strict=True)
    picks = [_pick(ids, *row) for row in rows]  # row by row, so that a row stays in the cache
    best, index = torch.stack([score for score, _ in picks]), torch.stack([index for _, index in picks])
    return order_keys(best.masked_fill_(best.isnan(), float("inf")), index + first_id)


def _pick(ids: Tensor, logits: Tensor, temperature: float, noise: Sequence[int], floor: float) -> tuple[Tensor, Tensor]:
    """The best score of one row, and its place."""
    if temperature > 0:
        if floor > float("-inf"):
            logits = logits.masked_fill(logits < floor, float("-inf"))
        logits = gumbel(ids, (noise[0], noise[1])).add_(logits / temperature)
    score, index = logits.max(dim=0)
    return score, index


@triton.jit(do_not_specialize=["first_id"])
def _best_keys_kernel(
    p_logits, p_temperatures, p_noise, p_floors, p_forbidden, p_out, first_id,
    V: tl.constexpr, FLOORS: tl.constexpr, FORBIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best of one block of one row."""
    i_row, i_block = tl.program_id(0), tl.program_id(1)
    o_v = i_block * BLOCK + tl.arange(0, BLOCK)
    allowed = o_v < V
    b_score = tl.load(p_logits + i_row.to(tl.int64) * V + o_v, mask=allowed, other=float("-inf"))
    if FORBIDDEN:
        allowed = allowed & (tl.load(p_forbidden + o_v, mask=allowed, other=1) == 0)
    if FLOORS:
        allowed = allowed & ((b_score >= tl.load(p_floors + i_row)) | (b_score != b_score))  # noqa: PLR0124 (NaN)
    b_score = tl.where(allowed, b_score, float("-inf"))
    temperature = tl.load(p_temperatures + i_row)
    if temperature > 0:
        key0 = tl.load(p_noise + 2 * i_row).to(tl.uint32)
        key1 = tl.load(p_noise + 2 * i_row + 1).to(tl.uint32)
        b_score = tl.div_rn(b_score, temperature) + gumbel_noise(first_id + o_v, key0, key1)
    b_score = tl.where(b_score != b_score, float("inf"), b_score)  # noqa: PLR0124
    b_key = tl.where(o_v < V, order_key(b_score, first_id + o_v), -0x8000000000000000)
    tl.store(p_out + i_row * tl.num_programs(1) + i_block, tl.max(b_key, 0))


def _best_keys(logits: Tensor, choice: Choice, first_id: int) -> Tensor:
    assert logits.is_contiguous(), logits.stride()
    rows, V = logits.shape
    blocks = triton.cdiv(V, _BLOCK)
    out = torch.empty((rows, blocks), dtype=torch.int64, device=logits.device)
    floors, forbidden = choice.floors, choice.forbidden
    _best_keys_kernel[(rows, blocks)](
        logits, choice.temperatures, choice.noise,
        logits if floors is None else floors, logits if forbidden is None else forbidden.view(torch.uint8),
        out, first_id, V, floors is not None, forbidden is not None, _BLOCK,
    )  # fmt: skip
    return out.amax(dim=1)
