"""What one step holds: decode before prefill, chunks under a budget, windows, scored prompts, paces."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from peg.plan import FinishReason, Slice, StepPlan, StepResult, TokenLogprobs
from peg.sched.blocks import BlockPool
from peg.sched.memory import KVMemory
from tests.unit.sched_device import EOS, FakeGroup, continuation, full, limits, next_token, request, sliding


def shape(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    return [(piece.seq_id, piece.start, piece.count, piece.samples) for piece in plan.slices]


def slices_of(group: FakeGroup, seq_id: int) -> list[Slice]:
    """Run everything to its end; the slices of one sequence."""
    found: list[Slice] = []
    while True:
        plan = group.issue()
        if plan is not None:
            found += [piece for piece in plan.slices if piece.seq_id == seq_id]
        elif group.out:
            group.answer()
        else:
            return found


def test_decode_goes_first_and_chunks_fill_the_budget_in_order() -> None:
    """One step mixes a token for each that decodes with chunks for those that prefill, first come first served."""
    group = FakeGroup(limits(rows=4, budget=10))
    for prompt in (4, 13, 9, 5):
        group.admit(request(prompt))
    assert shape(group.must_issue()) == [(0, 0, 4, True), (1, 0, 6, False)]
    assert shape(group.must_issue()) == [(0, 4, 1, True), (1, 6, 7, True), (2, 0, 2, False)]
    group.answer()
    assert shape(group.must_issue()) == [(0, 5, 1, True), (1, 13, 1, True), (2, 2, 7, True), (3, 0, 1, False)]
    group.answer()
    assert shape(group.must_issue()) == [(0, 6, 1, True), (1, 14, 1, True), (2, 9, 1, True), (3, 1, 4, True)]
    group.finish()


@pytest.mark.parametrize("budget", [1, 2, 7, 16, 64])
def test_the_text_is_the_same_for_every_chunk_size(budget: int) -> None:
    """Whatever the budget cuts, each sequence gets the tokens of a run alone, and no step is over the budget."""
    group = FakeGroup(limits(rows=4, budget=budget))
    for prompt in (3, 17, 9, 5, 30):
        group.admit(request(prompt, max_tokens=6))
    while (plan := group.issue()) is not None or group.out:
        if plan is None:
            group.answer()
        else:
            assert plan.num_tokens <= budget
    for seq_id, prompt in enumerate((3, 17, 9, 5, 30)):
        assert tuple(group.tokens[seq_id]) == continuation(request(prompt).prompt_ids, 6)


def test_nobody_is_planned_past_max_tokens() -> None:
    """With its last token still out, a sequence is not planned again; max_tokens 1 is one slice."""
    group = FakeGroup(limits())
    one, two = group.admit(request(4, max_tokens=1)), group.admit(request(4, max_tokens=2))
    assert [piece.seq_id for piece in group.must_issue().slices] == [one, two]
    assert [piece.seq_id for piece in group.must_issue().slices] == [two]
    group.answer()
    assert group.issue() is None
    group.finish()
    assert [len(group.tokens[seq_id]) for seq_id in (one, two)] == [1, 2]


def test_rows_are_taken_oldest_first_and_given_on() -> None:
    """With one row, sequences run one after the other in the order of arrival."""
    group = FakeGroup(limits(rows=1))
    ids = [group.admit(request(4, max_tokens=2)) for _ in range(3)]
    order: list[int] = []
    while (plan := group.issue()) is not None or group.out:
        if plan is None:
            group.answer()
        else:
            order += [new.seq_id for new in plan.new_rows]
    assert order == ids


def test_a_constrained_sequence_waits_for_its_mask_and_nobody_else_does() -> None:
    """It is planned only once its last token is committed and the mask after it is there; two steps stay out."""
    group = FakeGroup(limits())
    paced, free = group.admit(request(4, max_tokens=4), constrained=True), group.admit(request(4, max_tokens=7))
    assert shape(group.must_issue()) == [(paced, 0, 4, True), (free, 0, 4, True)]
    assert shape(group.must_issue()) == [(free, 4, 1, True)]
    group.answer()
    assert shape(group.must_issue()) == [(free, 5, 1, True)]
    group.answer()
    group.allow(paced)
    plan = group.must_issue()
    assert shape(plan) == [(paced, 4, 1, True), (free, 6, 1, True)]
    assert [piece.token_ids for piece in plan.slices] == [continuation(request(4).prompt_ids, 1), None]
    group.finish()
    assert tuple(group.tokens[paced]) == continuation(request(4).prompt_ids, 4)
    assert tuple(group.tokens[free]) == continuation(request(4).prompt_ids, 7)


def test_a_constrained_prompt_is_prefilled_two_chunks_ahead() -> None:
    """The mask is for what is sampled: chunks before that need none, and the last one has it."""
    group = FakeGroup(limits(budget=4))
    paced = group.admit(request(10, max_tokens=2), constrained=True)
    assert shape(group.must_issue()) == [(paced, 0, 4, False)]
    assert shape(group.must_issue()) == [(paced, 4, 4, False)]
    group.answer()
    assert shape(group.must_issue()) == [(paced, 8, 2, True)]
    group.answer()
    assert group.issue() is None
    group.finish()
    assert tuple(group.tokens[paced]) == continuation(request(10).prompt_ids, 2)


def test_a_preempted_sequence_waits_for_its_mask_outside() -> None:
    """Preempted between a token and its mask, it comes in again once the mask is there, for its last chunk."""
    group = FakeGroup(limits(full(7)))
    older, paced = group.admit(request(4, max_tokens=20)), group.admit(request(4, max_tokens=9), constrained=True)
    while not group.scheduler.stats().counters.preemptions:
        while group.issue() is not None:
            pass
        group.answer()
        if len(group.tokens[paced]) < 2 and paced in group.masks_due:
            group.allow(paced)
    assert paced in group.masks_due, "the mask is still being made"
    group.finish()
    assert tuple(group.tokens[older]) == continuation(request(4).prompt_ids, 20)
    assert tuple(group.tokens[paced]) == continuation(request(4).prompt_ids, 9)


@pytest.mark.parametrize("length", [7, 8, 9, 15, 16, 17])
def test_the_window_releases_a_block_at_its_edge_and_not_before(length: int) -> None:
    """Block b is given up once (b + 1)·B + window tokens are stored: at window - 1, window and window + 1."""
    size, window = 4, 4
    group = FakeGroup(limits(sliding(20, window), full(20), block_size=size))
    group.admit(request(length, max_tokens=4))
    group.must_issue()
    group.answer()
    held = -(-length // size) - max(0, (length - window) // size)
    assert (group.used(0), group.used(1)) == (held, -(-length // size))
    group.finish()


def test_a_long_prompt_holds_the_window_and_the_chunk() -> None:
    """A prompt of many chunks runs through a pool that holds the window, one chunk and a block, not the prompt."""
    group = FakeGroup(limits(sliding(8, window=8), block_size=4, budget=16, max_in_flight=1))
    seq_id = group.admit(request(200, max_tokens=3))
    most = 0
    while group.issue() is not None:
        most = max(most, group.used())
        group.answer()
    assert most == (8 + 16) // 4, "window and chunk"
    assert tuple(group.tokens[seq_id]) == continuation(request(200).prompt_ids, 3)


def test_two_steps_of_a_long_prompt_share_a_pool_for_one() -> None:
    """Where two chunks do not fit, the second is cut to what is there or waits: the prompt still gets through."""
    group = FakeGroup(limits(sliding(8, window=8), block_size=4, budget=16))
    group.admit(request(200, max_tokens=3))
    first, second = group.must_issue(), group.must_issue()
    assert (first.num_tokens, second.num_tokens) == (16, 12)
    group.finish()
    assert group.scheduler.stats().counters.preemptions == 0


def test_whole_tables_come_with_a_row_and_changes_after() -> None:
    """A full group's table is there for the whole prompt at once, a sliding one's grows with the chunks."""
    group = FakeGroup(limits(full(20), sliding(20, window=4), budget=8))
    group.admit(request(12, max_tokens=2))
    (new,) = group.must_issue().new_rows
    assert [len(table) for table in new.tables] == [3, 2]
    plan = group.must_issue()
    assert plan.new_rows == ()
    assert [(change.group, change.index, len(change.block_ids)) for change in plan.table_changes] == [(1, 2, 1)]
    group.finish()


def test_scored_prompts_have_targets_and_each_position_is_reported_once() -> None:
    """targets[i] is the prompt token after position i of the slice, the last has none, in every cut."""
    for budget in (1, 3, 5, 64):
        group = FakeGroup(limits(budget=budget))
        wanted = request(11, max_tokens=2, prompt_logprobs=3)
        seq_id = group.admit(wanted)
        pieces = slices_of(group, seq_id)
        targets = [target for piece in pieces for target in piece.targets]
        assert tuple(targets) == wanted.prompt_ids[1:]
        assert all(piece.prompt_logprobs == 3 for piece in pieces if piece.targets)
        assert [entry.token_id for entry in group.prompt_logprobs[seq_id]] == targets


def test_a_recomputed_prompt_is_not_scored_twice() -> None:
    """A scored sequence that is preempted comes back without targets for what was reported."""
    group = FakeGroup(limits(full(8), rows=2, budget=8))
    group.admit(request(11, max_tokens=12))
    wanted = request(7, max_tokens=12, prompt_logprobs=0)
    scored = group.admit(wanted)
    pieces = slices_of(group, scored)
    assert group.scheduler.stats().counters.preemptions > 0
    assert sum(piece.start == 0 for piece in pieces) > 1, "the prompt was computed more than once"
    assert sum(len(piece.targets) for piece in pieces) == 6
    assert tuple(entry.token_id for entry in group.prompt_logprobs[scored]) == wanted.prompt_ids[1:]
    assert group.scheduler.stats().counters.prompt_tokens == 18, "a prompt token counts once"


def test_a_prompt_preempted_in_the_middle_is_scored_once() -> None:
    """Positions that were committed before the preemption are kept, the others follow: none twice, none missing."""
    group = FakeGroup(limits(sliding(9, window=4), full(30), block_size=2, rows=2, budget=7))
    group.admit(request(6, max_tokens=20))
    wanted = request(20, max_tokens=2, prompt_logprobs=1)
    scored = group.admit(wanted)
    for _ in range(3):
        group.must_issue()
        group.answer()
    sequence = group.scheduler._ledger.open[1]
    assert 0 < sequence.committed < 20
    group.scheduler._planner._preempt(sequence)
    group.finish()
    assert tuple(entry.token_id for entry in group.prompt_logprobs[scored]) == wanted.prompt_ids[1:]
    assert group.scheduler.stats().counters.prompt_tokens == 26, "a prompt token counts once"


def test_scoring_alone_samples_nothing() -> None:
    """max_tokens 0 computes and scores the prompt and ends with LENGTH and no token."""
    group = FakeGroup(limits(budget=4))
    wanted = request(10, max_tokens=0, prompt_logprobs=1)
    seq_id = group.admit(wanted)
    assert not any(piece.samples for piece in slices_of(group, seq_id))
    terminal = group.terminals[seq_id].terminal
    assert terminal is not None
    assert (terminal.reason, terminal.completion_tokens) == (FinishReason.LENGTH, 0)
    assert tuple(entry.token_id for entry in group.prompt_logprobs[seq_id]) == wanted.prompt_ids[1:]


def fed_until(stop: Callable[[list[int]], bool]) -> tuple[list[int], Callable[[int], bool]]:
    fed: list[int] = []

    def feed(token: int) -> bool:
        fed.append(token)
        return stop(fed)

    return fed, feed


def test_a_stop_matcher_ends_a_sequence_at_its_token() -> None:
    """A matcher is told each committed token once; where it says yes, the sequence ends with STOP and that token."""
    fed, feed = fed_until(lambda tokens: len(tokens) == 3)
    group = FakeGroup(limits())
    seq_id = group.admit(request(4, max_tokens=9), feed=feed)
    group.finish()
    assert tuple(fed) == tuple(group.tokens[seq_id]) == continuation(request(4).prompt_ids, 3)
    terminal = group.terminals[seq_id].terminal
    assert terminal is not None
    assert (terminal.reason, terminal.completion_tokens, terminal.stop_token_id) == (FinishReason.STOP, 3, None)


def prompt_before_eos() -> tuple[int, ...]:
    """A prompt after which the simulated model says EOS."""
    return next((a, b) for a in range(1, 10) for b in range(1, 10) if next_token((a, b)) == EOS)


@pytest.mark.parametrize(("ignore_eos", "count"), [(False, 1), (True, 5)])
def test_the_models_own_stop_ids_end_a_sequence_unless_ignored(ignore_eos: bool, count: int) -> None:
    """EOS is the last token, counted and named; with ignore_eos it is a token like any other."""
    group = FakeGroup(limits())
    seq_id = group.admit(request(prompt_before_eos(), max_tokens=5, ignore_eos=ignore_eos))
    group.finish()
    terminal = group.terminals[seq_id].terminal
    assert terminal is not None
    assert (len(group.tokens[seq_id]), terminal.completion_tokens) == (count, count)
    assert terminal.stop_token_id == (None if ignore_eos else EOS)


def test_logprobs_go_with_their_tokens() -> None:
    """A step's logprobs, one for each slice that samples, reach the sequence that sampled there."""
    group = FakeGroup(limits(budget=6))
    group.admit(request(3))
    group.admit(request(9))
    group.admit(request(3))
    plan = group.must_issue()
    assert [piece.samples for piece in plan.slices] == [True, False]
    first = TokenLogprobs(5, -0.5, 1, ())
    updates = group.scheduler.commit(StepResult(plan.step, plan.epoch, (5,), (first,)))
    assert [(update.seq_id, update.token_ids, update.logprobs) for update in updates] == [(0, (5,), (first,))]


def test_a_block_given_back_twice_is_a_bug() -> None:
    """The pool counts holders: what nobody holds can't be given back, and what two hold is not free after one."""
    pool = BlockPool(4)
    blocks = pool.take(3)
    assert blocks == [1, 2, 3]
    assert (pool.free_blocks, pool.used_blocks) == (0, 3)
    pool.give([2])
    assert pool.take(1) == [2]
    pool.give(blocks)
    with pytest.raises(AssertionError, match="held by nobody"):
        pool.give([3])


def test_an_answer_for_another_step_is_a_bug() -> None:
    """Steps are committed in the order in which they were issued, of one epoch, with a token a sampling slice."""
    group = FakeGroup(limits())
    group.admit(request(3))
    plan = group.must_issue()
    with pytest.raises(AssertionError):
        group.scheduler.commit(StepResult(plan.step, plan.epoch + 1, (1,)))
    with pytest.raises(AssertionError):
        group.scheduler.commit(StepResult(plan.step + 1, plan.epoch, (1,)))
    group = FakeGroup(limits())
    group.admit(request(3))
    with pytest.raises(AssertionError):
        group.scheduler.commit(StepResult(group.must_issue().step, 0, (1, 2)))


def test_a_second_terminal_is_a_bug() -> None:
    """The ledger writes one terminal for each sequence and no more."""
    group = FakeGroup(limits())
    group.admit(request(3))
    (sequence,) = group.scheduler._ledger.open
    group.scheduler._ledger.close(sequence, FinishReason.STOP)
    with pytest.raises(AssertionError, match="its terminal already"):
        group.scheduler._ledger.close(sequence, FinishReason.FAILED)


def test_tables_that_were_emptied_have_nothing_to_tell() -> None:
    """Growth that no plan told of is forgotten with the blocks: it must not reach the next row of the sequence."""
    memory = KVMemory((full(20), sliding(20, window=4)), block_size=4)
    tables = memory.new_tables()
    assert memory.admit(tables, 8, 4, 0)
    assert memory.grow(tables, 12)
    assert [growth[:2] for growth in tables.unsent] == [(0, 2), (1, 1)]
    assert tables.take_all() == [(0, [1, 2, 3]), (1, [1, 2, 3])]
    assert (tables.unsent, tables.room, tables.tables) == ([], 0, [[], []])
