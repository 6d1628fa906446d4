"""Which tokens top_k, top_p and min_p leave to choose from, as a smallest logit. Pure functions of one row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from peg.plan import SamplingParams

_HEAD = 256  # a nucleus is nearly always among so many tokens; finding them is far quicker than sorting all


def smallest_logit(logits: Tensor, params: SamplingParams) -> float:
    """The row's candidates are the tokens with at least this logit.

    logits float32 [V], −inf where a token cannot be sampled. In this order: min_p keeps what is at least min_p times
    as likely as the likeliest token, top_k the k likeliest, top_p the fewest of what is left that make up top_p of its
    probability; all at the row's temperature. A tie with the last candidate is a candidate too.
    """
    best = float(logits.max())
    floor = -math.inf
    if params.min_p > 0:
        floor = best + params.temperature * math.log(params.min_p)
    limit = logits.numel() if params.top_k == 0 else min(params.top_k, logits.numel())
    if params.top_k > 0:
        floor = max(floor, float(logits.topk(limit).values[-1]))
    if params.top_p < 1:
        total = float(_weights(logits, best, floor, params.temperature).sum(dtype=torch.float64))
        floor = max(floor, _nucleus(logits, best, params, params.top_p * total, min(limit, _HEAD)))
    return floor


def _nucleus(logits: Tensor, best: float, params: SamplingParams, mass: float, head: int) -> float:
    """The logit at which the likeliest tokens, added up in order, reach `mass`."""
    values = logits.topk(head).values
    sums = _weights(values, best, -math.inf, params.temperature).double().cumsum(0)
    index = int(torch.searchsorted(sums, mass))
    if index < head:
        return float(values[index])
    if head < logits.numel():
        return _nucleus(logits, best, params, mass, min(head * 32, logits.numel()))
    return -math.inf


def _weights(logits: Tensor, best: float, floor: float, temperature: float) -> Tensor:
    """float32, exp((logit − best) / temperature), zero under the floor."""
    weights = ((logits - best) / temperature).exp_()
    return weights if floor == -math.inf else weights.masked_fill_(logits < floor, 0)
