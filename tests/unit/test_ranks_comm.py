"""The communicator contract, for SoloComm and ThreadComm: one sequence on all ranks, same bits, abortable waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peg.errors import CommAborted, CommMismatch
from peg.models.comm import Communicator
from peg.ranks.solo_comm import SoloComm
from peg.ranks.thread_comm import Rendezvous, ThreadComm

_T = TypeVar("_T")
SOON_S = 5.0  # a bound no healthy wait comes near


def group(world_size: int) -> list[ThreadComm]:
    rendezvous = Rendezvous(world_size, 0)
    return [ThreadComm(rendezvous, rank) for rank in range(world_size)]


def launch(comms: Sequence[ThreadComm], work: Callable[[ThreadComm], _T]) -> list[Future[_T]]:
    """Run `work` on a thread per communicator, without waiting."""
    pool = ThreadPoolExecutor(len(comms))
    futures = [pool.submit(work, comm) for comm in comms]
    pool.shutdown(wait=False)
    return futures


def on_all(comms: Sequence[ThreadComm], work: Callable[[ThreadComm], _T]) -> list[_T]:
    return [future.result(SOON_S) for future in launch(comms, work)]


def errors(futures: Sequence[Future[None]]) -> list[BaseException | None]:
    return [future.exception(SOON_S) for future in futures]


def wait_until(told: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + SOON_S
    while not told():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("world_size", [1, 2, 3, 9])
def test_sum_is_taken_in_rank_order_and_rounded_once(world_size: int, dtype: torch.dtype) -> None:
    """Every rank gets the bits of fp32 additions in rank order, rounded once (integers: exact)."""
    generator = torch.Generator().manual_seed(world_size)
    parts = [(torch.randn(7, 5, generator=generator) * 100).to(dtype) for _ in range(world_size)]
    total = parts[0].clone() if dtype == torch.int64 else parts[0].float()
    for part in parts[1:]:
        total = total + part
    expected = total.to(dtype)

    def work(comm: ThreadComm) -> Tensor:
        tensor = parts[comm.rank].clone()
        comm.all_reduce_(tensor)
        return tensor

    for result in on_all(group(world_size), work):
        assert torch.equal(result, expected)


def test_gather_and_broadcast() -> None:
    """all_gather stacks in rank order, broadcast_ spreads its root's tensor, both on every rank."""

    def work(comm: ThreadComm) -> tuple[Tensor, Tensor]:
        out, mine = torch.empty(3, 2), torch.full((2,), float(comm.rank))
        comm.all_gather(out, mine)
        comm.broadcast_(mine, 1)
        return out, mine

    for out, mine in on_all(group(3), work):
        assert out.tolist() == [[0, 0], [1, 1], [2, 2]]
        assert mine.tolist() == [1, 1]


def test_solo_collectives_are_the_identity() -> None:
    """A group of one keeps every tensor as it is, and gathers it as the only row."""
    comm: Communicator = SoloComm(4)
    tensor, out = torch.tensor([1.0, 2.0]), torch.empty(1, 2)
    comm.all_reduce_(tensor)
    comm.broadcast_(tensor, 0)
    comm.all_gather(out, tensor)
    comm.barrier(0.0)
    assert tensor.tolist() == [1, 2]
    assert out.tolist() == [[1, 2]]
    assert (comm.rank, comm.world_size, comm.epoch, comm.poll()) == (0, 1, 4, None)
    comm.abort("first")
    comm.abort("second")
    assert comm.poll() == "first"
    with pytest.raises(CommAborted, match="first"):
        comm.all_reduce_(tensor)


Operation = Callable[[Communicator, Tensor], None]
OPERATIONS: dict[str, Operation] = {
    "reduce": lambda comm, tensor: comm.all_reduce_(tensor),
    "gather": lambda comm, tensor: comm.all_gather(tensor.new_empty(comm.world_size, *tensor.shape), tensor),
    "broadcast 0": lambda comm, tensor: comm.broadcast_(tensor, 0),
    "broadcast 1": lambda comm, tensor: comm.broadcast_(tensor, 1),
    "barrier": lambda comm, _: comm.barrier(SOON_S),
}
SHAPES = ((3,), (2, 2), (4,))
DTYPES = (torch.float32, torch.bfloat16)
calls = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.sampled_from(SHAPES), st.sampled_from(DTYPES))


def told(call: tuple[str, tuple[int, ...], torch.dtype]) -> object:
    """What the other ranks see of a call: a barrier has no tensor."""
    return call[0] if call[0] == "barrier" else call


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(calls, min_size=3, max_size=3), min_size=1, max_size=6), st.data())
def test_any_sequences_pair_or_fail_everywhere(
    steps: list[list[tuple[str, tuple[int, ...], torch.dtype]]], data: st.DataObject
) -> None:
    """Equal calls pass; at the first that differ every rank gets CommMismatch; later calls are refused. No hang."""
    equal = [data.draw(st.booleans()) for _ in steps]
    plan = [[row[0]] * 3 if same else row for row, same in zip(steps, equal, strict=True)]
    first_bad = next((n for n, row in enumerate(plan) if len({told(call) for call in row}) > 1), None)
    passed = [0, 0, 0]

    def work(comm: ThreadComm) -> None:
        for row in plan:
            name, shape, dtype = row[comm.rank]
            OPERATIONS[name](comm, torch.ones(shape, dtype=dtype))
            passed[comm.rank] += 1

    comms = group(3)
    outcomes = errors(launch(comms, work))
    if first_bad is None:
        assert outcomes == [None] * 3
        assert passed == [len(plan)] * 3
    else:
        assert [type(error) for error in outcomes] == [CommMismatch] * 3
        assert passed == [first_bad] * 3
        with pytest.raises(CommAborted, match="different collectives"):
            comms[0].barrier(1.0)


def test_mismatch_names_both_calls() -> None:
    """The message says what rank 0 and the other rank asked for, and both get it."""
    outcomes = errors(launch(group(2), lambda comm: comm.all_reduce_(torch.ones(2 + comm.rank))))
    for error in outcomes:
        assert isinstance(error, CommMismatch)
        assert "rank 0 all_reduce((2,), torch.float32), rank 1 all_reduce((3,), torch.float32)" in str(error)


@pytest.mark.parametrize("world_size", [2, 3, 9])
def test_abort_wakes_everyone_who_waits(world_size: int) -> None:
    """An abort from a thread of nobody's wakes all blocked ranks at once, each with the first reason."""
    comms = group(world_size)
    futures = launch(comms[1:], lambda comm: comm.all_reduce_(torch.ones(3)))
    wait_until(lambda: comms[0]._rendezvous._arrived == world_size - 1)
    began_s = time.monotonic()
    comms[0].abort("an operator")
    comms[1].abort("too late")
    outcomes = errors(futures)
    assert time.monotonic() - began_s < 1.0
    assert {(type(error), str(error)) for error in outcomes} == {(CommAborted, "an operator")}
    assert comms[0].poll() == "an operator"
    for comm in comms:
        with pytest.raises(CommAborted, match="an operator"):
            comm.barrier(1.0)


def test_abort_while_the_last_rank_works() -> None:
    """An abort while the last to arrive is summing does not wait for it, and wakes the others."""
    comms = group(2)
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        if comms[0]._rendezvous._arrived == 0:  # both have arrived: this is the last
            inside.set()
            assert go_on.wait(SOON_S)

    for comm in comms:
        comm.entered = hold
    futures = launch(comms, lambda comm: comm.all_reduce_(torch.ones(3)))
    assert inside.wait(SOON_S)
    began_s = time.monotonic()
    comms[0].abort("in the middle")
    assert time.monotonic() - began_s < 0.5
    go_on.set()
    assert [str(error) for error in errors(futures)] == ["in the middle"] * 2


def test_a_rank_that_fails_in_its_work_aborts_the_group() -> None:
    """An exception inside the work is raised on the rank that did it, and the others are not left waiting."""

    def work(comm: ThreadComm) -> None:
        comm._rendezvous.meet(comm.rank, ("odd",), (), lambda _: 1 // 0)  # type: ignore[arg-type]

    kinds = sorted(type(error).__name__ for error in errors(launch(group(3), work)))
    assert kinds == ["CommAborted", "CommAborted", "ZeroDivisionError"]


def test_barrier_has_a_deadline() -> None:
    """A rank that waits too long gets TimeoutError, and whoever comes later is told."""
    comms = group(2)
    with pytest.raises(TimeoutError, match=r"rank 0 waited over 0\.05 s"):
        comms[0].barrier(0.05)
    with pytest.raises(CommAborted, match="rank 0 waited"):
        comms[1].barrier(SOON_S)


def test_a_closed_end_refuses_and_leaves_its_peers_in_peace() -> None:
    """Closing one end right after a collective does not disturb a peer that is still on its way out of it."""
    comms = group(2)

    def work(comm: ThreadComm) -> None:
        for _ in range(50):
            comm.all_reduce_(torch.ones(3))
        comm.close(1.0)

    assert errors(launch(comms, work)) == [None, None]
    with pytest.raises(CommAborted, match="closed"):
        comms[0].all_reduce_(torch.ones(3))


def test_many_rounds_under_random_aborts_end() -> None:
    """Over many groups, an abort at a random moment ends every rank, none with a wrong sum before it."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        comms = group(3)

        def work(comm: ThreadComm) -> None:
            for turn in range(100_000):
                tensor = torch.full((4,), float(turn + comm.rank))
                comm.all_reduce_(tensor)
                assert tensor.tolist() == [3.0 * turn + 3] * 4

        futures = launch(comms, work)
        time.sleep(float(torch.rand(1, generator=generator)) * 0.01)
        comms[1].abort("now")
        assert {str(error) for error in errors(futures)} == {"now"}
