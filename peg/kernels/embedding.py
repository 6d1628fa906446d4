"""Looking tokens up in one rank's rows of the vocabulary."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from peg.kernels.device import require_cpu


def embed(token_ids: Tensor, weight: Tensor, first_id: int) -> Tensor:
    """Rows of the tokens that this rank holds, zeros for the others, so that the sum over ranks is exact.

    token_ids int64 [T]; weight [V/R, M], the rows of ids first_id, first_id + 1, … Returns [T, M].
    """
    require_cpu("embed", weight)
    local = token_ids - first_id
    elsewhere = (local < 0) | (local >= weight.shape[0])
    rows = functional.embedding(local.masked_fill(elsewhere, 0), weight)
    return rows.masked_fill_(elsewhere[:, None], 0)
