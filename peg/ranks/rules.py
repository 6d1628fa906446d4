"""What a row's parameters say about single tokens: bans, biases, penalties. Each rank applies them to its own share.

The rules are vLLM's, and so is their order: bans, then the bias, then the penalties; temperature comes after all of
them, and logprobs never see them. A rule is made of a row's tokens, and told of each token that a step samples. It only
ever calculates on the device and never looks at the outcome, so that nobody waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from peg.plan import NewRow
from peg.ranks.device import Device, HostArray

_LARGEST = 1e30  # of a logit that was multiplied: divided by the lowest temperature it is finite still
_ANY = -2  # in the beginning of a bad word that is shorter than the longest
_NONE = -1  # where nothing was generated yet
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class Share:
    """The token ids `first_id` to `first_id + size - 1`, those of one rank's logits."""

    first_id: int
    size: int

    def __contains__(self, token_id: int) -> bool:
        return 0 <= token_id - self.first_id < self.size

    def places(self, ids: Iterable[int]) -> HostArray:
        """int64 [n]: where in the share those of the ids lie that are in it."""
        return np.array([token_id - self.first_id for token_id in ids if token_id in self], np.int64)


class Rule(Protocol):
    """One rule of one row on one rank. Owned by the rank's thread."""

    def apply_(self, logits: Tensor) -> None:
        """Change the row's logits, float32 [V/R], in place."""

    def sampled(self, token_id: Tensor) -> None:
        """The row has sampled this token, int64 []."""


def rules_of(new: NewRow, share: Share, device: Device) -> tuple[Rule, ...]:
    """The rules of a row, in the order in which they apply; none for a row whose parameters ask for none."""
    params = new.params
    rules: list[Rule] = []
    single = [word[0] for word in params.bad_words if len(word) == 1]
    longer = [word for word in params.bad_words if len(word) > 1]
    if params.allowed_token_ids is not None or single:
        rules.append(_Banned(params.allowed_token_ids, single, share, device))
    if longer:
        rules.append(_BadWords(longer, new.output_ids, share, device))
    if len(new.output_ids) < params.min_tokens:
        rules.append(_NotYet(new.stop_ids, params.min_tokens - len(new.output_ids), share, device))
    if params.logit_bias:
        rules.append(_Bias(params.logit_bias, share, device))
    if params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0:
        rules.append(_Penalties(new, share, device))
    return tuple(rules)


def apply_masks_(logits: Tensor, masks: Mapping[int, bytes], share: Share, device: Device) -> None:
    """Leave the logits [rows, V/R] of some rows only where the mask of the row allows it, in place.

    Id i may come where bit i % 8 of byte i // 8 is set; an id past the mask's end may not.
    """
    first, end = share.first_id // _WORD_BITS, -(-(share.first_id + share.size) // _WORD_BITS)
    words = np.zeros((len(masks), end - first), "<i4")
    for place, mask in enumerate(masks.values()):
        part = mask[4 * first : 4 * end]
        words[place].view(np.uint8)[: len(part)] = np.frombuffer(part, np.uint8)
    rows, there = device.upload((np.array(list(masks)), words.astype(np.int32)))
    bits = there[:, :, None] >> torch.arange(_WORD_BITS, dtype=torch.int32, device=device.place) & 1
    skipped = share.first_id % _WORD_BITS
    banned = bits.flatten(1)[:, skipped : skipped + share.size] == 0
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(banned, -math.inf))


class _Banned:
    """Tokens that are never sampled: those outside `allowed`, where there is such a set, and `single`."""

    def __init__(self, allowed: Iterable[int] | None, single: Iterable[int], share: Share, device: Device) -> None:
        let, not_let = device.upload((share.places(allowed or ()), share.places(single)))
        self._banned = torch.full((share.size,), allowed is not None, device=device.place)
        self._banned.index_fill_(0, let, value=False).index_fill_(0, not_let, value=True)

    def apply_(self, logits: Tensor) -> None:
        logits.masked_fill_(self._banned, -math.inf)

    def sampled(self, token_id: Tensor) -> None:
        pass


class _BadWords:
    """Words of several tokens: once all but the last of a word were generated, its last token is not sampled."""

    def __init__(
        self, words: Sequence[tuple[int, ...]], output_ids: Sequence[int], share: Share, device: Device
    ) -> None:
        depth = max(len(word) for word in words) - 1
        mine = [word for word in words if word[-1] in share]
        beginnings = [(_ANY,) * (depth + 1 - len(word)) + word[:-1] for word in mine]
        self._beginnings, self._ends, self._latest = _keep(
            device,
            np.array(beginnings, np.int64).reshape(len(mine), depth),
            share.places(word[-1] for word in mine),
            np.array([*(_NONE,) * depth, *output_ids][-depth:], np.int64),
        )

    def apply_(self, logits: Tensor) -> None:
        begun = ((self._beginnings == self._latest) | (self._beginnings == _ANY)).all(dim=1)
        # Two words may end alike: the smallest of what they say, and of what is there, is right.
        most = torch.where(begun, -math.inf, math.inf)
        logits.scatter_reduce_(0, self._ends, most, "amin")

    def sampled(self, token_id: Tensor) -> None:
        self._latest = torch.cat((self._latest[1:], token_id[None]))


class _NotYet:
    """What would end the sequence is not sampled before `count` more tokens are there."""

    def __init__(self, stop_ids: Iterable[int], count: int, share: Share, device: Device) -> None:
        (self._stops,) = _keep(device, share.places(stop_ids))
        self._left = count

    def apply_(self, logits: Tensor) -> None:
        if self._left > 0:
            logits.index_fill_(0, self._stops, -math.inf)

    def sampled(self, token_id: Tensor) -> None:
        self._left -= 1


class _Bias:
    """A number added to the logits of some tokens."""

    def __init__(self, bias: Sequence[tuple[int, float]], share: Share, device: Device) -> None:
        mine = [(token_id, value) for token_id, value in bias if token_id in share]
        values = np.array([value for _, value in mine], np.float32)
        self._places, self._values = _keep(device, share.places(token_id for token_id, _ in mine), values)

    def apply_(self, logits: Tensor) -> None:
        logits.index_add_(0, self._places, self._values)

    def sampled(self, token_id: Tensor) -> None:
        pass


class _Penalties:
    """Less for what was there before: a factor for tokens of the prompt or the output, amounts for those generated.

    `_places` int64 [n] is where to look: every token so far that is in the share is there, some of them twice.
    """

    def __init__(self, new: NewRow, share: Share, device: Device) -> None:
        params = new.params
        self._repetition = params.repetition_penalty
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty
        self._share = share
        self._places, outputs = _keep(
            device, share.places({*new.prompt_ids, *new.output_ids}), share.places(new.output_ids)
        )
        self._seen = torch.zeros(share.size, dtype=torch.bool, device=device.place)
        self._seen.index_fill_(0, self._places, value=True)
        self._generated = torch.zeros(share.size, device=device.place)
        self._generated.index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.float32))

    def apply_(self, logits: Tensor) -> None:
        here, seen, generated = logits[self._places], self._seen[self._places], self._generated[self._places]
        if self._repetition != 1:
            scaled = torch.where(here > 0, here / self._repetition, here * self._repetition)
            # What was finite stays so, whatever the factor; what was not must be found by whoever samples.
            here = torch.where(seen & here.isfinite(), scaled.clamp_(-_LARGEST, _LARGEST), here)
        here -= generated * self._frequency
        here -= generated.clamp(max=1) * self._presence
        logits.index_copy_(0, self._places, here)

    def sampled(self, token_id: Tensor) -> None:
        """A token outside the share is counted as none at the nearest place inside."""
        place = (token_id - self._share.first_id).clamp(0, self._share.size - 1)[None]
        inside = place + self._share.first_id == token_id
        self._places = torch.cat((self._places, place))
        self._seen.index_copy_(0, place, self._seen[place] | inside)
        self._generated.index_add_(0, place, inside.float())


def _keep(device: Device, *arrays: HostArray) -> list[Tensor]:
    """The arrays on the device, for as long as the row lives: what is uploaded is overwritten two steps later."""
    return [tensor.clone() for tensor in device.upload(arrays)]
