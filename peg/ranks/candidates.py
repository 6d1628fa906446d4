"""Which tokens top_k, top_p and min_p leave to choose from, as a smallest logit. A pure function of one row."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from peg.plan import SamplingParams


def smallest_logit(logits: Tensor, params: SamplingParams) -> float:
    """The row's candidates are the tokens with at least this logit.

    logits float32 [V], −inf where a token cannot be sampled. In this order: min_p keeps what is at least min_p times
    as likely as the likeliest token, top_k the k likeliest, top_p the fewest of what is left that make up top_p of its
    probability; all at the row's temperature. A tie with the last candidate is a candidate too.

    NumPy sorts 49152 numbers in 0.1 ms, PyTorch in 4 (measured, AVX-512).
    """
    ordered = np.sort(logits.numpy())[::-1]
    best = float(ordered[0])
    if not math.isfinite(best):
        return -math.inf  # whoever samples from this row refuses it
    floor = -math.inf
    if params.min_p > 0:
        floor = best + params.temperature * math.log(params.min_p)
    if 0 < params.top_k < len(ordered):
        floor = max(floor, float(ordered[params.top_k - 1]))
    if params.top_p < 1:
        kept = ordered[: np.count_nonzero(ordered >= floor)]
        sums = np.exp((kept - best) / params.temperature).cumsum(dtype=np.float64)
        floor = float(kept[min(np.searchsorted(sums, params.top_p * sums[-1]), len(kept) - 1)])
    return floor
