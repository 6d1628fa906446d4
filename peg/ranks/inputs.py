"""From a plan to what the model reads. Everything comes from the rank's own rows, not from the plan's word."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from torch import Tensor

from peg.errors import RankDiverged
from peg.models.inputs import GroupInputs, StepInputs
from peg.plan import StepPlan
from peg.ranks.tables import RowTables


def build_inputs(plan: StepPlan, tables: RowTables, last_tokens: Tensor, block_size: int) -> StepInputs:
    """The inputs of a step whose row and table changes were applied.

    last_tokens int64 [rows] is what each row sampled last: it replaces the placeholders. Raises RankDiverged where a
    slice does not begin where its row ends.
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
    query_starts = np.zeros(len(slices) + 1, np.int32)
    np.cumsum(counts, out=query_starts[1:])
    contexts = stored + counts
    positions = np.arange(query_starts[-1]) + np.repeat(stored - query_starts[:-1], counts)
    token_rows = np.repeat(rows, counts)
    width = -(-int(contexts.max()) // block_size)
    return StepInputs(
        token_ids=_token_ids(plan, query_starts, last_tokens),
        positions=torch.from_numpy(positions),
        query_starts=torch.from_numpy(query_starts),
        context_lens=torch.from_numpy(contexts.astype(np.int32)),
        groups=tuple(
            GroupInputs(
                slots=torch.from_numpy(
                    blocks[token_rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
                ),
                tables=torch.from_numpy(blocks[rows, :width]),
            )
            for blocks in tables.blocks
        ),
        query_lens=tuple(counts.tolist()),
        context_lens_host=tuple(contexts.tolist()),
    )


def padding_inputs(tokens: int, num_groups: int, block_size: int) -> StepInputs:
    """One sequence of padding tokens in the reserved block, to warm up with; `tokens` may not exceed a block."""
    assert tokens <= block_size, (tokens, block_size)
    positions = torch.arange(tokens)
    group = GroupInputs(slots=positions, tables=torch.zeros(1, 1, dtype=torch.int32))
    return StepInputs(
        token_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=positions,
        query_starts=torch.tensor([0, tokens], dtype=torch.int32),
        context_lens=torch.tensor([tokens], dtype=torch.int32),
        groups=(group,) * num_groups,
        query_lens=(tokens,),
        context_lens_host=(tokens,),
    )


def _token_ids(plan: StepPlan, query_starts: np.ndarray, last_tokens: Tensor) -> Tensor:
    """int64 [T]: the plan's ids, and on the device what the placeholders stand for."""
    ids = chain.from_iterable((0,) if piece.token_ids is None else piece.token_ids for piece in plan.slices)
    token_ids = torch.from_numpy(np.fromiter(ids, np.int64, int(query_starts[-1])))
    waiting = [index for index, piece in enumerate(plan.slices) if piece.token_ids is None]
    if waiting:
        places = torch.from_numpy(query_starts[waiting].astype(np.int64))
        rows = torch.tensor([plan.slices[index].row for index in waiting])
        token_ids.index_copy_(0, places, last_tokens.index_select(0, rows))
    return token_ids
