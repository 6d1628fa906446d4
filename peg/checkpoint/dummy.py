"""Random weights in place of files, for measuring a model that is not there."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from peg.checkpoint.manifest import Manifest
from peg.checkpoint.source import Placement, TensorSource

_SCALE = 0.02
# The sum of four uniform numbers of 16 bits is close to normal, and exact on every device.
_LANES = 4
_MEAN = _LANES * 0xFFFF // 2
_DEVIATION = math.sqrt(_LANES * (2**32 - 1) / 12)
_CHUNK_ELEMENTS = 4 << 20


class DummySource(TensorSource):
    """Every required tensor of a manifest, its entries about normal with a standard deviation of 0.02.

    Their mean is what the manifest says: norms and factors of 0.02 would silence whole layers.

    An entry depends on the seed, the tensor's name and its place in the whole tensor, on nothing else: the weights
    are the same at every world size and on every device. Owned by the rank's thread.
    """

    def __init__(self, manifest: Manifest, seed: int, placement: Placement) -> None:
        super().__init__(placement)
        self._shapes = {spec.name: spec.shape for spec in manifest.required}
        self._seed = seed
        self._mean = manifest.mean

    def has(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def _read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        shape = self._shapes[name]
        outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "little", signed=True)
        rows = torch.arange(outer, device=self.device)[:, None] * shape[dim]
        rows = (rows + torch.arange(start, stop, device=self.device)).view(-1, 1) * inner
        columns = torch.arange(inner, device=self.device)
        out = torch.empty(len(rows), inner, dtype=self.dtype, device=self.device)
        step = max(1, _CHUNK_ELEMENTS // inner)
        for first in range(0, len(rows), step):
            out[first : first + step] = _noise(key, rows[first : first + step] + columns)
        if mean := self._mean(name):
            out.add_(mean)
        return out.view(*shape[:dim], stop - start, *shape[dim + 1 :])


def _noise(key: int, index: Tensor) -> Tensor:
    """fp32 noise, one number for each index int64. The mixing steps are those of SplitMix64 (Steele et al. 2014)."""
    mixed = index.mul_(-0x61C8864680B583EB).add_(key)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        # The shift of signed numbers drags the sign along; the mask takes it off again.
        mixed.bitwise_xor_((mixed >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    total = sum((mixed >> (16 * lane)) & 0xFFFF for lane in range(_LANES))
    assert isinstance(total, Tensor)
    return (total - _MEAN).to(torch.float32).mul_(_SCALE / _DEVIATION)
