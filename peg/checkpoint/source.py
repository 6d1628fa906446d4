"""Where a rank's weights come from, as a model asks for them: whole tensors, parts, its own shard of a dimension."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


def shard_size(size: int, world_size: int) -> int:
    """What one rank gets of a dimension that is padded with zeros to the next multiple of the world size."""
    return -(-size // world_size)


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rank of how many the weights are for, in which dtype and on which device."""

    rank: int
    world_size: int
    dtype: torch.dtype
    device: torch.device


class TensorSource(ABC):
    """One rank's view of the weights. Every call returns a new contiguous tensor on `device`, in `dtype` by default.

    Owned by the rank's thread. `bytes_read` counts what was taken from files; another thread may look at it.
    """

    def __init__(self, placement: Placement) -> None:
        self.rank = placement.rank
        self.world_size = placement.world_size
        self.dtype = placement.dtype
        self.device = placement.device
        self.bytes_read = 0

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether an optional tensor is there."""

    @abstractmethod
    def _read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Entries `start` to `stop - 1` along `dim`, in any dtype and place; may be a view of a file."""

    def whole(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor, as every rank holds it."""
        return self.part(name, 0, 0, self.shape(name)[0], dtype)

    def part(self, name: str, dim: int, start: int, stop: int, dtype: torch.dtype | None = None) -> Tensor:
        """Entries `start` to `stop - 1` along `dim`, which must lie inside the tensor: heads, experts, halves."""
        size = self.shape(name)[dim]
        assert 0 <= start < stop <= size, f"{name}: [{start}, {stop}) of {size} along dimension {dim}"
        out = self._zeros(name, dim, stop - start, dtype)
        out.copy_(self._read(name, dim, start, stop))
        return out

    def shard(self, name: str, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """This rank's share of `dim`, padded with zeros to the next multiple of the world size."""
        size = self.shape(name)[dim]
        share = shard_size(size, self.world_size)
        start = min(self.rank * share, size)
        stop = min(start + share, size)
        out = self._zeros(name, dim, share, dtype)
        if start < stop:
            out.narrow(dim, 0, stop - start).copy_(self._read(name, dim, start, stop))
        return out

    def _zeros(self, name: str, dim: int, size: int, dtype: torch.dtype | None) -> Tensor:
        shape = list(self.shape(name))
        shape[dim] = size
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)
