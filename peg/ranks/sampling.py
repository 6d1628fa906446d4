"""From logits to tokens, over a vocabulary that is spread over the ranks.

A sampled token is a pure function of its row's logits, parameters, seed and position. Every rank gets the same ones.
Greedy and sampled rows go one way: what may not be chosen is −inf, a row with a temperature gets noise, and the
largest score wins, the lowest id among equals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from peg.errors import RankError
from peg.kernels.candidates import Filters, smallest_logits
from peg.kernels.gumbel import noise_key
from peg.kernels.ordering import key_ids, key_logits
from peg.kernels.sampling import Choice, best_keys
from peg.models.comm import Communicator
from peg.plan import SamplingParams
from peg.ranks.device import Device, HostArray

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

    def __init__(self, first_id: int, vocab_share: int, forbidden_ids: Sequence[int], device: Device) -> None:
        self._first_id = first_id
        self._device = device
        self._share = vocab_share
        self._local = [token - first_id for token in forbidden_ids if 0 <= token - first_id < vocab_share]
        self._forbidden: Tensor | None = None

    def prepare(self) -> None:
        """Put on the device what every step needs."""
        if self._local:
            forbidden = torch.zeros(self._share, dtype=torch.bool)
            forbidden[torch.tensor(self._local)] = True
            self._forbidden = forbidden.to(self._device.place)

    def sample(self, logits: Tensor, draws: Sequence[Draw], comm: Communicator) -> Tensor:
        """The order key int64 of each row's token, for logits float32 [rows, V/R], one row a draw.

        `key_ids` has the ids, `read_tokens` too, on the host. `logits` is left as it is; the host does not wait.
        """
        return self._best(logits, self._choice(logits, draws, comm), comm)

    def pick(self, logits: Tensor, temperatures: Tensor, noise: Tensor, comm: Communicator) -> Tensor:
        """The same for rows that nothing filters, with what `noise_of` says of their draws."""
        return self._best(logits, Choice(temperatures, noise, None, self._forbidden), comm)

    def _best(self, logits: Tensor, choice: Choice, comm: Communicator) -> Tensor:
        keys = best_keys(logits, choice, self._first_id)
        gathered = keys.new_empty(comm.world_size, len(keys))
        comm.all_gather(gathered, keys)
        return gathered.amax(dim=0)

    def _choice(self, logits: Tensor, draws: Sequence[Draw], comm: Communicator) -> Choice:
        temperatures, noise = noise_of(draws)
        filtered = [row for row, draw in enumerate(draws) if draw.filtered]
        if not filtered:
            there = self._device.upload((temperatures, noise))
            return Choice(there[0], there[1], None, self._forbidden)
        params = [draws[row].params for row in filtered]
        columns = (
            np.array([param.temperature for param in params], np.float64),
            np.array([param.top_k for param in params], np.int64),
            np.array([param.top_p for param in params], np.float64),
            np.array([param.min_p for param in params], np.float64),
        )
        there = self._device.upload((temperatures, noise, np.array(filtered), *columns))
        mine = logits.index_select(0, there[2])
        if self._forbidden is not None:
            mine.masked_fill_(self._forbidden, float("-inf"))
        everyone = mine.new_empty(comm.world_size, *mine.shape)
        comm.all_gather(everyone, mine)
        whole = everyone.transpose(0, 1).flatten(1)
        floors = logits.new_full((len(draws),), float("-inf"))
        floors.index_copy_(0, there[2], smallest_logits(whole, Filters(*there[3:])))
        return Choice(there[0], there[1], floors, self._forbidden)


def noise_of(draws: Sequence[Draw]) -> tuple[HostArray, HostArray]:
    """What `Choice` wants of each row: temperatures float32, 0 for greedy, and `noise_key`s int64 [rows, 2]."""
    temperatures = np.array([0.0 if draw.greedy else draw.params.temperature for draw in draws], np.float32)
    noise = [(0, 0) if draw.greedy else noise_key(draw.params.seed, draw.position) for draw in draws]
    return temperatures, np.array(noise, np.int64).reshape(-1, 2)


def read_tokens(keys: Tensor) -> tuple[int, ...]:
    """The ids of `Sampler.sample`, once its keys are on the host. Raises RankError where the logits were not finite."""
    finite = key_logits(keys).isfinite()
    if not bool(finite.all()):
        raise RankError(f"the logits of row {int(finite.logical_not().nonzero()[0])} of the batch are not finite")
    return tuple(key_ids(keys).tolist())
