"""Log-probabilities of given tokens, over a vocabulary that is spread over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from peg.errors import RankError
from peg.kernels.ordering import key_ids, key_logits, order_keys
from peg.models.comm import Communicator
from peg.plan import TokenLogprobs

NUM_SCORES = 4
"""How many tensors `Scorer.score` returns."""

_CHUNK_BYTES = 16 << 20  # of logits; with all that is made of them under 200 MB


class Scorer:
    """Scores on one rank, whose logits are those of the ids from `first_id` on. Owned by the rank's thread.

    `at_once` is the most rows whose logits it takes at a time.
    """

    def __init__(self, first_id: int, vocab_share: int) -> None:
        self._first_id = first_id
        self.at_once = max(1, _CHUNK_BYTES // (4 * vocab_share))

    def score(
        self, logits: Callable[[slice], Tensor], tokens: Tensor, top: int, comm: Communicator
    ) -> tuple[Tensor, ...]:
        """Exact log-softmax before temperature, of `tokens` int64 [rows] and of the `top` likeliest ones beside each.

        `logits` gives float32 [rows, V/R] for a slice of the rows; it is asked chunk by chunk, so that memory stays
        bounded. All ranks must call this alike. What comes back stays on the device, for `read_logprobs`: logprobs
        float64 [rows], places int64 [rows], ids int64 [rows, top], their logprobs float64 [rows, top].
        """
        rows = self.at_once if tokens.is_cuda else max(1, self.at_once // comm.world_size)  # CPU ranks share one memory
        out: tuple[Tensor, ...] = ()
        for part in (slice(first, first + rows) for first in range(0, len(tokens), rows)):
            scored = _score(logits(part), self._first_id, tokens[part], top, comm)
            # Kept chunk by chunk, each few numbers would hold the place behind a chunk's logits in the heap.
            out = out or tuple(column.new_empty(len(tokens), *column.shape[1:]) for column in scored)
            for whole, column in zip(out, scored, strict=True):
                whole[part] = column
        return out


def read_logprobs(tokens: Sequence[int], tops: Sequence[int], scored: Sequence[Tensor]) -> list[TokenLogprobs]:
    """What `Scorer.score` found, once it is on the host. Raises RankError where the logits were not finite."""
    logprobs, places, ids, values = scored
    if not bool(logprobs.isfinite().all()):
        raise RankError("the logits of a scored token are not finite")
    columns = (tokens, tops, logprobs.tolist(), places.tolist(), ids.tolist(), values.tolist())
    return [
        TokenLogprobs(token, logprob, place, tuple(zip(row_ids[:top], row_values, strict=False)))
        for token, top, logprob, place, row_ids, row_values in zip(*columns, strict=True)
    ]


def _score(logits: Tensor, first_id: int, tokens: Tensor, top: int, comm: Communicator) -> tuple[Tensor, ...]:
    logsumexp, chosen = _sums(logits, first_id, tokens, comm)
    places = _places(logits, first_id, chosen, tokens, comm)
    keys = _top(logits, first_id, top, comm)
    return chosen.double() - logsumexp, places, key_ids(keys), key_logits(keys).double() - logsumexp[:, None]


def _sums(logits: Tensor, first_id: int, tokens: Tensor, comm: Communicator) -> tuple[Tensor, Tensor]:
    """For each row the log of the summed exponentials, float64, and its token's logit, float32."""
    local = tokens - first_id
    inside = (local >= 0) & (local < logits.shape[1])
    mine = logits.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    both = torch.stack((logits.logsumexp(dim=-1), mine.masked_fill(~inside, float("-inf"))), dim=1)
    every = both.new_empty(comm.world_size, *both.shape)
    comm.all_gather(every, both)
    return every[..., 0].double().logsumexp(dim=0), every[..., 1].amax(dim=0)


def _places(logits: Tensor, first_id: int, chosen: Tensor, tokens: Tensor, comm: Communicator) -> Tensor:
    """Each token's place among all, int64 from 1; among equal logits the lower id comes first."""
    if logits.is_cpu:
        before = _places_on_cpu(logits, first_id, chosen, tokens)
    else:
        ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)
        before = ((logits == chosen[:, None]) & (ids < tokens[:, None])).sum(dim=-1)
        before += (logits > chosen[:, None]).sum(dim=-1)
    comm.all_reduce_(before)
    return before + 1


def _top(logits: Tensor, first_id: int, count: int, comm: Communicator) -> Tensor:
    """The order keys int64 [rows, count] of the likeliest tokens, best first."""
    rows, share = logits.shape
    ids = torch.arange(first_id, first_id + share, device=logits.device)
    if count == 0:
        return ids.new_empty(rows, 0)
    mine = min(count, share)
    keys = _top_on_cpu(logits, ids, mine) if logits.is_cpu else order_keys(logits, ids[None]).topk(mine).values
    every_key = keys.new_empty(comm.world_size, *keys.shape)
    comm.all_gather(every_key, keys)
    together = every_key.transpose(0, 1).flatten(1)
    return together.topk(min(count, together.shape[1])).values


# On a CPU both go row by row through NumPy: what is made stays in the cache, and nothing is as large as the logits.
# Of 262,144 words the likeliest 64 take 0.9 ms, not 7.5, and a place 0.5, not 4.8 (one core with AVX-512).


def _places_on_cpu(logits: Tensor, first_id: int, chosen: Tensor, tokens: Tensor) -> Tensor:
    """How many of each row's logits go before its token's, int64 [rows]."""
    lower = (tokens - first_id).clamp(min=0).tolist()
    rows = zip(logits.numpy(), chosen.tolist(), lower, strict=True)
    return torch.tensor(
        [np.count_nonzero(row > logit) + np.count_nonzero(row[:end] == logit) for row, logit, end in rows]
    )


def _top_on_cpu(logits: Tensor, ids: Tensor, count: int) -> Tensor:
    """The order keys int64 [rows, count] of each row's likeliest, best first: keys of those alone that can be."""
    keys = []
    for row in logits:
        values = row.numpy()
        least = np.partition(values, -count)[-count]
        places = torch.from_numpy(np.flatnonzero(~(values < least)))  # where it is NaN, all of them
        keys.append(order_keys(row[places][None], ids[places][None]).topk(count).values)
    return torch.cat(keys)
