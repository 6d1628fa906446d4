"""What each row on one rank samples by: its parameters, the rules made of its tokens, and the last token sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peg.plan import SamplingParams, Slice, StepPlan
from peg.ranks.device import Device
from peg.ranks.rules import Rule, Share, apply_masks_, rules_of


@dataclass(frozen=True, slots=True)
class Row:
    """One row in use. `rules` is empty where the parameters say nothing about single tokens."""

    params: SamplingParams
    rules: tuple[Rule, ...]


class SamplingRows:
    """The sampling rows of one rank, whose logits are those of `share`. Owned by the rank's thread.

    `last_tokens` int64 [rows] is what each row sampled last; a plan's placeholders stand for it. It may be given, and
    be longer.
    """

    def __init__(self, num_rows: int, share: Share, device: Device, last_tokens: Tensor | None = None) -> None:
        if last_tokens is None:
            last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device.place)
        self.last_tokens = last_tokens
        self._share = share
        self._device = device
        self._rows: list[Row | None] = [None] * num_rows

    def apply(self, plan: StepPlan) -> None:
        """Released rows, then new rows."""
        for row in plan.released_rows:
            self._rows[row] = None
        for new in plan.new_rows:
            self._rows[new.row] = Row(new.params, rules_of(new, self._share, self._device))

    def __getitem__(self, row: int) -> Row:
        found = self._rows[row]
        assert found is not None, f"row {row} is not in use"
        return found

    def shape(self, logits: Tensor, slices: Sequence[Slice]) -> Tensor:
        """What to sample from: float32 [slices, V/R] logits under the mask of each slice and the rules of its row.

        `logits` is left as it is, and is the answer where no slice has anything of the kind.
        """
        masks = {place: piece.mask for place, piece in enumerate(slices) if piece.mask is not None}
        ruled = [(place, rules) for place, piece in enumerate(slices) if (rules := self[piece.row].rules)]
        if not masks and not ruled:
            return logits
        shaped = logits.clone()
        if masks:
            apply_masks_(shaped, masks, self._share, self._device)
        for place, rules in ruled:
            for rule in rules:
                rule.apply_(shaped[place])
        return shaped

    def sampled(self, rows: Sequence[int], token_ids: Tensor) -> None:
        """The rules of these rows learn what they have sampled, int64 [rows]."""
        for place, row in enumerate(rows):
            for rule in self[row].rules:
                rule.sampled(token_ids[place])
