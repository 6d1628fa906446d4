"""How a decode step gets its inputs and hands out its tokens without a word of the host's in between.

The host writes a step's columns into pinned memory, the step begins by reading them there and ends by writing what it
sampled there. `turn` counts the steps: those of even and of odd number use different halves, so the host may write the
next step's inputs while this one runs. A captured graph holds both ends, and is therefore one launch a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from peg.kernels.device import on_cpu
from peg.kernels.ordering import key_ids

TOKEN, POSITION, ROW, TEMPERATURE, NOISE_0, NOISE_1, FIRST_SLOT = range(7)
"""The columns of an inbox. A token of −1 stands for what its row sampled last; the temperature is float32 bits."""


@dataclass(frozen=True, slots=True)
class Mailbox:
    """inbox int64 [2, columns, rows] and outbox int64 [2, rows], in pinned memory; turn int32 [1], on the device."""

    inbox: Tensor
    outbox: Tensor
    turn: Tensor


@dataclass(frozen=True, slots=True)
class RowState:
    """What rows keep on the device: last_tokens int64 [rows], tables int32 [groups, rows, W] of block ids."""

    last_tokens: Tensor
    tables: Tensor


@dataclass(frozen=True, slots=True)
class DecodeColumns:
    """One step of S slices of one token, on the device.

    token_ids, positions, rows int64 [S]; context_lens int32 [S]; temperatures float32 [S]; noise int64 [S, 2]; slots
    int64 [groups, S].
    """

    token_ids: Tensor
    positions: Tensor
    rows: Tensor
    context_lens: Tensor
    temperatures: Tensor
    noise: Tensor
    slots: Tensor


def take_in(mailbox: Mailbox, state: RowState, columns: DecodeColumns, block_size: int) -> None:
    """Read the first S entries of this turn's inbox into `columns`.

    Each row's table gets the block that its token's slot lies in.
    """
    if not on_cpu("take_in", mailbox.turn):
        _take_in(mailbox, state, columns, block_size)
        return
    S = len(columns.rows)
    inbox = mailbox.inbox[int(mailbox.turn) & 1, :, :S]
    columns.rows.copy_(inbox[ROW])
    columns.positions.copy_(inbox[POSITION])
    columns.context_lens.copy_(inbox[POSITION] + 1)
    columns.token_ids.copy_(torch.where(inbox[TOKEN] < 0, state.last_tokens[inbox[ROW]], inbox[TOKEN]))
    columns.temperatures.copy_(inbox[TEMPERATURE].int().view(torch.float32))
    columns.noise.copy_(inbox[NOISE_0 : NOISE_1 + 1].T)
    columns.slots.copy_(inbox[FIRST_SLOT:])
    state.tables[:, inbox[ROW], inbox[POSITION] // block_size] = (inbox[FIRST_SLOT:] // block_size).int()


def hand_out(mailbox: Mailbox, state: RowState, rows: Tensor, keys: Tensor | None) -> None:
    """End a turn: keys int64 [S] go to the outbox, and their ids to the last tokens of `rows`; None: there are none."""
    if not on_cpu("hand_out", mailbox.turn):
        _hand_out(mailbox, state, rows, keys)
        return
    if keys is not None:
        mailbox.outbox[int(mailbox.turn) & 1, : len(keys)] = keys
        state.last_tokens[rows] = key_ids(keys)
    mailbox.turn.add_(1)


@triton.jit
def _take_in_kernel(
    p_inbox, p_turn, p_last, p_tables, p_ids, p_positions, p_rows, p_lens, p_temperatures, p_noise, p_slots,
    S, stride_turn, stride_column, stride_group, stride_row,
    GROUPS: tl.constexpr, B: tl.constexpr, FIRST_SLOT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program. What lies in pinned memory changes under it from launch to launch, so nothing of it is cached."""
    o_s = tl.arange(0, BLOCK)
    inside = o_s < S
    p_inbox += (tl.load(p_turn) & 1) * stride_turn + o_s
    token = tl.load(p_inbox, mask=inside, other=0, cache_modifier=".cv")
    position = tl.load(p_inbox + stride_column, mask=inside, other=0, cache_modifier=".cv")
    row = tl.load(p_inbox + 2 * stride_column, mask=inside, other=0, cache_modifier=".cv")
    bits = tl.load(p_inbox + 3 * stride_column, mask=inside, other=0, cache_modifier=".cv")
    noise_0 = tl.load(p_inbox + 4 * stride_column, mask=inside, other=0, cache_modifier=".cv")
    noise_1 = tl.load(p_inbox + 5 * stride_column, mask=inside, other=0, cache_modifier=".cv")
    last = tl.load(p_last + row, mask=inside, other=0)
    tl.store(p_ids + o_s, tl.where(token < 0, last, token), mask=inside)
    tl.store(p_positions + o_s, position, mask=inside)
    tl.store(p_rows + o_s, row, mask=inside)
    tl.store(p_lens + o_s, (position + 1).to(tl.int32), mask=inside)
    tl.store(p_temperatures + o_s, bits.to(tl.int32).to(tl.float32, bitcast=True), mask=inside)
    tl.store(p_noise + 2 * o_s, noise_0, mask=inside)
    tl.store(p_noise + 2 * o_s + 1, noise_1, mask=inside)
    for group in tl.static_range(GROUPS):
        slot = tl.load(p_inbox + (FIRST_SLOT + group) * stride_column, mask=inside, other=0, cache_modifier=".cv")
        tl.store(p_slots + group * S + o_s, slot, mask=inside)
        p_entry = p_tables + group * stride_group + row * stride_row + position // B
        tl.store(p_entry, (slot // B).to(tl.int32), mask=inside)


@triton.jit
def _hand_out_kernel(p_outbox, p_turn, p_last, p_rows, p_keys, S, stride_turn, KEYS: tl.constexpr, BLOCK: tl.constexpr):
    turn = tl.load(p_turn)
    if KEYS:
        o_s = tl.arange(0, BLOCK)
        inside = o_s < S
        key = tl.load(p_keys + o_s, mask=inside, other=0)
        tl.store(p_outbox + (turn & 1) * stride_turn + o_s, key, mask=inside)
        tl.store(p_last + tl.load(p_rows + o_s, mask=inside, other=0), 0xFFFFFFFF - (key & 0xFFFFFFFF), mask=inside)
    tl.debug_barrier()  # before the turn changes, every thread has read it
    tl.store(p_turn, turn + 1)


def _take_in(mailbox: Mailbox, state: RowState, columns: DecodeColumns, block_size: int) -> None:
    inbox, tables, S = mailbox.inbox, state.tables, len(columns.rows)
    assert columns.slots.is_contiguous(), columns.slots.stride()
    _take_in_kernel[(1,)](
        inbox, mailbox.turn, state.last_tokens, tables,
        columns.token_ids, columns.positions, columns.rows, columns.context_lens, columns.temperatures, columns.noise,
        columns.slots, S, inbox.stride(0), inbox.stride(1), tables.stride(0), tables.stride(1),
        len(tables), block_size, FIRST_SLOT, triton.next_power_of_2(S),
    )  # fmt: skip


def _hand_out(mailbox: Mailbox, state: RowState, rows: Tensor, keys: Tensor | None) -> None:
    outbox, S = mailbox.outbox, len(rows)
    _hand_out_kernel[(1,)](
        outbox, mailbox.turn, state.last_tokens, rows, rows if keys is None else keys, S, outbox.stride(0),
        keys is not None, triton.next_power_of_2(S),
    )  # fmt: skip
