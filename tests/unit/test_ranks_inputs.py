"""Rows, tables, step inputs, pools and digests of one rank, without a model."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peg.errors import ConfigError, RankDiverged
from peg.failure import CauseKind
from peg.kernels.heads import HeadRules
from peg.plan import (
    Full,
    GroupCapacity,
    KVGroup,
    NewRow,
    RankAck,
    SamplingParams,
    Slice,
    SlidingWindow,
    StepPlan,
    StepResult,
    TableChange,
)
from peg.ranks.cache import PagedCache, WriteDigest, make_caches
from peg.ranks.capacity import CapacityRequest, divide_budget
from peg.ranks.device import CpuDevice
from peg.ranks.inputs import lay_out
from peg.ranks.tables import RowTables
from peg.ranks.tickets import Ticket

BLOCK = 4
CPU = torch.device("cpu")


def new_row(row: int, tables: tuple[tuple[int, ...], ...]) -> NewRow:
    return NewRow(row, 100 + row, SamplingParams(), (1, 2, 3), (4,), tables)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30))
def test_inputs_are_what_the_rows_say(seed: int) -> None:
    """For random rows, chunks and placeholders every array is what a loop over tokens gives."""
    chooser = random.Random(seed)
    rows = chooser.sample(range(6), chooser.randint(1, 6))
    tables = RowTables(6, 2, 8)
    blocks = {row: tuple(tuple(chooser.sample(range(1, 99), 8)) for _ in range(2)) for row in rows}
    tables.apply(StepPlan(0, 0, (), new_rows=tuple(new_row(row, blocks[row]) for row in rows)))
    last = torch.arange(1000, 1006)
    slices, expected = [], []
    for row in rows:
        start, count = chooser.randint(0, 20), chooser.choice([1, 1, 3, 12])
        tables.stored[row] = start
        waits = count == 1 and chooser.random() < 0.5
        ids = None if waits else tuple(chooser.randrange(500) for _ in range(count))
        slices.append(Slice(100 + row, row, start, count, ids, samples=True))
        for offset in range(count):
            position = start + offset
            slots = [blocks[row][group][position // BLOCK] * BLOCK + position % BLOCK for group in range(2)]
            expected.append((1000 + row if ids is None else ids[offset], position, *slots))
    inputs = lay_out(StepPlan(1, 0, tuple(slices)), tables, BLOCK).upload(CpuDevice(1), last)
    columns = (inputs.token_ids, inputs.positions, inputs.groups[0].slots, inputs.groups[1].slots)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
    assert all(column.dtype == torch.int64 for column in columns)
    lens = [piece.count for piece in slices]
    assert inputs.query_lens == tuple(lens)
    assert inputs.query_starts.tolist() == [sum(lens[:index]) for index in range(len(lens) + 1)]
    assert inputs.context_lens.tolist() == list(inputs.context_lens_host) == [p.start + p.count for p in slices]
    for group in range(2):
        for place, row in enumerate(rows):
            needed = -(-inputs.context_lens_host[place] // BLOCK)
            assert tuple(inputs.groups[group].tables[place, :needed].tolist()) == blocks[row][group][:needed]
    assert {inputs.query_starts.dtype, inputs.context_lens.dtype, inputs.groups[0].tables.dtype} == {torch.int32}


def test_rows_are_released_taken_and_changed_in_this_order() -> None:
    """One plan may release a row, give it to a new sequence, and add to its table; a new row begins empty."""
    tables = RowTables(2, 1, 4)
    tables.apply(StepPlan(0, 0, (), new_rows=(new_row(0, ((1, 2),)), new_row(1, ((3,),)))))
    assert tables.advance([0, 1], [5, 2]) == [5, 2]
    assert tables.free_rows == 0
    plan = StepPlan(
        1,
        0,
        (),
        released_rows=(0, 1),
        new_rows=(new_row(1, ((7,),)),),
        table_changes=(TableChange(1, 0, 1, (8, 9)),),
    )
    tables.apply(plan)
    assert tables.free_rows == 1
    assert tables.stored.tolist() == [5, 0]
    assert tables.blocks[0][1].tolist() == [7, 8, 9, 0]


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(1, 0, (), released_rows=(1,)),
        StepPlan(1, 0, (), new_rows=(new_row(0, ((1,),)),)),
        StepPlan(1, 0, (), table_changes=(TableChange(1, 0, 0, (5,)),)),
    ],
)
def test_a_plan_that_contradicts_the_rows_is_a_bug(plan: StepPlan) -> None:
    """Releasing a free row, taking a used one and growing a free one are refused."""
    tables = RowTables(2, 1, 4)
    tables.apply(StepPlan(0, 0, (), new_rows=(new_row(0, ((1,),)),)))
    with pytest.raises(AssertionError, match=r"row \d"):
        tables.apply(plan)


def test_a_slice_must_begin_where_its_row_ends() -> None:
    """The rank's own frontier is what counts."""
    tables = RowTables(2, 1, 4)
    tables.apply(StepPlan(0, 0, (), new_rows=(new_row(1, ((1,),)),)))
    piece = Slice(101, 1, 2, 1, (5,), samples=True)
    with pytest.raises(RankDiverged, match="row 1 begins at 2, the row has stored 0"):
        lay_out(StepPlan(3, 0, (piece,)), tables, BLOCK)


# --- pools and digests --------------------------------------------------------------------------------------


def store(cache: PagedCache, slots: torch.Tensor, number: float = 0.0) -> torch.Tensor:
    """What a layer does: its one head of Q is −number, that of K number, that of V ten times as much; none turns."""
    heads = torch.tensor([-1.0, 1.0, 10.0])[:, None].expand(len(slots), 3, 2) * number
    return cache.write(heads, HeadRules(1), (torch.ones(len(slots), 1, 2), torch.zeros(len(slots), 1, 2)), slots)


def write(caches: list[PagedCache], digest: WriteDigest, slots: list[int], skip: int | None = None) -> None:
    """What a rank does in a step: every layer stores at the same slots."""
    handed = torch.tensor(slots)
    digest.begin([(handed, handed.numpy())])
    for layer, cache in enumerate(caches):
        if layer != skip:
            assert store(cache, handed, layer + 1).tolist() == [[[-layer - 1] * 2]] * len(slots)


def pools() -> tuple[list[PagedCache], WriteDigest]:
    digest = WriteDigest()
    caches = make_caches([GroupCapacity(Full((0, 1, 2), 1, 2), 5)], 3, BLOCK, torch.float32, CPU, digest)
    paged = [cache for cache in caches if isinstance(cache, PagedCache)]
    assert len(paged) == 3
    return paged, digest


def test_a_write_lands_in_its_slots() -> None:
    """Slot = block times block size plus offset, in every layer, and nowhere else."""
    caches, digest = pools()
    write(caches, digest, [4, 9])
    for layer, cache in enumerate(caches):
        assert cache.k.shape == (5, BLOCK, 1, 2)
        assert cache.k[1, 0].tolist() == cache.k[2, 1].tolist() == [[layer + 1.0] * 2]
        assert cache.k.count_nonzero() == 4
        assert torch.equal(cache.v, 10 * cache.k)


def test_digests_differ_wherever_the_work_differs() -> None:
    """Same work, same digest; another slot, order, layer, row, count, a skipped or a doubled write: another one."""

    def after(*steps: tuple[list[int], int | None, list[int], list[int]]) -> int:
        caches, digest = pools()
        for slots, skip, rows, tokens in steps:
            write(caches, digest, slots, skip)
            digest.advanced(rows, tokens)
        return digest.value

    same = (([4, 5], None, [0], [2]), ([6], None, [0], [3]))
    variants = [
        (([4, 7], None, [0], [2]), ([6], None, [0], [3])),
        (([5, 4], None, [0], [2]), ([6], None, [0], [3])),
        (([4, 5], 1, [0], [2]), ([6], None, [0], [3])),
        (([4, 5], None, [0], [2]), ([6], 2, [0], [3])),
        (([4, 5], None, [1], [2]), ([6], None, [0], [3])),
        (([4, 5], None, [0], [2]), ([6], None, [0], [4])),
        (([4, 5], None, [0], [2]), ([6], None, [0], [3]), ([6], None, [0], [3])),
    ]
    digests = [after(*variant) for variant in variants]
    assert after(*same) == after(*same)
    assert len({after(*same), *digests}) == len(variants) + 1


def test_a_digest_tells_layers_apart() -> None:
    """One layer that stores twice does not make up for another that does not store."""
    digests = []
    for layers in ((0, 1, 2), (0, 0, 2), (0, 2, 1)):
        caches, digest = pools()
        slots = torch.tensor([4, 5])
        digest.begin([(slots, slots.numpy())])
        for layer in layers:
            store(caches[layer], slots)
        digests.append(digest.value)
    assert len(set(digests)) == 3


def test_only_the_slots_of_the_step_can_be_written() -> None:
    """Slots that the step did not bring, or that an earlier one did, are a bug, whatever numbers they hold."""
    caches, digest = pools()
    handed = torch.tensor([4])
    with pytest.raises(AssertionError, match="not the step's"):
        store(caches[0], handed)
    digest.begin([(handed, handed.numpy())])
    store(caches[0], handed)
    digest.advanced([0], [1])
    with pytest.raises(AssertionError, match="not the step's"):
        store(caches[0], handed)


def test_a_layer_without_a_cache_cannot_be_used() -> None:
    """A layer that reads another's K and V has a place in the list, and touching it is a bug."""
    caches = make_caches([GroupCapacity(Full((0,), 1, 2), 5)], 2, BLOCK, torch.float32, CPU, WriteDigest())
    angles = (torch.ones(1, 1, 2), torch.zeros(1, 1, 2))
    write = partial(caches[1].write, torch.zeros(1, 3, 2), HeadRules(1), angles, torch.tensor([4]))
    for use in (lambda: caches[1].k, lambda: caches[1].v, write):
        with pytest.raises(AssertionError, match="no cache of its own"):
            use()


# --- tickets ------------------------------------------------------------------------------------------------


def ack(rank: int, token: int = 5, digest: int = 77, free_rows: int = 3) -> RankAck:
    return RankAck(step=9, epoch=0, rank=rank, token_ids=(token,), digest=digest, free_rows=free_rows)


def conclude(*acks: RankAck) -> object:
    ticket = Ticket(len(acks))
    lasts = [ticket.add(each.rank, each) for each in reversed(acks)]
    assert lasts == [False] * (len(acks) - 1) + [True]
    return ticket.conclude()


def test_agreeing_acks_make_a_result() -> None:
    """Whoever comes last, the result is what all said."""
    assert conclude(ack(0), ack(1), ack(2)) == StepResult(9, 0, (5,))


@pytest.mark.parametrize(
    ("acks", "rank", "words"),
    [
        ((ack(0), ack(1), ack(2, token=6)), 2, "token_ids: (5,) on rank 0, 1; (6,) on rank 2"),
        ((ack(0, digest=1), ack(1), ack(2)), 0, "digest: 1 on rank 0; 77 on rank 1, 2"),
        ((ack(0), ack(1, free_rows=2)), None, "free_rows: 3 on rank 0; 2 on rank 1"),
        ((ack(0), ack(1, token=6, digest=1), ack(2)), 1, "token_ids"),
    ],
)
def test_differing_acks_make_a_cause(acks: tuple[RankAck, ...], rank: int | None, words: str) -> None:
    """The cause names what differs on which ranks, and the odd one out where there is one."""
    cause = conclude(*acks)
    assert getattr(cause, "kind", None) is CauseKind.RANK_DIVERGED
    assert (getattr(cause, "rank", 0), getattr(cause, "step", 0)) == (rank, 9)
    assert words in str(cause)


# --- capacity -----------------------------------------------------------------------------------------------


def request(*groups: KVGroup, max_model_len: int = 64) -> CapacityRequest:
    return CapacityRequest(
        groups=groups,
        dtype_bytes=2,
        block_size=16,
        max_model_len=max_model_len,
        max_num_seqs=4,
        max_num_batched_tokens=32,
    )


FULL = Full((0, 1), 2, 8)  # 2 · 2 layers · 2 heads · 8 · 2 bytes · 16 tokens = 2048 bytes a block
SLIDING = SlidingWindow((2,), 2, 8, 16)  # 1024 bytes a block; 4 sequences of 48 tokens and one block each: 16 blocks


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 100_000), st.sampled_from([(FULL,), (FULL, SLIDING), (SLIDING,)]))
def test_a_budget_is_used_and_never_passed(budget: int, groups: tuple[KVGroup, ...]) -> None:
    """Pools fit the budget, hold one whole context, and another block of tokens would not fit or would be useless."""
    asked = request(*groups)
    try:
        capacities = divide_budget(asked, budget)
    except ConfigError:
        assert asked.total_bytes(64) > budget
        return
    used = sum(capacity.num_blocks * asked.block_bytes(capacity.group) for capacity in capacities)
    tokens = (max(capacity.num_blocks for capacity in capacities) - 1) * 16
    assert asked.total_bytes(64) <= used <= budget
    assert asked.total_bytes(tokens + 16) > budget or tokens == 4 * 64 or groups == (SLIDING,)


def test_a_sliding_pool_needs_no_more_than_its_windows() -> None:
    """With plenty of memory every sequence has its whole context in the full pool, its window in the sliding one."""
    full, sliding = divide_budget(request(FULL, SLIDING), 10**9)
    assert (full.num_blocks, sliding.num_blocks) == (4 * 4 + 1, 4 * 4 + 1)
    full, sliding = divide_budget(request(FULL, SLIDING, max_model_len=640), 10**9)
    assert (full.num_blocks, sliding.num_blocks) == (4 * 40 + 1, 4 * 4 + 1)


def test_too_small_a_budget_names_the_knobs() -> None:
    """The error has the arithmetic and a number for each knob that would do."""
    with pytest.raises(ConfigError) as caught:
        divide_budget(request(FULL), 3 * 2048)
    words = "hold 32 tokens, one sequence of --max-model-len 64 needs 10,240 bytes"
    assert words in str(caught.value)
    assert "raise --kv-cache-memory to 10240 or lower --max-model-len to 32" in str(caught.value)
    assert divide_budget(request(FULL), 10240)
    assert divide_budget(request(FULL, max_model_len=32), 3 * 2048)
