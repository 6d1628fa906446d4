"""From logits to tokens, over a vocabulary that is spread over the ranks.

A sampled token is a pure function of its row's logits, parameters, seed and position. Every rank gets the same ones.
Greedy and sampled rows go one way: what may not be chosen is −inf, a row with a temperature gets noise, and the
largest score wins, the lowest id among equals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peg.errors import RankError
from peg.kernels.gumbel import gumbel, noise_key
from peg.models.comm import Communicator
from peg.plan import SamplingParams
from peg.ranks.candidates import smallest_logit
from peg.ranks.ordering import key_ids, key_logits, order_keys

_GREEDY_BELOW = 1e-5  # a smaller temperature cannot be told from none in fp32


@dataclass(frozen=True, slots=True)
class Draw:
    """One row to sample for: its parameters, and the position that the token will have."""

    params: SamplingParams
    position: int

    @property
    def greedy(self) -> bool:
        return self.params.temperature < _GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        """Whether top_k, top_p or min_p leaves fewer candidates, which takes a look at the whole vocabulary."""
        params = self.params
        return not self.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


class Sampler:
    """Samples on one rank, whose logits are those of the ids from `first_id` on. Owned by the rank's thread.

    `forbidden_ids` are never sampled.
    """

    def __init__(self, first_id: int, vocab_share: int, forbidden_ids: Sequence[int]) -> None:
        self._first_id = first_id
        self._ids = torch.arange(first_id, first_id + vocab_share, dtype=torch.int32)
        local = [token - first_id for token in forbidden_ids if 0 <= token - first_id < vocab_share]
        self._forbidden = torch.tensor(local, dtype=torch.int64) if local else None

    def sample(self, logits: Tensor, draws: Sequence[Draw], comm: Communicator) -> Tensor:
        """Token ids int64 [rows] for logits float32 [rows, V/R], one row a draw. `logits` is left as it is.

        Raises RankError where a row has no finite largest logit.
        """
        if self._forbidden is not None:
            logits = logits.index_fill(1, self._forbidden, float("-inf"))
        floors = _floors(logits, draws, comm)
        picks = [self._pick(row, draw, floor) for row, draw, floor in zip(logits, draws, floors, strict=True)]
        best = torch.stack([score for score, _ in picks])
        ids = torch.stack([index for _, index in picks]) + self._first_id
        keys = order_keys(best.masked_fill_(best.isnan(), float("inf")), ids)
        gathered = keys.new_empty(comm.world_size, len(draws))
        comm.all_gather(gathered, keys)
        winners = gathered.amax(dim=0)
        finite = key_logits(winners).isfinite()
        if not bool(finite.all()):
            raise RankError(f"the logits of row {int(finite.logical_not().nonzero()[0])} of the batch are not finite")
        return key_ids(winners)

    def _pick(self, logits: Tensor, draw: Draw, floor: float) -> tuple[Tensor, Tensor]:
        """The best score among this rank's logits [V/R] of one row, and its index."""
        if draw.greedy:
            score, index = logits.max(dim=0)
            return score, index
        if floor > -math.inf:
            logits = logits.masked_fill(logits < floor, -math.inf)
        noise = gumbel(self._ids, noise_key(draw.params.seed, draw.position))
        score, index = noise.add_(logits / draw.params.temperature).max(dim=0)
        return score, index


def _floors(logits: Tensor, draws: Sequence[Draw], comm: Communicator) -> list[float]:
    """For each row the smallest logit that may be chosen."""
    floors = [-math.inf] * len(draws)
    filtered = [row for row, draw in enumerate(draws) if draw.filtered]
    if filtered:
        mine = logits[filtered]
        everyone = mine.new_empty(comm.world_size, *mine.shape)
        comm.all_gather(everyone, mine)
        for place, row in enumerate(filtered):
            floors[row] = smallest_logit(everyone[:, place].flatten(), draws[row].params)
    return floors
