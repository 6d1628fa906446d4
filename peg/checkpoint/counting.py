"""What a rank's weights take: a model is loaded from tensors that have a shape and no numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from peg.checkpoint.manifest import Manifest
from peg.checkpoint.source import Placement, TensorSource


class CountingSource(TensorSource):
    """Every required tensor of a manifest on PyTorch's meta device: a family's own `load` says what it takes and pads.

    `bytes_held` counts what was handed out.
    """

    def __init__(self, manifest: Manifest, rank: int, world_size: int, dtype: torch.dtype) -> None:
        super().__init__(Placement(rank, world_size, dtype, torch.device("meta")))
        self.bytes_held = 0
        self._shapes = {spec.name: spec.shape for spec in manifest.required}

    def has(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def _read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        return torch.empty(self._shapes[name], device=self.device).narrow(dim, start, stop - start)

    def _zeros(self, name: str, dim: int, size: int, dtype: torch.dtype | None) -> Tensor:
        tensor = super()._zeros(name, dim, size, dtype)
        self.bytes_held += tensor.nbytes
        return tensor
