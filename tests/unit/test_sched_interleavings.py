"""What may happen at step n while step n + 1 is out, one test each, over a group that answers when told."""

from __future__ import annotations

from peg.plan import FinishReason, StepPlan
from tests.unit.sched_device import FakeGroup, continuation, full, limits, request, sliding


def rows_named(plan: StepPlan) -> dict[int, int]:
    return {piece.seq_id: piece.row for piece in plan.slices}


def terminal_reason(group: FakeGroup, seq_id: int) -> FinishReason:
    update = group.terminals[seq_id]
    assert update.terminal is not None
    return update.terminal.reason


def up_to(group: FakeGroup, step: int) -> StepPlan:
    """Keep two steps out until this one is issued."""
    while True:
        plan = group.issue()
        if plan is None:
            group.answer()
        elif plan.step == step:
            return plan


def test_two_steps_are_out_and_the_second_runs_on_a_token_only_the_device_knows() -> None:
    """Step n + 1 is issued before n is committed, n + 2 only after, and the text is that of one step at a time."""
    group = FakeGroup(limits())
    seq_id = group.admit(request(5, max_tokens=6))
    first, second = group.must_issue(), group.must_issue()
    assert first.slices[0].token_ids == request(5).prompt_ids
    assert second.slices[0].token_ids is None
    assert (second.slices[0].start, second.slices[0].count, second.slices[0].samples) == (5, 1, True)
    assert group.issue() is None, "a third step was issued before the first came back"
    assert [update.token_ids for update in group.answer()] == [continuation(request(5).prompt_ids, 1)]
    assert group.must_issue().step == second.step + 1
    group.finish()
    assert tuple(group.tokens[seq_id]) == continuation(request(5).prompt_ids, 6)


def test_stop_at_n() -> None:
    """The extra token of a sequence that stopped at n is dropped; its row and blocks return with n + 1, not n."""
    group = FakeGroup(limits(full(9), rows=2))
    prompt = request(6).prompt_ids
    stop = continuation(prompt, 1)[0]
    seq_id = group.admit(request(6, stop_token_ids=frozenset({stop})))
    first, second = group.must_issue(), group.must_issue()
    (update,) = group.answer()
    assert update.terminal is not None
    assert (update.terminal.reason, update.terminal.stop_token_id) == (FinishReason.STOP, stop)
    assert (update.token_ids, update.terminal.completion_tokens) == ((stop,), 1)
    assert group.used() == 2, "blocks went back while a step that names them was out"
    newcomer = group.admit(request(6, max_tokens=1))
    third = group.must_issue()
    assert rows_named(third)[newcomer] != rows_named(second)[seq_id], "the row was given on while a step named it"
    assert third.released_rows == ()
    assert group.answer() == [], "the void token was published"
    assert group.used() == 2, "only the newcomer's blocks are left"
    group.admit(request(6, max_tokens=1))
    assert group.must_issue().released_rows == (rows_named(first)[seq_id],)
    group.finish()


def test_cancel_with_two_steps_out() -> None:
    """Cancel answers at once; both steps that are out bring nothing more, and the last of them gives all back."""
    group = FakeGroup(limits(full(9)))
    seq_id = group.admit(request(6))
    group.must_issue()
    group.must_issue()
    update = group.cancel(seq_id)
    assert update is not None
    assert terminal_reason(group, seq_id) == FinishReason.CANCELLED
    assert group.cancel(seq_id) is None, "a second terminal"
    assert group.answer() == []
    assert group.used() == 2
    assert group.answer() == []
    assert group.used() == 0
    assert group.issue() is None


def test_cancel_while_waiting() -> None:
    """A sequence that waits for a row leaves the queue at once and is never planned."""
    group = FakeGroup(limits(rows=1))
    group.admit(request(4, max_tokens=3))
    waiting = group.admit(request(4, max_tokens=3))
    group.must_issue()
    group.cancel(waiting)
    assert group.scheduler.stats().waiting == 0
    group.finish()
    assert terminal_reason(group, waiting) == FinishReason.CANCELLED
    assert group.tokens[waiting] == []


def test_block_shortage_with_a_step_out() -> None:
    """Whoever fits is planned, whoever does not waits, and what the next commit gives back serves it: no preemption."""
    group = FakeGroup(limits(full(8), rows=3))
    short, ending, roomy = (
        group.admit(request(8, max_tokens=8)),
        group.admit(request(4, max_tokens=5)),
        group.admit(request(3, max_tokens=6)),
    )
    assert rows_named(up_to(group, step=4)).keys() == {short, ending, roomy}
    assert group.used() == 7, "all blocks are taken"
    assert rows_named(up_to(group, step=5)).keys() == {roomy}
    group.answer()
    assert terminal_reason(group, ending) == FinishReason.LENGTH
    assert rows_named(group.must_issue()).keys() == {short}
    group.finish()
    assert group.scheduler.stats().counters.preemptions == 0
    assert tuple(group.tokens[short]) == continuation(request(8).prompt_ids, 8)


def test_a_newcomer_waits_while_others_run() -> None:
    """Blocks that a step holds do not let anyone in; they do once it is back."""
    group = FakeGroup(limits(full(4), rows=2))
    ending = group.admit(request(8, max_tokens=2))
    newcomer = group.admit(request(8, max_tokens=2))
    group.must_issue()
    assert rows_named(group.must_issue()).keys() == {ending}
    group.answer()
    assert group.issue() is None
    group.answer()
    assert rows_named(group.must_issue()).keys() == {newcomer}
    group.finish()


def test_preemption_with_a_step_out() -> None:
    """While a step is out nobody is preempted; once none is, the newest goes, and the oldest gets on."""
    group = FakeGroup(limits(full(8), rows=2))
    older, newer = group.admit(request(11, max_tokens=12)), group.admit(request(6, max_tokens=12))
    assert rows_named(up_to(group, step=5)).keys() == {older, newer}
    assert rows_named(up_to(group, step=6)).keys() == {newer}, "the older needs a block, the newer fits"
    group.answer()
    assert group.issue() is None, "nobody fits, and step 6 is out"
    assert group.scheduler.stats().counters.preemptions == 0
    group.answer()
    published = list(group.tokens[newer])
    plan = group.must_issue()
    assert group.scheduler.stats().counters.preemptions == 1
    assert rows_named(plan).keys() == {older}
    assert len(plan.released_rows) == 1
    group.finish()
    assert group.tokens[newer][: len(published)] == published
    assert tuple(group.tokens[older]) == continuation(request(11).prompt_ids, 12)
    assert tuple(group.tokens[newer]) == continuation(request(6).prompt_ids, 12)


def test_whoever_can_only_get_on_by_preempting_does_not_wait_for_others_to_run_short() -> None:
    """The steps that are out come back, and no other is issued between them, though a newer sequence would fit."""
    group = FakeGroup(limits(full(8), rows=2))
    older, newer = group.admit(request(11, max_tokens=12)), group.admit(request(4, max_tokens=12))
    assert rows_named(up_to(group, step=5)).keys() == {older, newer}
    assert rows_named(up_to(group, step=6)).keys() == {newer}
    assert rows_named(up_to(group, step=7)).keys() == {newer}
    group.answer()
    assert group.issue() is None, "the newer one fits, but the older one has waited long enough"
    group.answer()
    assert rows_named(group.must_issue()).keys() == {older}
    group.finish()


def test_a_preempted_sequence_comes_back_through_prefill() -> None:
    """It brings its prompt and its tokens in a new row, computes both again, and samples at the last position only."""
    group = FakeGroup(limits(full(8), rows=2, budget=8))
    group.admit(request(11, max_tokens=12))
    newer = group.admit(request(7, max_tokens=12))
    plans: list[StepPlan] = []
    while group.scheduler.stats().running or group.scheduler.stats().waiting:
        while (plan := group.issue()) is not None:
            plans.append(plan)
        group.answer()
    first, again = (new for plan in plans for new in plan.new_rows if new.seq_id == newer)
    assert (first.prompt_ids, first.output_ids) == (request(7).prompt_ids, ())
    assert again.prompt_ids == request(7).prompt_ids
    assert 0 < len(again.output_ids) < 12
    assert again.output_ids == tuple(group.tokens[newer][: len(again.output_ids)])
    back = next(place for place, plan in enumerate(plans) if again in plan.new_rows)
    slices = [piece for plan in plans[back:] for piece in plan.slices if piece.seq_id == newer]
    recomputed = len(again.prompt_ids) + len(again.output_ids)
    chunks = [piece for piece in slices if piece.start < recomputed]
    assert len(chunks) > 1, "a budget of 8 cuts it into chunks"
    assert [piece.samples for piece in chunks] == [False] * (len(chunks) - 1) + [True]


def test_window_release_with_a_step_out() -> None:
    """A block that the commit of n puts behind the window is free once n + 1, which names its sequence, is back."""
    group = FakeGroup(limits(sliding(20, window=4), block_size=2, budget=8))
    group.admit(request(8, max_tokens=6))
    group.must_issue()
    group.must_issue()
    assert group.used() == 5
    group.answer()  # 8 tokens are stored: blocks 0 and 1 end at 4, and 4 + 4 ≤ 8
    assert group.used() == 5, "a block went back while a step that names its sequence was out"
    group.answer()
    assert group.used() == 3
    group.finish()


def test_failure_of_n_with_a_step_out() -> None:
    """Exactly the sequences of the failed step end; the step behind it is taken back and planned again without them."""
    group = FakeGroup(limits(full(20), rows=3, budget=8))
    chunked = group.admit(request(12, max_tokens=3))
    first = group.must_issue()
    assert rows_named(first).keys() == {chunked}
    newcomer = group.admit(request(4, max_tokens=3))
    second = group.must_issue()
    assert rows_named(second).keys() == {chunked, newcomer}
    (update,) = group.fail("out of memory")
    assert update.terminal is not None
    assert (update.seq_id, update.terminal.reason) == (chunked, FinishReason.FAILED)
    assert update.terminal.message == "out of memory"
    assert (group.used(), group.scheduler.stats().waiting) == (0, 1), "all is as before the newcomer was planned"
    third = group.must_issue()
    assert third.step == second.step + 1
    assert rows_named(third).keys() == {newcomer}
    assert third.released_rows == (rows_named(first)[chunked],), "not the newcomer's: no rank ever had that"
    group.finish()
    assert tuple(group.tokens[newcomer]) == continuation(request(4).prompt_ids, 3)


def test_failure_takes_back_what_a_bystander_was_planned() -> None:
    """Who runs in the skipped step only is back at its frontier, its new block in the pool, and planned again."""
    group = FakeGroup(limits(full(20), rows=3))
    bystander = group.admit(request(4, max_tokens=3), constrained=True)
    group.must_issue()
    group.admit(request(6, max_tokens=3))
    group.must_issue()  # without the bystander, whose last step is not committed
    group.answer()
    group.allow(bystander)
    skipped = group.must_issue()
    assert len(skipped.slices) == 2
    assert [change.row for change in skipped.table_changes] == [rows_named(skipped)[bystander]]
    group.fail()
    assert group.used() == 1, "the bystander holds what it held before the skipped step"
    again = group.must_issue()
    assert [(piece.seq_id, piece.start) for piece in again.slices] == [(bystander, 4)]
    assert len(again.table_changes) == 1, "no rank was told of the new block"
    group.finish()
    assert tuple(group.tokens[bystander]) == continuation(request(4).prompt_ids, 3)


def test_fail_all_with_two_steps_out() -> None:
    """Everyone gets FAILED, the queued ones too; the steps that are out publish nothing and give all back."""
    group = FakeGroup(limits(full(20), rows=1))
    running, queued = group.admit(request(6)), group.admit(request(6))
    group.must_issue()
    group.must_issue()
    updates = group.note(group.scheduler.fail_all("rank 1 died"))
    assert [(update.seq_id, update.terminal and update.terminal.message) for update in updates] == [
        (running, "rank 1 died"),
        (queued, "rank 1 died"),
    ]
    assert group.scheduler.fail_all("again") == []
    assert group.answer() == group.answer() == []
    assert group.issue() is None
    assert group.used() == 0
