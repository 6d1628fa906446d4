"""Communicators over real NCCL, several ranks of one process on one card."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from peg.errors import CommAborted
from peg.ranks.cuda_device import CudaDevice
from peg.ranks.meeting import Meeting
from peg.ranks.nccl import Nccl
from peg.ranks.nccl_comm import NcclComm
from tests.gpu.cards import needs_card, on_card

pytestmark = [pytest.mark.gpu, needs_card]
SOON_S = 10.0


class Ranks:
    """A thread for each rank, with a device of its own, and their communicators of one epoch."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.nccl = Nccl()
        self.devices = [CudaDevice(0, world_size, 0.5) for _ in range(world_size)]
        self.pools = [ThreadPoolExecutor(1) for _ in range(world_size)]
        self.each(lambda rank: self.devices[rank].enter())
        self.comms: list[NcclComm] = []

    def each(self, work: Callable[[int], Any]) -> list[Any]:
        """The same on every rank's own thread, at once."""

        def run(rank: int) -> Any:
            with torch.inference_mode():
                return work(rank)

        futures = [pool.submit(run, rank) for rank, pool in enumerate(self.pools)]
        return [future.result(timeout=60) for future in futures]

    def connect(self, epoch: int) -> None:
        meeting = Meeting(self.world_size, epoch, self.nccl)
        joined = self.each(lambda rank: meeting.join(rank, self.devices[rank]))
        self.comms = [comm for comm in joined if isinstance(comm, NcclComm)]
        assert len(self.comms) == self.world_size

    def close(self) -> None:
        self.each(lambda rank: self.comms[rank].close(SOON_S))
        for pool in self.pools:
            pool.shutdown()


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    on_card(request.param)
    ranks = Ranks(request.param)
    ranks.connect(0)
    yield ranks
    ranks.close()


def drawn(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def enqueue(comm: NcclComm, tensor: Tensor) -> None:
    """A sum as a captured step launches it: without meeting the others."""
    launch, pointer = comm._nccl.all_reduce, tensor.data_ptr()
    launch(pointer, pointer, tensor.numel(), 7, comm._comm, comm._stream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_are_right_and_the_same_bits_everywhere(ranks: Ranks, dtype: torch.dtype) -> None:
    """All ranks get the same numbers, within a few roundings of the exact sum."""
    for shape in ((1, 576), (7, 5376), (1000, 2048)):
        parts = [drawn(rank, dtype, *shape) for rank in range(ranks.world_size)]
        # An allocation may wait for the whole card, so nobody allocates while somebody waits in a collective.
        there = ranks.each(lambda rank: parts[rank].cuda())  # noqa: B023 (used before the next turn)
        ranks.each(lambda rank: ranks.comms[rank].all_reduce_(there[rank]))  # noqa: B023
        sums = ranks.each(lambda rank: there[rank].cpu())  # noqa: B023
        exact = torch.stack([part.double() for part in parts]).sum(0)
        assert all(torch.equal(one, sums[0]) for one in sums)
        limit = ranks.world_size * 4 * torch.finfo(dtype).eps
        assert ((sums[0].double() - exact).abs() <= limit).all()


def test_gathers_and_broadcasts(ranks: Ranks) -> None:
    """Everyone gets everyone's part in rank order, and the root's tensor."""

    def put(rank: int) -> tuple[Tensor, Tensor]:
        mine = torch.arange(6).view(2, 3).cuda() + 10 * rank
        return mine.new_full((ranks.world_size, 2, 3), -1), mine

    there = ranks.each(put)
    ranks.each(lambda rank: ranks.comms[rank].all_gather(*there[rank]))
    ranks.each(lambda rank: ranks.comms[rank].broadcast_(there[rank][1], 1))
    for every, mine in ranks.each(lambda rank: (there[rank][0].cpu(), there[rank][1].cpu())):
        assert torch.equal(every, torch.arange(6).view(1, 2, 3) + 10 * torch.arange(ranks.world_size)[:, None, None])
        assert torch.equal(mine, torch.arange(6).view(2, 3) + 10)


def test_a_hang_is_aborted_and_the_next_epoch_works(ranks: Ranks) -> None:
    """A rank that never comes leaves kernels spinning; aborts end them within a second, and new ones connect."""
    ones = ranks.each(lambda _: torch.ones(64, 576, device="cuda"))
    for epoch in range(1, 4):
        event = threading.Event()

        def work(rank: int, event: threading.Event = event) -> float:
            if rank == ranks.world_size - 1:
                event.wait()
                with pytest.raises(CommAborted, match="too late"):
                    ranks.comms[rank].all_reduce_(ones[rank])
                return 0.0
            for _ in range(20):
                enqueue(ranks.comms[rank], ones[rank])
            landing = ranks.devices[rank].fetch([])
            time.sleep(0.1)
            assert not landing.done()
            event.wait()
            began_s = time.monotonic()
            while not landing.done():
                time.sleep(0.001)
            return time.monotonic() - began_s

        def abort(event: threading.Event = event) -> None:
            time.sleep(0.5)
            for comm in ranks.comms:
                comm.abort("too late")
            event.set()

        helper = threading.Thread(target=abort)
        helper.start()
        drained_s = max(ranks.each(work))
        helper.join()
        print(f"{ranks.world_size} ranks: drained {drained_s:.3f} s after the abort")
        assert drained_s < 1.0
        assert all(comm.poll() == "too late" for comm in ranks.comms)
        ranks.each(lambda rank: ranks.comms[rank].close(SOON_S))
        ranks.connect(epoch)
        ranks.each(lambda rank: ones[rank].fill_(1))
        ranks.each(lambda rank: ranks.comms[rank].all_reduce_(ones[rank]))
        assert ranks.each(lambda rank: ones[rank].unique().tolist()) == [[ranks.world_size]] * ranks.world_size
