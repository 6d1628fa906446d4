"""A matrix product with a weight that is known long before it is used, and so can lie as the device likes it best.

On a CPU with bf16 instructions oneDNN reads its own blocked layout twice as fast as rows in one-token decode
(measured on two cores with AMX: 23 against 13 GB/s over the matrices of a 135 M model). Everywhere else the weight
stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

_PACKED_FOR_ROWS = 16  # a layout chosen for 16 rows is as good for 1 as one chosen for 1, and better for hundreds


class Linear(Protocol):
    """x [T, K] of the weight's dtype to x · weightᵀ [T, N] of the same dtype, accumulated in fp32."""

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """The reference, and what CUDA and fp32 use. weight [N, K]."""

    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


@dataclass(frozen=True, slots=True)
class OneDnnLinear:
    """A bf16 weight [N, K] in oneDNN's own layout; it cannot be read any other way."""

    packed: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.packed, None, "none", [], "")  # noqa: SLF001
        return product


def pack(weight: Tensor) -> Linear:
    """Take `weight` [N, K] over in the layout that is quickest where it lies; the caller drops its own reference.

    One who goes on reading it, as an embedding perhaps, pays with a second copy on a CPU with bf16 instructions.
    """
    if weight.is_cpu and weight.dtype == torch.bfloat16 and _has_bf16_products():
        return OneDnnLinear(torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS))  # noqa: SLF001
    return PlainLinear(weight)


def _has_bf16_products() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
