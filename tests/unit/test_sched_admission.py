"""Who gets in, who waits, and who is refused with which numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from peg.errors import InvalidRequest, QueueFull
from peg.plan import (
    EngineInfo,
    FinishReason,
    Full,
    GroupCapacity,
    Recurrent,
    SamplingParams,
    SequenceRequest,
    SlidingWindow,
)
from peg.sched.limits import SchedulerLimits
from peg.sched.scheduler import Scheduler
from tests.unit.sched_device import (
    EOS,
    FORBIDDEN,
    VOCAB,
    FakeGroup,
    continuation,
    full,
    limits,
    recurrent,
    request,
    sliding,
)


@pytest.mark.parametrize(
    ("wanted", "param", "words"),
    [
        (request(()), "prompt", ["empty"]),
        (request((1, VOCAB, 2)), "prompt", [f"token id {VOCAB}", f"0 to {VOCAB - 1}"]),
        (request((1, -1)), "prompt", ["token id -1"]),
        (request((1, 2**32 - 1)), "prompt", [f"token id {2**32 - 1}"]),
        (request((1, FORBIDDEN)), "prompt", [f"token id {FORBIDDEN}", "position 1"]),
        (request(3, stop_token_ids=frozenset({VOCAB})), "stop_token_ids", [f"token id {VOCAB}"]),
        (request(3, max_tokens=-1), "max_tokens", ["max_tokens -1"]),
        (request(60, max_tokens=5), "max_tokens", ["60", "5", "65", "64"]),
        (request(64, max_tokens=1), "prompt", ["64", "65"]),
        (request(64, max_tokens=None), "prompt", ["64 tokens"]),
        (request(65, max_tokens=0), "prompt", ["65", "64"]),
    ],
)
def test_a_request_at_fault_is_refused_with_its_numbers(wanted: SequenceRequest, param: str, words: list[str]) -> None:
    """Each fault names its field, the value and the limit; the refusal is counted and nothing is queued."""
    scheduler = Scheduler(limits(context=64))
    with pytest.raises(InvalidRequest) as refusal:
        scheduler.admit(wanted)
    assert refusal.value.param == param
    for word in words:
        assert word in str(refusal.value)
    stats = scheduler.stats()
    assert (stats.waiting, stats.counters.admitted) == (0, 0)
    assert stats.counters.finished[FinishReason.REJECTED] == 1


@pytest.mark.parametrize(("prompt", "max_tokens"), [(60, 4), (63, 1), (63, None), (64, 0), (1, 63), (1, None)])
def test_the_context_may_be_filled_to_its_end(prompt: int, max_tokens: int | None) -> None:
    """Prompt and new tokens up to the context are accepted, and computed to the last."""
    group = FakeGroup(limits(context=64))
    seq_id = group.admit(request(prompt, max_tokens))
    group.finish()
    expected = continuation(request(prompt).prompt_ids, 64 - prompt if max_tokens is None else max_tokens)
    assert tuple(group.tokens[seq_id]) == expected
    terminal = group.terminals[seq_id].terminal
    assert terminal is not None
    assert terminal.reason == FinishReason.LENGTH


@pytest.mark.parametrize(
    ("group_of", "most"),
    [
        (full(6), 20),  # 5 blocks of 4, and the last token sampled is never stored
        (sliding(6, window=4), 20),  # window and chunk and one block more would be 6: the length is what counts
        (sliding(7, window=4), 63),  # 6 blocks: window 4 and a chunk of 16, wherever in a block they begin
    ],
)
def test_only_what_could_never_fit_alone_is_refused(group_of: GroupCapacity, most: int) -> None:
    """The longest text that fits alone runs to its end; one token more is refused with the group and its blocks."""
    group = FakeGroup(limits(full(100), group_of, budget=16, context=64))
    seq_id = group.admit(request(most, max_tokens=1))
    group.finish()
    assert len(group.tokens[seq_id]) == 1
    if most < 63:
        with pytest.raises(InvalidRequest, match=r"21 tokens need 6 blocks of 4 in KV group 1 .*, which has 5"):
            group.admit(request(most, max_tokens=2))


def test_admission_takes_blocks_in_every_group_or_in_none() -> None:
    """Short in the second group, the first one's blocks stay where they are and the sequence waits."""
    group = FakeGroup(limits(full(20), sliding(5, window=4), budget=8))
    group.admit(request(8, max_tokens=6))
    waiting = group.admit(request(4, max_tokens=1))
    group.must_issue()
    assert (group.used(0), group.used(1)) == (2, 2)
    group.must_issue()
    assert (group.used(0), group.used(1)) == (3, 3), "one block for the newcomer would have been there in both groups"
    assert group.scheduler.stats().waiting == 1
    group.finish()
    assert len(group.tokens[waiting]) == 1


def test_growth_takes_blocks_in_every_group_or_in_none() -> None:
    """A sequence that finds a block in one group only takes neither and waits."""
    group = FakeGroup(limits(full(20), full(6), block_size=4, rows=2))
    group.admit(request(8, max_tokens=5))
    group.admit(request(4, max_tokens=9))
    memory = group.scheduler._memory
    older, newer = group.scheduler._ledger.open
    group.must_issue()
    assert memory.grow(older.tables, 16)
    before = (list(older.tables.tables), [list(table) for table in newer.tables.tables], group.used(0), group.used(1))
    assert not memory.grow(newer.tables, 16), "the second group has no three blocks left"
    assert before == (older.tables.tables, newer.tables.tables, group.used(0), group.used(1))


def test_the_queue_is_bounded_beyond_those_that_can_start() -> None:
    """Two rows and a cap of one: three get in, the fourth is told how many wait; when one has ended there is room."""
    group = FakeGroup(limits(rows=2, queued=1))
    first = [group.admit(request(4)) for _ in range(3)]
    with pytest.raises(QueueFull, match=r"2 sequences would wait: at most 1"):
        group.admit(request(4))
    group.must_issue()
    with pytest.raises(QueueFull, match=r"2 sequences would wait: at most 1"):
        group.admit(request(4))
    group.cancel(first[2])
    last = group.admit(request(4))
    group.finish()
    assert len(group.tokens[last]) == 8
    assert group.scheduler.stats().counters.finished[FinishReason.REJECTED] == 2


def test_a_cap_of_zero_still_serves_an_idle_engine() -> None:
    """Nobody may queue, but a request that can start at once is no queue."""
    group = FakeGroup(limits(rows=1, queued=0))
    seq_id = group.admit(request(4))
    with pytest.raises(QueueFull):
        group.admit(request(4))
    group.finish()
    assert len(group.tokens[seq_id]) == 8


def test_the_tokens_that_wait_are_bounded_too() -> None:
    """One row and a cap of ten tokens: the runner's do not count, what waits does; more at once is a fault."""
    group = FakeGroup(replace(limits(rows=1), max_num_queued_tokens=10))
    group.admit(request(40))
    waiting = group.admit(request(6))
    with pytest.raises(QueueFull, match=r"11 tokens would wait: at most 10 may"):
        group.admit(request(5))
    group.scheduler.check_room((4,))
    with pytest.raises(QueueFull):
        group.scheduler.check_room((1,) * 5)
    with pytest.raises(InvalidRequest, match=r"12 sequences in one request"):
        group.scheduler.check_room((1,) * 12)
    group.cancel(waiting)
    group.admit(request(10))
    group.finish()


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"allowed_token_ids": frozenset({FORBIDDEN})}, "allowed_token_ids"),
        ({"allowed_token_ids": frozenset({5}), "bad_words": ((5, 5),)}, "allowed_token_ids"),
        ({"allowed_token_ids": frozenset({EOS}), "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": frozenset({VOCAB})}, "allowed_token_ids"),
        ({"bad_words": tuple((token,) for token in range(VOCAB))}, "bad_words"),
        ({"bad_words": ((VOCAB,),)}, "bad_words"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ({"min_tokens": 9}, "min_tokens"),
    ],
)
def test_rules_that_leave_nothing_to_sample_are_refused(fields: dict[str, Any], names: str) -> None:
    """A row of logits that rules have emptied would be taken for a broken one, which costs the engine."""
    group = FakeGroup(limits())
    with pytest.raises(InvalidRequest) as refused:
        group.admit(replace(request(4, max_tokens=8), sampling=SamplingParams(**fields)))
    assert refused.value.param == names


def test_a_newcomer_leaves_a_spare_block_for_each_that_runs() -> None:
    """It is not let in only to be preempted by the next one that grows."""
    group = FakeGroup(limits(full(6), rows=2))
    group.admit(request(8, max_tokens=4))
    group.admit(request(8, max_tokens=4))
    plan = group.must_issue()
    assert len(plan.slices) == 1, "3 blocks are free, 2 are wanted, and 2 must be left"
    group.finish()
    assert group.scheduler.stats().counters.preemptions == 0


def test_recurrent_groups_are_counted_by_rows() -> None:
    """One state row for each row in use, an empty table in each new row, and no refusal for its sake."""
    group = FakeGroup(limits(recurrent(), full(20), rows=3))
    group.admit(request(8))
    (new,) = group.must_issue().new_rows
    assert new.tables == ((), (1, 2))
    usage = group.scheduler.stats().groups[0]
    assert (usage.used, usage.total) == (1, 3)
    group.finish()


def test_a_model_without_paged_groups_is_bounded_by_its_context_only() -> None:
    """Recurrent layers alone: any length up to the context runs."""
    group = FakeGroup(limits(recurrent(), context=64))
    seq_id = group.admit(request(8, max_tokens=56))
    group.finish()
    assert len(group.tokens[seq_id]) == 56


def test_limits_come_from_a_loaded_engine() -> None:
    """Every number that the engine tells arrives where the scheduler reads it."""
    groups = (
        GroupCapacity(Full((0,), 1, 4), 10),
        GroupCapacity(SlidingWindow((1,), 1, 4, 8), 11),
        GroupCapacity(Recurrent((2,), 64), 0),
    )
    info = EngineInfo(
        architecture="a",
        world_size=1,
        devices=("cpu",),
        communicator="solo",
        dtype="float32",
        vocab_size=100,
        eos_token_ids=(1, 2),
        forbidden_token_ids=(3,),
        max_model_len=64,
        block_size=16,
        max_num_seqs=5,
        max_num_batched_tokens=32,
        groups=groups,
        parameters=1,
        weight_bytes=1,
        kv_bytes=1,
    )
    assert SchedulerLimits.of(info, 7, epoch=4) == SchedulerLimits(
        block_size=16,
        groups=groups,
        max_num_seqs=5,
        max_num_batched_tokens=32,
        max_model_len=64,
        vocab_size=100,
        eos_token_ids=frozenset({1, 2}),
        forbidden_token_ids=frozenset({3}),
        max_num_queued_reqs=7,
        epoch=4,
    )
