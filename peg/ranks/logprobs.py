"""Log-probabilities of given tokens, over a vocabulary that is spread over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peg.errors import RankError
from peg.models.comm import Communicator
from peg.plan import TokenLogprobs
from peg.ranks.ordering import key_ids, key_logits, order_keys

_CHUNK_BYTES = 16 << 20  # of logits; with all that is made of them under 200 MB


@dataclass(frozen=True, slots=True)
class Target:
    """A token whose log-probability is wanted, with those of the `top` likeliest ones beside it."""

    token_id: int
    top: int


class Scorer:
    """Scores on one rank, whose logits are those of the ids from `first_id` on. Owned by the rank's thread."""

    def __init__(self, first_id: int, vocab_share: int) -> None:
        self._first_id = first_id
        self._chunk = max(1, _CHUNK_BYTES // (4 * vocab_share))

    def score(
        self, logits: Callable[[slice], Tensor], targets: Sequence[Target], comm: Communicator
    ) -> list[TokenLogprobs]:
        """Exact log-softmax before temperature, of one target a row; every rank gets the same numbers.

        `logits` gives float32 [rows, V/R] for some of the targets; it is asked chunk by chunk, so that memory stays
        bounded. All ranks must call this alike. Raises RankError where the logits are not finite.
        """
        scored: list[TokenLogprobs] = []
        for first in range(0, len(targets), self._chunk):
            part = slice(first, first + self._chunk)
            scored += _score(logits(part), self._first_id, targets[part], comm)
        return scored


def _score(logits: Tensor, first_id: int, targets: Sequence[Target], comm: Communicator) -> list[TokenLogprobs]:
    tokens = torch.tensor([target.token_id for target in targets])
    logsumexp, chosen = _sums(logits, first_id, tokens, comm)
    places = _places(logits, first_id, chosen, tokens, comm)
    top = _top(logits, first_id, max(target.top for target in targets), comm)
    top_logprobs = (key_logits(top).double() - logsumexp[:, None]).tolist()
    logprobs = (chosen.double() - logsumexp).tolist()
    if not all(map(math.isfinite, logprobs)):
        raise RankError("the logits of a scored token are not finite")
    return [
        TokenLogprobs(target.token_id, logprob, place, tuple(zip(ids[: target.top], values, strict=False)))
        for target, logprob, place, ids, values in zip(
            targets, logprobs, places, key_ids(top).tolist(), top_logprobs, strict=True
        )
    ]


def _sums(logits: Tensor, first_id: int, tokens: Tensor, comm: Communicator) -> tuple[Tensor, Tensor]:
    """For each row the log of the summed exponentials, float64, and its token's logit, float32."""
    local = tokens - first_id
    inside = (local >= 0) & (local < logits.shape[1])
    mine = logits.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    both = torch.stack((logits.logsumexp(dim=-1), mine.masked_fill(~inside, float("-inf"))), dim=1)
    every = both.new_empty(comm.world_size, *both.shape)
    comm.all_gather(every, both)
    return every[..., 0].double().logsumexp(dim=0), every[..., 1].amax(dim=0)


def _places(logits: Tensor, first_id: int, chosen: Tensor, tokens: Tensor, comm: Communicator) -> list[int]:
    """Each target's place among all tokens, from 1; among equal logits the lower id comes first."""
    before = (logits > chosen[:, None]).sum(dim=-1)
    ids = torch.arange(first_id, first_id + logits.shape[1])
    before += ((logits == chosen[:, None]) & (ids < tokens[:, None])).sum(dim=-1)
    comm.all_reduce_(before)
    return [place + 1 for place in before.tolist()]


def _top(logits: Tensor, first_id: int, count: int, comm: Communicator) -> Tensor:
    """The order keys int64 [rows, count] of the likeliest tokens, best first."""
    rows, share = logits.shape
    if count == 0:
        return torch.empty(rows, 0, dtype=torch.int64)
    keys = order_keys(logits, torch.arange(first_id, first_id + share)[None]).topk(min(count, share)).values
    every_key = keys.new_empty(comm.world_size, *keys.shape)
    comm.all_gather(every_key, keys)
    together = every_key.transpose(0, 1).flatten(1)
    return together.topk(min(count, together.shape[1])).values
