"""Reads one rank's slices out of safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from peg.checkpoint.source import Placement, TensorSource
from peg.checkpoint.weights import StoredTensor


class ShardReader(TensorSource):
    """The weights in `stored`, as `open_weights` found them. A file is opened once, and let go with the reader.

    Owned by the rank's thread; each rank has its own.
    """

    def __init__(self, stored: Mapping[str, StoredTensor], placement: Placement) -> None:
        super().__init__(placement)
        self._stored = stored
        self._files: dict[Path, safe_open] = {}

    def has(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def _read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        stored = self._stored[name]
        if stored.path not in self._files:
            self._files[stored.path] = safe_open(stored.path, framework="pt")
        index = (*[slice(None)] * dim, slice(start, stop))
        tensor: Tensor = self._files[stored.path].get_slice(stored.name)[index]  # type: ignore[no-untyped-call]
        self.bytes_read += tensor.nbytes
        return tensor
