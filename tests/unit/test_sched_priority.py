"""Priorities: who goes first, who is preempted last, and that they are refused where they would change nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from peg.config import EngineConfig
from peg.errors import ConfigError, InvalidRequest
from peg.sched.limits import SchedulerLimits
from tests.unit.sched_device import FakeGroup, continuation, full, limits, request


def by_priority(*, rows: int = 1, blocks: int = 100, budget: int = 64) -> SchedulerLimits:
    return replace(limits(full(blocks), rows=rows, budget=budget), priorities=True)


def admit(group: FakeGroup, *priorities: int, prompt: int = 4, max_tokens: int = 2) -> list[int]:
    return [group.admit(replace(request(prompt, max_tokens), priority=priority)) for priority in priorities]


def order_of_rows(group: FakeGroup) -> list[int]:
    """Run everything; the sequences in the order in which they got a row."""
    order: list[int] = []
    while (plan := group.issue()) is not None or group.out:
        if plan is None:
            group.answer()
        else:
            order += [new.seq_id for new in plan.new_rows]
    return order


def test_the_smaller_priority_goes_first_and_then_the_earlier() -> None:
    """With one row, sequences run by priority, negative ones included, and by arrival among equals."""
    group = FakeGroup(by_priority())
    ids = admit(group, 5, 0, -3, 5, 0)
    assert order_of_rows(group) == [ids[2], ids[1], ids[4], ids[0], ids[3]]


def test_who_runs_is_not_put_back_for_a_smaller_priority() -> None:
    """A row is not taken from a sequence for a better one: that one is only the next to get a row."""
    group = FakeGroup(by_priority())
    (running,) = admit(group, 9)
    group.must_issue()
    (urgent,) = admit(group, -9)
    group.finish()
    assert group.scheduler.stats().counters.preemptions == 0
    for seq_id in (running, urgent):
        assert tuple(group.tokens[seq_id]) == continuation(request(4).prompt_ids, 2)


@pytest.mark.parametrize(("priorities", "preempted"), [((7, 1), 0), ((1, 7), 1), ((3, 3), 1)])
def test_the_largest_priority_is_preempted_first(priorities: tuple[int, int], preempted: int) -> None:
    """When blocks run short the sequence of the largest priority goes, the older one too; its tokens stay right."""
    group = FakeGroup(by_priority(rows=2, blocks=7))
    ids = admit(group, *priorities, prompt=6, max_tokens=14)
    rows: list[int] = []
    while (plan := group.issue()) is not None or group.out:
        if plan is None:
            group.answer()
        else:
            rows += [new.seq_id for new in plan.new_rows]
    assert group.scheduler.stats().counters.preemptions == 1
    assert sorted(rows[:2]) == ids
    assert rows[2:] == [ids[preempted]]
    for seq_id in ids:
        assert tuple(group.tokens[seq_id]) == continuation(request(6).prompt_ids, 14)


def test_the_budget_goes_to_the_smaller_priority() -> None:
    """Chunks of prefill are cut from the budget in order of priority."""
    group = FakeGroup(by_priority(rows=3, budget=8))
    first, second = admit(group, 2, 1, prompt=12)
    assert [(piece.seq_id, piece.count) for piece in group.must_issue().slices] == [(second, 8)]
    assert [(piece.seq_id, piece.count) for piece in group.must_issue().slices] == [(second, 4), (first, 4)]


def test_a_priority_that_changes_nothing_is_refused() -> None:
    """First come first served takes 0 alone, and says how to get priorities."""
    group = FakeGroup(limits())
    admit(group, 0)
    with pytest.raises(InvalidRequest, match="--scheduling-policy priority") as refusal:
        admit(group, 1)
    assert refusal.value.param == "priority"
    assert group.scheduler.stats().waiting == 1


def test_there_are_two_policies() -> None:
    """Any other is refused by its flag's name."""
    for policy in ("fcfs", "priority"):
        EngineConfig(model="m", model_dir=Path(), scheduling_policy=policy)
    with pytest.raises(ConfigError, match="--scheduling-policy lifo"):
        EngineConfig(model="m", model_dir=Path(), scheduling_policy="lifo")
