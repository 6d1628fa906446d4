"""Anything that may happen to the scheduler, in any order, over a device that notices what is wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from peg.errors import InvalidRequest, QueueFull
from peg.plan import FinishReason, GroupCapacity, Recurrent, SequenceRequest, SlidingWindow, StepPlan
from peg.sched.limits import SchedulerLimits
from tests.unit.sched_device import EOS, FakeGroup, continuation, full, limits, recurrent, request, sliding

LAYOUTS = ("full", "sliding", "both", "two windows", "full and recurrent", "recurrent")


@st.composite
def some_limits(draw: st.DrawFn) -> SchedulerLimits:
    """Pools in which one sequence fits and several do not, and small budgets."""
    size = draw(st.integers(1, 4))
    blocks = st.integers(-(-36 // size), -(-56 // size)).map(lambda count: count + 2)
    window = st.integers(1, 9)
    layouts: dict[str, tuple[GroupCapacity, ...]] = {
        "full": (full(draw(blocks)),),
        "sliding": (sliding(draw(blocks), draw(window)),),
        "both": (sliding(draw(blocks), draw(window)), full(draw(blocks))),
        "two windows": (sliding(draw(blocks), draw(window)), sliding(draw(blocks), draw(window))),
        "full and recurrent": (full(draw(blocks)), recurrent()),
        "recurrent": (recurrent(),),
    }
    return limits(
        *layouts[draw(st.sampled_from(LAYOUTS))],
        block_size=size,
        rows=draw(st.sampled_from((1, 2, 3, 4, 5, 5, 6, 6))),
        budget=draw(st.integers(1, 24)),
        context=48,
        queued=draw(st.sampled_from((*[None] * 6, 0, 3))),
        max_in_flight=draw(st.sampled_from((1, 2, 2))),
    )


@dataclass
class Expected:
    """What the machine knows of one admitted sequence."""

    request: SequenceRequest
    stop_after: int | None  # the stop matcher says yes at this token
    fed: list[int] = field(default_factory=list)

    def feed(self, token: int) -> bool:
        self.fed.append(token)
        return len(self.fed) == self.stop_after

    def ending(self) -> tuple[tuple[int, ...], FinishReason]:
        """All its tokens and its terminal, if nobody cancels it and nothing fails."""
        wanted = self.request.max_tokens
        most = 48 - len(self.request.prompt_ids) if wanted is None else wanted
        tokens = continuation(self.request.prompt_ids, most)
        for count, token in enumerate(tokens, start=1):
            if (token == EOS and not self.request.ignore_eos) or count == self.stop_after:
                return tokens[:count], FinishReason.STOP
        return tokens, FinishReason.LENGTH


class SchedulerMachine(RuleBasedStateMachine):
    """Admit, plan, commit, cancel, fail: what must always be true is looked at after each."""

    @initialize(chosen=some_limits())
    def start(self, chosen: SchedulerLimits) -> None:
        self.limits = chosen
        self.group = FakeGroup(chosen)
        self.scheduler = self.group.scheduler
        self.expected: dict[int, Expected] = {}
        self.rejected = 0
        self.named: dict[int, tuple[set[tuple[int, int]], set[int]]] = {}  # by step: (group, block) and rows

    @rule(
        copies=st.integers(1, 3),
        prompt=st.lists(st.integers(1, 10), min_size=1, max_size=16).map(tuple),
        max_tokens=st.sampled_from((*range(25), 20, 20, 20, 20, None)),
        ignore_eos=st.sampled_from((True, True, True, False)),
        stop_after=st.sampled_from((*range(1, 13), *[None] * 12)),
        prompt_logprobs=st.sampled_from((None, None, 0, 2)),
        constrained=st.sampled_from((False, False, False, True)),
    )
    def admit(
        self,
        copies: int,
        prompt: tuple[int, ...],
        max_tokens: int | None,
        ignore_eos: bool,
        stop_after: int | None,
        prompt_logprobs: int | None,
        constrained: bool,
    ) -> None:
        wanted = request(prompt, max_tokens, ignore_eos=ignore_eos, prompt_logprobs=prompt_logprobs)
        for _ in range(copies):
            expected = Expected(wanted, stop_after)
            try:
                seq_id = self.group.admit(wanted, constrained=constrained, feed=expected.feed)
            except (InvalidRequest, QueueFull):
                self.rejected += 1
            else:
                self.expected[seq_id] = expected

    @rule(steps=st.integers(2, 12))
    def run_on(self, steps: int) -> None:
        """Both steps out, the older committed, and so on: what the engine does when nothing happens."""
        for _ in range(steps):
            for _ in range(self.limits.max_in_flight):
                self.plan()
            if self.group.out:
                self.commit()
            for seq_id in sorted(self.group.masks_due):
                self.group.allow(seq_id)

    @rule()
    def plan(self) -> None:
        running = [sequence.seq_id for sequence in self.scheduler._queues.running]
        flying = len(self.group.out)
        plan = self.group.issue()
        still = {sequence.seq_id for sequence in self.scheduler._queues.running}
        if not still.issuperset(running):
            assert flying == 0, "somebody was preempted while a step was out"
            kept = [seq_id for seq_id in running if seq_id in still]
            assert kept == running[: len(kept)], "it was not the newest who went"
            assert plan is not None
            assert running[0] in {piece.seq_id for piece in plan.slices}, "the oldest did not get on"
        if plan is not None:
            self.check_plan(plan)

    def check_plan(self, plan: StepPlan) -> None:
        assert 0 < plan.num_tokens <= self.limits.max_num_batched_tokens
        assert len(self.group.out) <= self.limits.max_in_flight
        assert max(Counter(piece.seq_id for piece in plan.slices).values()) == 1
        open_sequences = {sequence.seq_id: sequence for sequence in self.scheduler._ledger.open}
        blocks: set[tuple[int, int]] = set()
        for piece in plan.slices:
            sequence = open_sequences[piece.seq_id]
            most = sequence.prompt_len + max(sequence.max_tokens, 1) - 1
            assert piece.start + piece.count <= most, "planned past max_tokens or the context"
            if piece.token_ids is None:
                assert not sequence.constrained, "a constrained sequence was planned ahead of its commit"
            for group, table in enumerate(sequence.tables.tables):
                blocks |= {(group, block) for block in table[sequence.tables.passed[group] :]}
        self.named[plan.step] = blocks, {piece.row for piece in plan.slices}

    @precondition(lambda self: self.group.out)
    @rule()
    def commit(self) -> None:
        self.group.answer()
        self.nothing_that_a_step_names_is_in_a_pool()

    @precondition(lambda self: self.group.masks_due)
    @rule(data=st.data())
    def allow(self, data: st.DataObject) -> None:
        self.group.allow(data.draw(st.sampled_from(sorted(self.group.masks_due))))

    @precondition(lambda self: self.group.out)
    @rule(newcomer=st.booleans(), cancel=st.booleans())
    def fail(self, newcomer: bool, cancel: bool) -> None:
        """The oldest step fails, with one behind it if possible: newcomers and those who end are in that too."""
        if newcomer:
            self.admit(1, (1, 2, 3, 4, 5), 20, True, None, 0, False)
        self.plan()
        if cancel:
            self.group.cancel(self.group.out[-1].slices[-1].seq_id)
        hit = {piece.seq_id for piece in self.group.out[0].slices} - set(self.group.terminals)
        ended = set(self.group.terminals)
        self.group.fail()
        assert set(self.group.terminals) - ended == hit, "exactly the sequences of the step pay for it"

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        still_open = sorted(set(self.expected) - set(self.group.terminals))
        seq_id = data.draw(st.sampled_from(still_open or sorted(self.expected)))
        assert (self.group.cancel(seq_id) is None) == (not still_open)
        assert self.group.cancel(seq_id) is None, "a second terminal"

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        memory = self.scheduler._memory
        for group, pool in memory._pools.items():
            places = Counter(pool._free)
            for sequence in self.scheduler._queues.running:
                places.update(sequence.tables.tables[group][sequence.tables.passed[group] :])
            for issued in self.scheduler._flight._out:
                places.update(block for where, ids in issued.blocks for block in ids if where == group)
            assert places == Counter(range(1, pool.num_blocks)), f"group {group}: {places}"
            assert pool.used_blocks + pool.free_blocks == pool.num_blocks - 1

    @invariant()
    def every_row_is_in_one_place(self) -> None:
        places = Counter(self.scheduler._rows._free)
        places.update(sequence.row for sequence in self.scheduler._queues.running)
        for issued in self.scheduler._flight._out:
            places.update(issued.rows)
        assert places == Counter(range(self.limits.max_num_seqs)), places

    @invariant()
    def nothing_that_a_step_names_is_in_a_pool(self) -> None:
        free_rows = set(self.scheduler._rows._free)
        free = {(group, block) for group, pool in self.scheduler._memory._pools.items() for block in pool._free}
        for plan in self.group.out:
            blocks, rows = self.named[plan.step]
            assert not blocks & free, f"step {plan.step} is out and names {blocks & free}"
            assert not rows & free_rows, f"step {plan.step} is out and names rows {rows & free_rows}"

    @invariant()
    def windows_are_released_by_the_committed_frontier(self) -> None:
        size = self.limits.block_size
        for sequence in self.scheduler._queues.running:
            for group, capacity in enumerate(self.limits.groups):
                passed = 0
                if isinstance(capacity.group, SlidingWindow):
                    passed = sum((b + 1) * size + capacity.group.window <= sequence.committed for b in range(64))
                table = sequence.tables.tables[group]
                assert [block != 0 for block in table] == [place >= passed for place in range(len(table))]
                if not isinstance(capacity.group, Recurrent):
                    assert len(table) * size >= sequence.planned

    @invariant()
    def the_books_are_right(self) -> None:
        stats = self.scheduler.stats()
        ended = Counter(update.terminal.reason for update in self.group.terminals.values() if update.terminal)
        ended[FinishReason.REJECTED] = self.rejected
        assert stats.counters.finished == {reason: ended[reason] for reason in FinishReason}
        assert stats.counters.admitted == len(self.expected)
        assert stats.running + stats.waiting == len(self.expected) - len(self.group.terminals)
        assert stats.counters.generated_tokens == sum(map(len, self.group.tokens.values()))
        assert stats.counters.failed_steps == self.group.failures
        for seq_id, update in self.group.terminals.items():
            assert update.terminal is not None
            assert update.terminal.completion_tokens == len(self.group.tokens[seq_id])
            assert update.terminal.prompt_tokens == len(self.expected[seq_id].request.prompt_ids)

    @invariant()
    def everyone_got_the_tokens_of_a_run_alone(self) -> None:
        for seq_id, expected in self.expected.items():
            got = tuple(self.group.tokens[seq_id])
            all_tokens, reason = expected.ending()
            assert got == all_tokens[: len(got)]
            asked = expected.request.prompt_logprobs is not None
            scored = tuple(entry.token_id for entry in self.group.prompt_logprobs[seq_id])
            assert scored == (expected.request.prompt_ids[1 : len(scored) + 1] if asked else ())
            update = self.group.terminals.get(seq_id)
            if update is None or update.terminal is None:
                continue
            assert expected.fed == [*got][: len(expected.fed)]
            if update.terminal.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert (got, update.terminal.reason) == (all_tokens, reason)
                assert len(scored) == (len(expected.request.prompt_ids) - 1 if asked else 0)

    def teardown(self) -> None:
        """Whatever happened: as long as steps are committed, everyone comes to an end and gives everything back."""
        if hasattr(self, "group"):
            self.group.finish()
            assert set(self.group.terminals) == set(self.expected)
            self.the_books_are_right()
            self.everyone_got_the_tokens_of_a_run_alone()


# `initialize` runs before the first invariant, so each of them finds a scheduler.
TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
