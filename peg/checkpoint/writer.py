"""Writes a safetensors file tensor by tensor; the library's own writer wants them all in memory at once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from peg.checkpoint.manifest import TensorSpec
from peg.checkpoint.progress import Progress


def write_bf16(path: Path, tensors: Sequence[tuple[TensorSpec, Iterable[Tensor]]], progress: Progress) -> None:
    """Write each tensor from its pieces, bf16 on the CPU, which in a row are the tensor in row-major order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    total = 0
    for spec, _ in tensors:
        end = total + 2 * math.prod(spec.shape)
        header[spec.name] = {"dtype": "BF16", "shape": spec.shape, "data_offsets": [total, end]}
        total = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        done = 0
        for _, pieces in tensors:
            for piece in pieces:
                done += out.write(piece.contiguous().view(torch.int16).numpy().data)
                progress.stage("import", done, total)
    assert done == total, f"{path}: {done} of {total} bytes of tensors were written"
