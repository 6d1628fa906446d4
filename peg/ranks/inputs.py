"""From a plan to what the model reads. Everything comes from the rank's own rows, not from the plan's word."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
from torch import Tensor

from peg.errors import RankDiverged
from peg.models.inputs import GroupInputs, StepInputs
from peg.plan import StepPlan
from peg.ranks.device import Device, HostArray
from peg.ranks.tables import RowTables


@dataclass(frozen=True, slots=True)
class HostInputs:
    """`StepInputs` before they go to the device: arrays of the same names, dtypes and shapes.

    The tokens at `waiting_places` are what the rows `waiting_rows` sampled last, both int64: the device knows them.
    """

    token_ids: HostArray
    positions: HostArray
    query_starts: HostArray
    context_lens: HostArray
    slots: tuple[HostArray, ...]
    tables: tuple[HostArray, ...]
    waiting_places: HostArray
    waiting_rows: HostArray

    def upload(self, device: Device, last_tokens: Tensor) -> StepInputs:
        """All in one piece; `last_tokens` int64 [rows] is on the device already."""
        waiting = (self.waiting_places, self.waiting_rows) if len(self.waiting_rows) else ()
        arrays = (self.token_ids, self.positions, self.query_starts, self.context_lens)
        there = iter(device.upload((*arrays, *self.slots, *self.tables, *waiting)))
        token_ids, positions, query_starts, context_lens = (next(there) for _ in arrays)
        slots, tables = [next(there) for _ in self.slots], [next(there) for _ in self.tables]
        if waiting:
            token_ids.index_copy_(0, next(there), last_tokens.index_select(0, next(there)))
        return StepInputs(
            token_ids=token_ids,
            positions=positions,
            query_starts=query_starts,
            context_lens=context_lens,
            groups=tuple(map(GroupInputs, slots, tables)),
            query_lens=tuple(np.diff(self.query_starts).tolist()),
            context_lens_host=tuple(self.context_lens.tolist()),
        )


def lay_out(plan: StepPlan, tables: RowTables, block_size: int) -> HostInputs:
    """The inputs of a step whose row and table changes were applied.

    Raises RankDiverged where a slice does not begin where its row ends.
    """
    slices = plan.slices
    rows = np.array([piece.row for piece in slices])
    counts = np.array([piece.count for piece in slices])
    stored = tables.stored[rows]
    planned = np.array([piece.start for piece in slices])
    if not np.array_equal(stored, planned):
        at = int(np.flatnonzero(stored != planned)[0])
        raise RankDiverged(
            f"step {plan.step}: the slice of row {rows[at]} begins at {planned[at]}, the row has stored {stored[at]}"
        )
    query_starts: HostArray = np.zeros(len(slices) + 1, np.int32)
    np.cumsum(counts, out=query_starts[1:])
    contexts = stored + counts
    positions = np.arange(query_starts[-1]) + np.repeat(stored - query_starts[:-1], counts)
    token_rows = np.repeat(rows, counts)
    width = -(-int(contexts.max()) // block_size)
    ids = chain.from_iterable((0,) if piece.token_ids is None else piece.token_ids for piece in slices)
    waiting = [index for index, piece in enumerate(slices) if piece.token_ids is None]
    return HostInputs(
        token_ids=np.fromiter(ids, np.int64, int(query_starts[-1])),
        positions=positions,
        query_starts=query_starts,
        context_lens=contexts.astype(np.int32),
        slots=tuple(
            blocks[token_rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
            for blocks in tables.blocks
        ),
        tables=tuple(blocks[rows, :width] for blocks in tables.blocks),
        waiting_places=query_starts[waiting].astype(np.int64),
        waiting_rows=rows[waiting],
    )
