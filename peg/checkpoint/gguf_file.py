"""A GGUF file, opened and checked: its metadata as fields, its tensors by name, their rows as bf16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from peg.checkpoint.fields import Fields
from peg.errors import CheckpointError

_NAMES: tuple[str, ...] = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
_NAMES += ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
_TYPES = frozenset(GGMLQuantizationType[name] for name in _NAMES)
_CHUNK_ELEMENTS = 4 << 20
_T = TypeVar("_T")


class GgufFile:
    """A GGUF file of which everything but the tensors' contents has been read.

    Raises CheckpointError for a file that is damaged, truncated or holds a tensor type that peg cannot read.
    """

    def __init__(self, path: Path) -> None:
        try:
            reader = GGUFReader(path)
            values = {name: field.contents() for name, field in reader.fields.items()}
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        except (ValueError, KeyError, IndexError, OverflowError) as error:
            raise CheckpointError(f"{path}: not a GGUF file, truncated, or of an unknown kind: {error}") from error
        if reader.byte_order != "I":
            raise CheckpointError(f"{path}: written for a machine of the other byte order")
        self.path = path
        self.fields = Fields(values, str(path))
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = self.fields.text("general.architecture")
        unknown = [
            f"{tensor.name} is of type {tensor.tensor_type.name}"
            for tensor in reader.tensors
            if tensor.tensor_type not in _TYPES
        ]
        if unknown:
            raise CheckpointError(f"{path}: holds types that peg cannot read (it reads {', '.join(_NAMES)})", unknown)

    def strings(self, name: str) -> tuple[str, ...]:
        """A required list of strings."""
        return self._required(name, self.fields.strings(name))

    def integers(self, name: str) -> tuple[int, ...]:
        """A required list of integers, none below zero."""
        return self._required(name, self.fields.token_ids(name))

    def _required(self, name: str, value: _T | None) -> _T:
        if not value:
            raise CheckpointError(f"{self.path}: {name} is missing or empty")
        return value


def shape(tensor: ReaderTensor) -> tuple[int, ...]:
    """The shape as PyTorch has it: rows first (GGUF lists its dimensions the other way round)."""
    return tuple(int(size) for size in reversed(tensor.shape))


def read_bf16(tensor: ReaderTensor, row_order: NDArray[np.int64] | None, minus_one: bool) -> Iterator[Tensor]:
    """The tensor as bf16 [rows, columns], a few rows at a time so that memory stays bounded.

    With `row_order`, row i is the file's row row_order[i]. With `minus_one`, 1 is taken off in fp32 before rounding.
    """
    data = tensor.data.reshape(-1, tensor.data.shape[-1])
    step = max(1, _CHUNK_ELEMENTS * len(data) // tensor.n_elements)
    for start in range(0, len(data), step):
        rows = data[start : start + step] if row_order is None else data[row_order[start : start + step]]
        values = torch.from_numpy(np.array(dequantize(rows, tensor.tensor_type), dtype=np.float32))
        yield (values - 1 if minus_one else values).to(torch.bfloat16)
