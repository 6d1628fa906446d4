"""Where a rank's weights come from, as a model asks for them: whole tensors, parts, its own shard of a dimension."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


def shard_size(size: int, world_size: int) -> int:
    """What one rank gets of a dimension that is padded with zeros to the next multiple of the world size."""
    return -(-size // world_size)


class TensorSource(ABC):
    """One rank's view of the weights. Every call returns a new contiguous tensor in `dtype` on `device`.

    Owned by the rank's thread. `bytes_read` counts what was taken from the files.
    """

    def __init__(self, rank: int, world_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.dtype = dtype
        self.device = device
        self.bytes_read = 0

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether an optional tensor is there."""

    @abstractmethod
    def _read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Entries `start` to `stop - 1` along `dim`; 0 ≤ start < stop ≤ size."""

    def whole(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor, as every rank holds it."""
        return self.part(name, 0, 0, self.shape(name)[0], dtype)

    def part(self, name: str, dim: int, start: int, stop: int, dtype: torch.dtype | None = None) -> Tensor:
        """Entries `start` to `stop - 1` along `dim`, which must lie inside the tensor: heads, experts, halves."""
        size = self.shape(name)[dim]
        assert 0 <= start < stop <= size, f"{name}: [{start}, {stop}) of {size} along dimension {dim}"
        return self._read(name, dim, start, stop).to(self.device, dtype or self.dtype).contiguous()

    def shard(self, name: str, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """This rank's share of `dim`, padded with zeros to the next multiple of the world size."""
        shape = list(self.shape(name))
        size, share = shape[dim], shard_size(shape[dim], self.world_size)
        start = min(self.rank * share, size)
        stop = min(start + share, size)
        if stop - start == share:
            return self.part(name, dim, start, stop, dtype)
        shape[dim] = share
        padded = torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)
        if start < stop:
            padded.narrow(dim, 0, stop - start).copy_(self.part(name, dim, start, stop, dtype))
        return padded
