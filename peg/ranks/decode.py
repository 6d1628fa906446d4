"""Decode steps on a device that works by itself: padded to a few sizes, everything at fixed places, one launch each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from peg.kernels import mailbox as mail
from peg.kernels.mailbox import DecodeColumns, Mailbox, RowState, hand_out, take_in
from peg.models.comm import Communicator
from peg.models.inputs import GroupInputs, StepInputs
from peg.plan import StepPlan
from peg.ranks.cache import WriteDigest
from peg.ranks.capture import capture
from peg.ranks.device import Device, HostArray, Landing
from peg.ranks.inputs import HostInputs
from peg.ranks.sampling import Draw, noise_of
from peg.ranks.tables import RowTables

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_STEP = 64  # between larger sizes

Body = Callable[[StepInputs], Tensor]
"""The logits float32 [S, V/R] of a step's tokens."""

Pick = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From logits, temperatures float32 [S] and noise int64 [S, 2] to the order keys int64 [S] of one token a row."""


@dataclass(frozen=True, slots=True)
class DecodeSizes:
    """What the fixed places are made for. `rows` is the most slices in a step, `blocks` the length of a table."""

    rows: int
    groups: int
    blocks: int
    block_size: int
    vocab_share: int

    @property
    def batches(self) -> tuple[int, ...]:
        """The sizes that steps are padded to."""
        large = range(_SIZES[-1] + _STEP, self.rows + _STEP, _STEP)
        return (*(size for size in (*_SIZES, *large) if size < self.rows), self.rows)


@dataclass(frozen=True, slots=True)
class _Captured:
    """A captured step, and which layers stored K and V in it, each with the number of its group."""

    graph: torch.cuda.CUDAGraph
    writes: tuple[tuple[int, int], ...]


class Decoder:
    """One rank's decode steps, those in which every slice is one token that samples. Owned by the rank's thread.

    A step is the same function of the same padded inputs whether it is captured or not, so it gives the same bits.
    `logits` float32 [rows, V/R] are those of the last step that did not sample by itself. Row `rows` of the row state
    is nobody's: padding writes to it, and to block 0.
    """

    def __init__(self, sizes: DecodeSizes, device: Device, digest: WriteDigest, body: Body, pick: Pick) -> None:
        rows, groups, place = sizes.rows, sizes.groups, device.place
        self.sizes = sizes
        self.state = RowState(
            torch.zeros(rows + 1, dtype=torch.int64, device=place),
            torch.zeros(groups, rows + 1, sizes.blocks, dtype=torch.int32, device=place),
        )
        self.logits = torch.zeros(rows, sizes.vocab_share, device=place)
        self._device = device
        self._digest = digest
        self._body = body
        self._pick = pick
        pinned = place.type == "cuda"
        self._mailbox = Mailbox(
            torch.zeros(2, mail.FIRST_SLOT + groups, rows, dtype=torch.int64, pin_memory=pinned),
            torch.zeros(2, rows, dtype=torch.int64, pin_memory=pinned),
            torch.zeros(1, dtype=torch.int32, device=place),
        )
        self._inbox = self._mailbox.inbox.numpy()
        self._turn = 0
        self._tables = torch.zeros(groups, rows, sizes.blocks, dtype=torch.int32, device=place)
        self._inputs = {size: self._fixed(size) for size in sizes.batches}
        self._graphs: dict[tuple[int, bool], _Captured] = {}
        # All graphs share their memory, also those that are captured anew: it lasts as long as one graph is there.
        self._pool = torch.cuda.graph_pool_handle() if pinned else None
        self._anchor: torch.cuda.CUDAGraph | None = None
        self._stale: set[int] = set()

    # --- making -----------------------------------------------------------------------------------------

    def variants(self) -> Iterator[tuple[int, bool]]:
        """The largest first, since the others fit into its memory: how many rows, and whether it samples by itself."""
        for size in reversed(self.sizes.batches):
            yield size, True
            yield size, False

    def rehearse(self) -> None:
        """Run every variant once, on padding."""
        for size, samples in self.variants():
            self._fill(size, None, ())
            self._run(size, samples, ())

    def capture(self) -> None:
        """Capture every variant; each must have run before. No other rank may wait for the device meanwhile."""
        if self._anchor is None:
            self._anchor = capture(lambda: self._mailbox.turn.add_(0), self._pool)
        for size, samples in self.variants():
            graph = capture(lambda: self._run(size, samples, ()), self._pool)  # noqa: B023 (called at once)
            self._graphs[size, samples] = _Captured(graph, self._digest.writes)

    def replay_all(self) -> None:
        """Every graph once, on padding: what is made at the first replay is made now."""
        for size, samples in self.variants():
            if (captured := self._graphs.get((size, samples))) is not None:
                self._fill(size, None, ())
                captured.graph.replay()
                self._device.synchronize()

    def reset(self) -> None:
        """Give the graphs back: an abort of the communicator that they use returns only then."""
        for captured in self._graphs.values():
            captured.graph.reset()
        self._graphs.clear()

    def begin(self) -> None:
        """A new epoch: no row is in use, and no turn is under way."""
        self._stale.clear()
        self._turn = 0
        self._mailbox.turn.zero_()

    # --- a step -----------------------------------------------------------------------------------------

    def takes(self, plan: StepPlan) -> bool:
        """Whether the step is one of these."""
        return all(piece.count == 1 and piece.samples and not piece.targets for piece in plan.slices)

    def changed(self, plan: StepPlan, tables: RowTables, *, taken: bool) -> None:
        """Note which rows' tables are no longer what the device has; `taken` if the step is run here.

        Such a step itself enters the block that each of its tokens goes to.
        """
        self._stale.update(new.row for new in plan.new_rows)
        rows = {piece.row for piece in plan.slices} if taken else set()
        for change in plan.table_changes:
            next_index = int(tables.stored[change.row]) // self.sizes.block_size
            if change.row not in rows or change.index != next_index or len(change.block_ids) != 1:
                self._stale.add(change.row)

    def step(
        self,
        plan: StepPlan,
        host: HostInputs,
        tables: RowTables,
        draws: Sequence[Draw],
        comm: Communicator,
        *,
        samples: bool,
    ) -> None:
        """Launch one step. With `samples`, `landing` brings its keys; otherwise `logits` has what to sample from."""
        rows = [piece.row for piece in plan.slices]
        self._send_tables([row for row in rows if row in self._stale], tables)
        size = next(size for size in self.sizes.batches if size >= len(rows))
        self._fill(size, (rows, host), draws)
        captured = self._graphs.get((size, samples))
        if captured is None:
            self._run(size, samples, host.slots)
        else:
            comm.replay(captured.graph.replay)
            self._digest.replayed(captured.writes, host.slots)

    def landing(self, count: int) -> Landing:
        """The keys int64 [count] of the step just launched, once they are there."""
        return self._device.mark([self._mailbox.outbox[(self._turn - 1) & 1, :count]])

    def _send_tables(self, rows: Sequence[int], tables: RowTables) -> None:
        if not rows:
            return
        width = -(-int(tables.stored[rows].max() + 1) // self.sizes.block_size)
        parts = [blocks[rows, :width] for blocks in tables.blocks]
        there, *parts_there = self._device.upload((np.array(rows), *parts))
        for group, part in enumerate(parts_there):
            self.state.tables[group, :, :width].index_copy_(0, there, part)
        self._stale.difference_update(rows)

    def _fill(self, size: int, step: tuple[Sequence[int], HostInputs] | None, draws: Sequence[Draw]) -> None:
        """Write this turn's half of the inbox; what the step has fewer than `size` is padding."""
        inbox = self._inbox[self._turn & 1]
        self._turn += 1
        inbox[:, :size] = 0
        inbox[mail.ROW, :size] = self.sizes.rows
        if step is None:
            return
        rows, host = step
        count = len(rows)
        inbox[mail.TOKEN, :count] = host.token_ids
        inbox[mail.TOKEN, host.waiting_places] = -1
        inbox[mail.POSITION, :count] = host.positions
        inbox[mail.ROW, :count] = rows
        temperatures, noise = noise_of(draws)
        inbox[mail.TEMPERATURE, :count] = temperatures.view(np.int32)
        inbox[mail.NOISE_0 : mail.NOISE_1 + 1, :count] = noise.T
        for group, slots in enumerate(host.slots):
            inbox[mail.FIRST_SLOT + group, :count] = slots

    def _run(self, size: int, samples: bool, slots: Sequence[HostArray]) -> None:
        """The step itself; `slots` of its tokens on the host are what its digest is made of."""
        inputs, columns = self._inputs[size]
        take_in(self._mailbox, self.state, columns, self.sizes.block_size)
        if columns.context_lens.is_cpu:  # the references ask the host
            inputs = replace(inputs, context_lens_host=tuple(columns.context_lens.tolist()))
        for group, table in enumerate(self.state.tables):
            torch.index_select(table, 0, columns.rows, out=self._tables[group, :size])
        nothing = (np.zeros(0, np.int64),) * self.sizes.groups
        self._digest.begin(zip((group.slots for group in inputs.groups), slots or nothing, strict=True))
        logits = self._body(inputs)
        keys = None
        if samples:
            keys = self._pick(logits, columns.temperatures, columns.noise)
        else:
            self.logits[:size].copy_(logits)
        hand_out(self._mailbox, self.state, columns.rows, keys)

    def _fixed(self, size: int) -> tuple[StepInputs, DecodeColumns]:
        """The places of a step of this size."""
        place, groups = self._device.place, self.sizes.groups

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=place)

        columns = DecodeColumns(
            token_ids=zeros(size),
            positions=zeros(size),
            rows=zeros(size),
            context_lens=zeros(size, dtype=torch.int32),
            temperatures=zeros(size, dtype=torch.float32),
            noise=zeros(size, 2),
            slots=zeros(groups, size),
        )
        inputs = StepInputs(
            token_ids=columns.token_ids,
            positions=columns.positions,
            query_starts=torch.arange(size + 1, dtype=torch.int32, device=place),
            context_lens=columns.context_lens,
            groups=tuple(GroupInputs(columns.slots[group], self._tables[group, :size]) for group in range(groups)),
            query_lens=(1,) * size,
            context_lens_host=(self.sizes.blocks * self.sizes.block_size,) * size,
        )
        return inputs, columns
