"""The NCCL communicator over a library that behaves as NCCL does: abort raises a flag, the last one waits and frees."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from peg.errors import CommAborted
from peg.ranks.nccl import Nccl
from peg.ranks.nccl_comm import NcclComm
from peg.ranks.thread_comm import Rendezvous, ThreadComm


class FakeNccl(Nccl):
    """Handles are ranks. The last abort of a group returns once `graphs` is clear, and only then frees them all."""

    def __init__(self) -> None:
        self.version = (2, 32, 3)
        self.calls: list[tuple[object, ...]] = []
        self.aborted: list[int] = []
        self.graphs = threading.Event()
        self.graphs.set()
        self.freed = False
        self.world_size = 0
        self.wrong: str | None = None
        self.inside: Callable[[], None] = lambda: None

    def connect(self, world_size: int, rank: int, unique_id: bytes) -> int:
        assert unique_id == b"id"
        self.world_size = world_size
        return rank

    def all_reduce(self, *arguments: int) -> None:
        self._call("all_reduce", *arguments)

    def all_gather(self, *arguments: int) -> None:
        self._call("all_gather", *arguments)

    def broadcast(self, *arguments: int) -> None:
        self._call("broadcast", *arguments)

    def error(self, comm: int) -> str | None:
        assert not self.freed, "looked at after it was freed"
        return self.wrong

    def abort(self, comm: int) -> None:
        self.aborted.append(comm)
        if len(self.aborted) == self.world_size:
            self.graphs.wait()
            self.freed = True

    def _call(self, *call: object) -> None:
        assert not self.freed, "used after it was freed"
        self.inside()
        assert not self.freed, "freed under a call"
        self.calls.append(call)


@pytest.fixture
def nccl() -> Iterator[FakeNccl]:
    fake = FakeNccl()
    yield fake
    fake.graphs.set()


def group(nccl: FakeNccl, world_size: int) -> list[NcclComm]:
    rendezvous = Rendezvous(world_size, 3)
    return [NcclComm(nccl, ThreadComm(rendezvous, rank), b"id", 100 + rank) for rank in range(world_size)]


def test_collectives_are_enqueued_with_addresses_and_codes(nccl: FakeNccl) -> None:
    """Every call names the tensor's address, count and dtype code, the communicator, and the rank's own stream."""
    comm = group(nccl, 2)[1]
    half, whole = torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(2, 3, 5, dtype=torch.bfloat16)
    comm.all_reduce_(half)
    comm.all_gather(whole, half)
    comm.broadcast_(half, root=0)
    assert nccl.calls == [
        ("all_reduce", half.data_ptr(), half.data_ptr(), 15, 9, 1, 101),
        ("all_gather", half.data_ptr(), whole.data_ptr(), 15, 9, 1, 101),
        ("broadcast", half.data_ptr(), half.data_ptr(), 15, 9, 0, 1, 101),
    ]


def test_tensors_that_nccl_would_misread_are_refused(nccl: FakeNccl) -> None:
    """NCCL sees an address and a count: rows that lie apart, nothing at all, or two dtypes are bugs."""
    comm = group(nccl, 2)[0]
    for tensor in (torch.zeros(4, 4)[:, :2], torch.zeros(0)):
        with pytest.raises(AssertionError):
            comm.all_reduce_(tensor)
    with pytest.raises(AssertionError):
        comm.all_gather(torch.zeros(2, 3), torch.zeros(3).half())
    assert nccl.calls == []


def test_abort_returns_at_once_and_every_rank_is_aborted_once(nccl: FakeNccl) -> None:
    """The last abort waits for graphs on a thread of its own; later calls name the reason."""
    comms = group(nccl, 3)
    nccl.graphs.clear()
    began = time.monotonic()
    for comm in (*comms, *comms):
        comm.abort("rank 2 fell over")
    assert time.monotonic() - began < 0.2
    for comm in comms:
        with pytest.raises(CommAborted, match="rank 2 fell over"):
            comm.all_reduce_(torch.zeros(4))
        assert comm.poll() == "rank 2 fell over"
    nccl.graphs.set()
    for comm in comms:
        comm.close(2)
    assert sorted(nccl.aborted) == [0, 1, 2]
    assert nccl.freed
    assert nccl.calls == []


def test_close_says_when_nccl_does_not_come_back(nccl: FakeNccl) -> None:
    """A graph that is still there keeps the last abort from returning: close ends by its deadline and says so."""
    comms = group(nccl, 2)
    nccl.graphs.clear()
    comms[0].close(2)
    with pytest.raises(TimeoutError, match="rank 1"):
        comms[1].close(0.3)


def test_an_abort_lets_a_rank_out_of_nccl_first(nccl: FakeNccl) -> None:
    """The rank is inside a call when its communicator is aborted: it is freed once the call has returned."""
    comm = group(nccl, 1)[0]
    entered, leave = threading.Event(), threading.Event()

    def inside() -> None:
        entered.set()
        leave.wait(5)

    nccl.inside = inside
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(comm.all_reduce_, torch.zeros(4))
        assert entered.wait(5)
        comm.abort("enough")
        time.sleep(0.05)
        assert nccl.aborted == []
        leave.set()
        call.result(5)
    comm.close(2)
    assert nccl.aborted == [0]


def test_a_rank_stuck_inside_nccl_is_aborted_all_the_same(nccl: FakeNccl) -> None:
    """Only the abort frees a rank that waits for its device inside a call, so it is not waited for long."""
    comm = group(nccl, 2)[0]
    entered = threading.Event()

    def inside() -> None:
        entered.set()
        while not nccl.aborted:
            time.sleep(0.001)

    nccl.inside = inside
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(comm.all_reduce_, torch.zeros(4))
        assert entered.wait(5)
        comm.abort("enough")
        call.result(5)
    assert nccl.aborted == [0]


def test_an_asynchronous_error_is_found_by_poll(nccl: FakeNccl) -> None:
    """What NCCL reports on the side is a reason, naming the rank; without, and without an abort, there is none."""
    comm = group(nccl, 2)[1]
    assert comm.poll() is None
    nccl.wrong = "unhandled cuda error"
    assert comm.poll() == "NCCL on rank 1: unhandled cuda error"


def test_a_barrier_meets_on_the_host_and_an_abort_wakes_it(nccl: FakeNccl) -> None:
    """Two ranks meet; a lone one is woken by an abort, with its reason, or gives up at its deadline."""
    comms = group(nccl, 2)
    with ThreadPoolExecutor(2) as pool:
        for met in [pool.submit(comm.barrier, 5) for comm in comms]:
            met.result(5)
        lone = pool.submit(comms[0].barrier, 5)
        time.sleep(0.05)
        comms[1].abort("enough")
        with pytest.raises(CommAborted, match="enough"):
            lone.result(1)
    with pytest.raises(TimeoutError):
        group(nccl, 2)[0].barrier(0.05)
    assert nccl.calls == []


def test_ranks_of_one_gpu_launch_nothing_beside_a_collective(nccl: FakeNccl) -> None:
    """Nobody enqueues a collective before all have come to it, nobody goes on before his stream is done with it."""
    rendezvous = Rendezvous(2, 3)
    done: list[int] = []
    comms = [NcclComm(nccl, ThreadComm(rendezvous, rank), b"id", 1, partial(done.append, rank)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(comms[0].all_reduce_, torch.zeros(4))
        time.sleep(0.05)
        assert nccl.calls == []
        assert comms[0].waits
        comms[1].all_reduce_(torch.zeros(4))
        early.result(1)
        assert sorted(done) == [0, 1]
        replayed: list[int] = []
        early = pool.submit(comms[0].replay, lambda: replayed.append(0))
        time.sleep(0.05)
        assert replayed == [0]
        assert not early.done()
        comms[1].replay(lambda: replayed.append(1))
        early.result(1)
        lone = pool.submit(comms[0].all_reduce_, torch.zeros(4))
        time.sleep(0.05)
        comms[1].abort("enough")
        with pytest.raises(CommAborted, match="enough"):
            lone.result(1)
    assert len(nccl.calls) == 2


def test_a_fault_strikes_inside_a_collective(nccl: FakeNccl) -> None:
    """`entered` is called in each collective before NCCL is; what it raises leaves no rank marked as inside."""
    comm = group(nccl, 1)[0]

    def strike() -> None:
        raise ValueError("struck")

    comm.entered = strike
    with pytest.raises(ValueError, match="struck"):
        comm.all_reduce_(torch.zeros(4))
    began = time.monotonic()
    comm.close(2)
    assert time.monotonic() - began < 0.2
    assert nccl.calls == []
