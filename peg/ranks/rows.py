"""What each row on one rank samples by: its parameters, its tokens so far, and the last one where the device has it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from peg.plan import SamplingParams, StepPlan


@dataclass(slots=True)
class Row:
    """One row in use. `prompt_ids` and `output_ids` are as the plan that brought it had them, `sampled` came since."""

    params: SamplingParams
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sampled: list[int] = field(default_factory=list)


class SamplingRows:
    """The sampling rows of one rank. Owned by the rank's thread.

    `last_tokens` int64 [rows] is what each row sampled last; a plan's placeholders stand for it.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._rows: list[Row | None] = [None] * num_rows

    def apply(self, plan: StepPlan) -> None:
        """Released rows, then new rows."""
        for row in plan.released_rows:
            self._rows[row] = None
        for new in plan.new_rows:
            self._rows[new.row] = Row(new.params, new.prompt_ids, new.output_ids)

    def __getitem__(self, row: int) -> Row:
        found = self._rows[row]
        assert found is not None, f"row {row} is not in use"
        return found
