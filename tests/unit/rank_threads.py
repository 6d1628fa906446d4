"""Runs one function per rank on threads of its own, over a fresh group of communicators."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from peg.models.comm import Communicator
from peg.ranks.solo_comm import SoloComm
from peg.ranks.thread_comm import Rendezvous, ThreadComm

_T = TypeVar("_T")


def on_ranks(world_size: int, work: Callable[[Communicator], _T], timeout_s: float = 30.0) -> list[_T]:
    """What `work` returns on each rank."""
    rendezvous = Rendezvous(world_size, 0)
    comms: list[Communicator] = (
        [SoloComm(0)] if world_size == 1 else [ThreadComm(rendezvous, rank) for rank in range(world_size)]
    )
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(work, comm) for comm in comms]
        return [future.result(timeout_s) for future in futures]


def shard(logits: Tensor, world_size: int, rank: int) -> Tensor:
    """One rank's part of the vocabulary of [rows, V], padded with −inf to a multiple of the world size."""
    rows, vocab = logits.shape
    share = -(-vocab // world_size)
    padded = torch.full((rows, share * world_size), float("-inf"))
    padded[:, :vocab] = logits
    return padded[:, rank * share : (rank + 1) * share].contiguous()
