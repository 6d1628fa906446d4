"""What the tests on a card skip by, and how they start a group on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from peg.ranks.nccl import Nccl

needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing was run on one")


def on_card(world_size: int) -> dict[str, Any]:
    """Options of a group whose ranks share the first GPU. Skips, with the reason, where the NCCL here cannot."""
    if world_size > 1:
        version = Nccl().version
        if version < (2, 30, 0):
            pytest.skip(f"NCCL {version}: several ranks on one GPU were not run; PEG_NCCL_LIBRARY names a newer one")
    return {"devices": ("0",) * world_size, "tensor_parallel_size": world_size, "max_num_seqs": 16}
