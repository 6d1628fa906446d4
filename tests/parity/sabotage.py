"""Ways to break a group of ranks so that nothing is raised: what the gates are there to see.

Each holds until its monkeypatch is undone, and leaves a single rank alone where it does not say otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any, TypeAlias

import pytest
from torch import Tensor

import peg.ranks.group
import peg.ranks.runner
from peg.kernels.norm import rms_norm_add_rms_norm_, rms_norm_fp32
from peg.models.heads import HeadShare, share_heads
from peg.plan import StepPlan
from peg.ranks.inputs import HostInputs, lay_out
from peg.ranks.nccl_comm import NcclComm
from peg.ranks.tables import RowTables
from peg.ranks.thread_comm import ThreadComm

GroupComm: TypeAlias = ThreadComm | NcclComm
When = Callable[[HostInputs], bool]


def always(inputs: HostInputs) -> bool:
    return True


def in_decode(inputs: HostInputs) -> bool:
    """Steps that prefill nothing."""
    return len(inputs.token_ids) == len(inputs.context_lens)


def in_batches(inputs: HostInputs) -> bool:
    """Steps of several sequences."""
    return len(inputs.context_lens) > 1


def far_out(inputs: HostInputs) -> bool:
    """Steps of a sequence with over 100 tokens."""
    return int(inputs.context_lens.max()) > 100


def skip_reduction(
    monkeypatch: pytest.MonkeyPatch, number: int = 1, when: When = always, kind: type[GroupComm] = ThreadComm
) -> None:
    """Leave one reduction of each forward out on every rank; number 0 is the embedding's."""
    step = threading.local()

    def reduce(comm: GroupComm, tensor: Tensor) -> bool:
        step.number = getattr(step, "number", number) + 1
        return step.number != number + 1 or not step.hit

    _watch_steps(monkeypatch, step, when)
    _reduce_only(monkeypatch, step, reduce, kind)


def spoil(monkeypatch: pytest.MonkeyPatch, number: int = 1, kind: type[GroupComm] = ThreadComm) -> None:
    """Put a NaN into what one rank adds to one reduction of each forward."""
    step = threading.local()

    def reduce(comm: GroupComm, tensor: Tensor) -> bool:
        step.number = getattr(step, "number", number) + 1
        if step.number == number + 1 and comm.rank == comm.world_size - 1:
            tensor[-1, 0] = float("nan")
        return True

    _watch_steps(monkeypatch, step, always)
    _reduce_only(monkeypatch, step, reduce, kind)


def reduce_late(monkeypatch: pytest.MonkeyPatch, model: ModuleType) -> None:
    """Move every reduction of Gemma 3's layers behind the norm that follows it."""
    step = threading.local()
    reduced = ThreadComm.all_reduce_

    def reduce(comm: ThreadComm, tensor: Tensor) -> bool:
        step.number = getattr(step, "number", 0) + 1
        step.pending = None if step.number == 1 else (comm, tensor)
        return step.pending is None

    def norm(x: Tensor, residual: Tensor, weight: Tensor, next_weight: Tensor, eps: float) -> Tensor:
        pending, step.pending = getattr(step, "pending", None), None
        if pending is None or pending[1] is not x:
            return rms_norm_add_rms_norm_(x, residual, weight, next_weight, eps)
        normed = rms_norm_fp32(x, weight, eps)
        reduced(pending[0], normed)
        residual.add_(normed)
        return rms_norm_fp32(residual, next_weight, eps)

    _watch_steps(monkeypatch, step, always)
    _reduce_only(monkeypatch, step, reduce)
    monkeypatch.setattr(model, "rms_norm_add_rms_norm_", norm)


def shift_heads(monkeypatch: pytest.MonkeyPatch, model: ModuleType) -> None:
    """Let the last rank load the query heads from one before its own on."""

    def shifted(query_heads: int, kv_heads: int, world_size: int, rank: int = 0) -> HeadShare:
        share = share_heads(query_heads, kv_heads, world_size, rank)
        return replace(share, first_query=share.first_query - (rank > 0 and rank == world_size - 1))

    monkeypatch.setattr(model, "share_heads", shifted)


def swap_blocks(monkeypatch: pytest.MonkeyPatch, when: When = always, *, alone: bool = False) -> None:
    """Let the first and the last entry of each block table change places where attention reads it.

    On every rank of several, or with `alone` on a single one.
    """

    def swapped(plan: StepPlan, tables: RowTables, block_size: int) -> HostInputs:
        inputs = lay_out(plan, tables, block_size)
        ranks = sum(thread.name.startswith("peg-rank-") for thread in threading.enumerate())
        if _is_real(plan) and (ranks == 1) is alone and when(inputs):
            for row, context in enumerate(inputs.context_lens):
                last = (int(context) - 1) // block_size
                for table in inputs.tables:
                    table[row, [0, last]] = table[row, [last, 0]]
        return inputs

    monkeypatch.setattr(peg.ranks.runner, "lay_out", swapped)


def _watch_steps(monkeypatch: pytest.MonkeyPatch, step: threading.local, when: When) -> None:
    """At each step of this thread: `number` starts from 0, `hit` is whether the fault strikes in it."""

    def watched(plan: StepPlan, tables: RowTables, block_size: int) -> HostInputs:
        inputs = lay_out(plan, tables, block_size)
        step.number, step.real, step.hit = 0, _is_real(plan), when(inputs)
        return inputs

    monkeypatch.setattr(peg.ranks.runner, "lay_out", watched)


def _is_real(plan: StepPlan) -> bool:
    """Not one of a rehearsal."""
    return plan.epoch >= 0


def _reduce_only(
    monkeypatch: pytest.MonkeyPatch,
    step: threading.local,
    wanted: Callable[[Any, Tensor], bool],
    kind: type[GroupComm] = ThreadComm,
) -> None:
    """Ask before each reduction of what layers computed; rehearsals and counting over a vocabulary go untouched."""
    reduce: Callable[[Any, Tensor], None] = kind.all_reduce_

    def asked(comm: GroupComm, tensor: Tensor) -> None:
        of_layers = tensor.is_floating_point() and tensor.dim() == 2 and getattr(step, "real", False)
        if not of_layers or wanted(comm, tensor):
            reduce(comm, tensor)

    monkeypatch.setattr(kind, "all_reduce_", asked)
