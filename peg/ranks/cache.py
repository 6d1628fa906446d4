"""The paged KV pools of one rank, and the digest of what it stored in them itself."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from peg.kernels.heads import Angles, HeadRules, store_heads
from peg.models.inputs import LayerCache
from peg.plan import GroupCapacity, Recurrent
from peg.ranks.device import HostArray


class WriteDigest:
    """A running hash of everything that was stored: by which layer, at which slots, for which rows, in which order.

    It is told by the code that stores, after it stored, and never by the plan. So ranks whose digests agree have
    filled the same slots, layer by layer. Owned by the rank's thread.
    """

    __slots__ = ("_checksums", "_groups", "_slots", "_writes", "value")

    def __init__(self) -> None:
        self.value = 0
        self._slots: tuple[Tensor, ...] = ()
        self._groups: dict[int, int] = {}  # by the `id` of their slots
        self._checksums: tuple[int, ...] = ()
        self._writes: list[tuple[int, int]] = []

    @property
    def writes(self) -> tuple[tuple[int, int], ...]:
        """Which layers stored since the step began, in order, each with the number of its group."""
        return tuple(self._writes)

    def begin(self, slots: Iterable[tuple[Tensor, HostArray]]) -> None:
        """A step begins: the slots of each group as they are on the device, and as they are on the host."""
        self._slots, host = zip(*slots, strict=True)
        self._groups = {id(there): group for group, there in enumerate(self._slots)}
        self._checksums = tuple(zlib.crc32(here.tobytes()) for here in host)
        self._writes.clear()

    def stored(self, layer: int, slots: Tensor) -> None:
        """K and V went to `slots`, which all layers of a group share."""
        group = self._groups.get(id(slots))
        assert group is not None, "K and V were stored at slots that are not the step's"
        self._writes.append((layer, group))
        self.value = hash((self.value, layer, self._checksums[group]))

    def replayed(self, writes: Sequence[tuple[int, int]], slots: Sequence[HostArray]) -> None:
        """A captured step was launched: the layers that stored when it was captured store at these slots."""
        checksums = [zlib.crc32(here.tobytes()) for here in slots]
        for layer, group in writes:
            self.value = hash((self.value, layer, checksums[group]))

    def advanced(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """A step ended: these rows hold so many tokens now."""
        self.value = hash((self.value, *rows, *tokens))
        self._slots, self._groups = (), {}


class PagedCache:
    """One layer's pool: k and v, model dtype [N, B, G, D]. See `peg.models.inputs.LayerCache`."""

    __slots__ = ("_digest", "_layer", "k", "v")

    def __init__(self, layer: int, k: Tensor, v: Tensor, digest: WriteDigest) -> None:
        self.k = k
        self.v = v
        self._layer = layer
        self._digest = digest

    def write(self, heads: Tensor, rules: HeadRules, angles: Angles, slots: Tensor) -> Tensor:
        """Store K and V of heads [T, N, D] at `slots` int64 [T], and count them; return Q [T, H, D]."""
        q = store_heads(heads, rules, angles, self.k, self.v, slots)
        self._digest.stored(self._layer, slots)
        return q


class _NoCache:
    """Stands for a layer that stores nothing, as it reads another's K and V: whoever looks here has a bug."""

    @property
    def k(self) -> Tensor:
        raise AssertionError("this layer has no cache of its own")

    v = k

    def write(self, heads: Tensor, rules: HeadRules, angles: Angles, slots: Tensor) -> Tensor:
        raise AssertionError("this layer has no cache of its own")


def make_caches(
    capacities: Sequence[GroupCapacity],
    num_layers: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    digest: WriteDigest,
) -> list[LayerCache]:
    """Allocate the pools of one rank; one entry per layer."""
    caches: list[LayerCache] = [_NoCache()] * num_layers
    for capacity in capacities:
        group = capacity.group
        assert not isinstance(group, Recurrent), "refused when the blueprint was drawn"
        shape = (capacity.num_blocks, block_size, group.kv_heads, group.head_dim)
        for layer in group.layers:
            caches[layer] = PagedCache(layer, _zeros(shape, dtype, device), _zeros(shape, dtype, device), digest)
    return caches


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that on a CPU take memory only once they are written to; torch.zeros touches every page."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
