"""A group of ranks that is not there: a list of plans, answered when told, over a cache of tagged slots.

Each slot of the simulated cache says whose token it holds, at which position, and which. A slice may write only to
blocks of its own table, and everything it can see must be what its own sequence wrote: a block that went back to a
pool too early, a table that a rank was not told of, or a row that was reused shows at the first read.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field

from peg.plan import (
    Full,
    GroupCapacity,
    NewRow,
    Recurrent,
    SamplingParams,
    SequenceRequest,
    Slice,
    SlidingWindow,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from peg.sched.limits import SchedulerLimits
from peg.sched.scheduler import Scheduler, Update

VOCAB = 12
EOS = 0
FORBIDDEN = 11


def full(num_blocks: int) -> GroupCapacity:
    return GroupCapacity(Full(layers=(0,), kv_heads=1, head_dim=4), num_blocks)


def sliding(num_blocks: int, window: int) -> GroupCapacity:
    return GroupCapacity(SlidingWindow(layers=(1,), kv_heads=1, head_dim=4, window=window), num_blocks)


def recurrent() -> GroupCapacity:
    return GroupCapacity(Recurrent(layers=(2,), state_bytes=64), 0)


def limits(
    *groups: GroupCapacity,
    block_size: int = 4,
    rows: int = 4,
    budget: int = 64,
    context: int = 256,
    queued: int | None = None,
    max_in_flight: int = 2,
) -> SchedulerLimits:
    return SchedulerLimits(
        block_size=block_size,
        groups=groups or (full(100),),
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        max_model_len=context,
        vocab_size=VOCAB,
        eos_token_ids=frozenset({EOS}),
        forbidden_token_ids=frozenset({FORBIDDEN}),
        max_num_queued_reqs=queued,
        max_in_flight=max_in_flight,
    )


def request(
    prompt: int | tuple[int, ...],
    max_tokens: int | None = 8,
    *,
    ignore_eos: bool = True,
    stop_token_ids: frozenset[int] = frozenset(),
    prompt_logprobs: int | None = None,
) -> SequenceRequest:
    """A request for a prompt of these ids, or of so many varied ones."""
    ids = prompt if isinstance(prompt, tuple) else tuple(1 + (7 * place + place // 5) % 10 for place in range(prompt))
    return SequenceRequest(
        request_id="r",
        prompt_ids=ids,
        sampling=SamplingParams(),
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        prompt_logprobs=prompt_logprobs,
    )


def next_token(tokens: tuple[int, ...]) -> int:
    """What the simulated model says after these tokens; it depends on nothing else."""
    return zlib.crc32(bytes(tokens)) % FORBIDDEN


def mask_after(tokens: int) -> bytes:
    """A mask that only fits a sequence of so many tokens, prompt included."""
    return tokens.to_bytes(4, "little")


def continuation(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What a sequence samples when nothing disturbs it."""
    tokens = prompt
    for _ in range(count):
        tokens += (next_token(tokens),)
    return tokens[len(prompt) :]


@dataclass
class Row:
    """What a rank knows of one row: told by the plans, except for the tokens it sampled itself."""

    seq_id: int
    tokens: list[int]
    tables: list[list[int]]
    stored: int = 0


@dataclass
class Device:
    """One simulated rank: rows, tables, caches."""

    limits: SchedulerLimits
    rows: dict[int, Row] = field(default_factory=dict)
    slots: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)

    def apply(self, plan: StepPlan) -> None:
        """Rows and tables, in the order that a plan promises."""
        for row in plan.released_rows:
            assert row in self.rows, f"row {row} is released, but was never taken"
            del self.rows[row]
        for new in plan.new_rows:
            self._take(new)
        for change in plan.table_changes:
            table = self.rows[change.row].tables[change.group]
            assert change.index == len(table), f"{change} leaves a gap or overwrites in a table of {len(table)}"
            table += change.block_ids

    def _take(self, new: NewRow) -> None:
        assert new.row not in self.rows, f"row {new.row} is taken twice"
        assert 0 <= new.row < self.limits.max_num_seqs
        assert len(new.tables) == len(self.limits.groups)
        tables = [list(table) for table in new.tables]
        self.rows[new.row] = Row(new.seq_id, [*new.prompt_ids, *new.output_ids], tables)

    def run(self, plan: StepPlan) -> StepResult:
        """Every slice writes its tokens, sees what it may see, and samples if it is to."""
        self.apply(plan)
        sampled: list[int] = []
        scored: list[tuple[TokenLogprobs, ...]] = []
        for piece in plan.slices:
            row = self.rows[piece.row]
            self._check(piece, row)
            self._write(piece, row)
            self._see(piece, row)
            scored.append(tuple(TokenLogprobs(token, -1.0, 1, ()) for token in piece.targets))
            assert piece.mask in (None, mask_after(len(row.tokens))), "the mask of another place"
            if piece.samples:
                assert piece.start + piece.count == len(row.tokens), "samples from another position than the last"
                row.tokens.append(next_token(tuple(row.tokens)))
                sampled.append(row.tokens[-1])
        return StepResult(plan.step, plan.epoch, tuple(sampled), (), tuple(scored))

    def spoil(self, plan: StepPlan) -> None:
        """The step fails half way: rows and tables are in, what its slices stored is worth nothing."""
        self.apply(plan)
        for piece in plan.slices:
            row = self.rows[piece.row]
            for place in range(piece.start, piece.start + piece.count):
                for slot in self._slots(row, place):
                    self.slots[slot] = (-1, -1, -1)

    def _check(self, piece: Slice, row: Row) -> None:
        assert row.seq_id == piece.seq_id, f"row {piece.row} belongs to sequence {row.seq_id}, not {piece.seq_id}"
        assert piece.start == row.stored, f"{piece} leaves a gap or overlaps: {row.stored} tokens are stored"
        there = row.tokens[piece.start : piece.start + piece.count]
        assert len(there) == piece.count, f"{piece} goes past the {len(row.tokens)} tokens that are known"
        if piece.token_ids is None:
            assert piece.count == 1
        else:
            assert list(piece.token_ids) == there, "the slice has other ids than the sequence"
        following = row.tokens[piece.start + 1 : piece.start + piece.count + 1]
        assert list(piece.targets) == following[: len(piece.targets)]

    def _write(self, piece: Slice, row: Row) -> None:
        for place in range(piece.start, piece.start + piece.count):
            for slot in self._slots(row, place):
                self.slots[slot] = (row.seq_id, place, row.tokens[place])
        row.stored = piece.start + piece.count

    def _see(self, piece: Slice, row: Row) -> None:
        for group, capacity in enumerate(self.limits.groups):
            if isinstance(capacity.group, Recurrent):
                continue
            window = capacity.group.window if isinstance(capacity.group, SlidingWindow) else piece.start + 1
            for place in range(max(0, piece.start - window + 1), piece.start + piece.count):
                slot = self._slot(row, group, place)
                assert self.slots.get(slot) == (row.seq_id, place, row.tokens[place]), (
                    f"sequence {row.seq_id} looks for position {place} in group {group} and finds {self.slots[slot]}"
                )

    def _slots(self, row: Row, place: int) -> list[tuple[int, int]]:
        paged = [group for group, c in enumerate(self.limits.groups) if not isinstance(c.group, Recurrent)]
        return [self._slot(row, group, place) for group in paged]

    def _slot(self, row: Row, group: int, place: int) -> tuple[int, int]:
        size = self.limits.block_size
        block = row.tables[group][place // size]
        assert 0 < block < self.limits.groups[group].num_blocks, f"block {block} of group {group}"
        return group, block * size + place % size


class FakeGroup:
    """Drives a scheduler: plans wait here until the test lets the device run them."""

    def __init__(self, scheduler_limits: SchedulerLimits) -> None:
        self.scheduler = Scheduler(scheduler_limits)
        self.device = Device(scheduler_limits)
        self.out: deque[StepPlan] = deque()
        self.lengths: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self.terminals: dict[int, Update] = {}
        self.failures = 0
        self.constrained: set[int] = set()
        self.masks_due: set[int] = set()

    def admit(self, wanted: SequenceRequest, *, constrained: bool = False, **more: object) -> int:
        mask = mask_after(len(wanted.prompt_ids)) if constrained else None
        seq_id = self.scheduler.admit(wanted, mask=mask, **more)  # type: ignore[arg-type]
        if constrained:
            self.constrained.add(seq_id)
        self.lengths[seq_id] = len(wanted.prompt_ids)
        self.tokens[seq_id] = []
        self.prompt_logprobs[seq_id] = []
        return seq_id

    def issue(self) -> StepPlan | None:
        """Ask for a plan; if there is one, it is out."""
        plan = self.scheduler.plan()
        if plan is not None:
            assert plan.failures_seen == self.failures
            for piece in plan.slices:
                assert (piece.mask is not None) == (piece.samples and piece.seq_id in self.constrained)
            self.out.append(plan)
        return plan

    def must_issue(self) -> StepPlan:
        plan = self.issue()
        assert plan is not None, "there is something to plan"
        return plan

    def answer(self) -> list[Update]:
        """The device runs the oldest step that is out, and the scheduler commits it."""
        return self.note(self.scheduler.commit(self.device.run(self.out.popleft())))

    def fail(self, message: str = "it failed") -> list[Update]:
        """The oldest step fails at the cost of its own sequences; the device skips what is out behind it."""
        plan = self.out.popleft()
        self.device.spoil(plan)
        self.failures += 1
        self.out.clear()
        return self.note(self.scheduler.fail_step(plan.step, message))

    def allow(self, seq_id: int) -> None:
        """The next mask of a constrained sequence is ready."""
        self.masks_due.remove(seq_id)
        self.scheduler.allow(seq_id, mask_after(self.lengths[seq_id] + len(self.tokens[seq_id])))

    def cancel(self, seq_id: int) -> Update | None:
        update = self.scheduler.cancel(seq_id)
        self.note([update] if update is not None else [])
        return update

    def note(self, updates: list[Update]) -> list[Update]:
        for update in updates:
            assert update.seq_id not in self.terminals, f"news of sequence {update.seq_id} after its terminal"
            self.tokens[update.seq_id] += update.token_ids
            self.prompt_logprobs[update.seq_id] += update.prompt_logprobs
            if update.terminal is not None:
                self.terminals[update.seq_id] = update
            elif update.token_ids and update.seq_id in self.constrained:
                self.masks_due.add(update.seq_id)
        return updates

    def finish(self, max_steps: int = 10_000) -> None:
        """Let everything run to its end, two steps out where possible."""
        for _ in range(max_steps):
            while self.issue() is not None:
                pass
            if not self.out and not self.masks_due:
                break
            if self.out:
                self.answer()
            for seq_id in sorted(self.masks_due):
                self.allow(seq_id)
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting) == (0, 0), f"nothing is out and nothing can be planned: {stats}"
        assert all(usage.used == 0 for usage in stats.groups), stats

    def used(self, group: int = 0) -> int:
        return self.scheduler.stats().groups[group].used
