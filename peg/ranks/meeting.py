"""How the ranks of one epoch find each other."""

from __future__ import annotations

from peg.ranks.device import Device
from peg.ranks.faults import PlainComm
from peg.ranks.nccl import Nccl
from peg.ranks.nccl_comm import NcclComm
from peg.ranks.solo_comm import SoloComm
from peg.ranks.thread_comm import Rendezvous, ThreadComm


class Meeting:
    """One epoch's communicators: each rank joins once, on its own thread. `nccl` is None for ranks on the CPU."""

    def __init__(self, world_size: int, epoch: int, nccl: Nccl | None) -> None:
        self.epoch = epoch
        self._rendezvous = Rendezvous(world_size, epoch)
        self._nccl = nccl
        self._unique_id = b"" if nccl is None or world_size == 1 else nccl.unique_id()

    def join(self, rank: int, device: Device) -> PlainComm:
        """Make a rank's communicator. With NCCL it returns once every rank has come."""
        if self._rendezvous.world_size == 1:
            return SoloComm(self.epoch)
        host = ThreadComm(self._rendezvous, rank)
        if self._nccl is None:
            return host
        finish = device.synchronize if device.shared else None
        comm = NcclComm(self._nccl, host, self._unique_id, device.stream, finish)
        comm.hold(device.place)
        return comm
