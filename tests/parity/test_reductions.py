"""The comparison with the reference fails for each way in which a reduction can go wrong."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from peg.kernels.norm import rms_norm_fp32
from peg.models import gemma3, gemma4
from peg.models.comm import Communicator
from tests.parity.driver import Driver
from tests.parity.reference import load_reference, reference_logits
from tests.parity.small_models import make_checkpoint

PROMPT = random.Random(0).choices(range(120), k=30)
RIGHT, WRONG = 1e-4, 1e-2  # what a right run stays under, and what each of these faults must exceed


class Changed:
    """A communicator whose reductions go through `reduce(comm, number, tensor)`; number 0 is the embedding's."""

    def __init__(self, comm: Communicator, reduce: Callable[[Communicator, int, Tensor], None]) -> None:
        self._comm = comm
        self._reduce = reduce
        self._number = -1

    def all_reduce_(self, tensor: Tensor) -> None:
        self._number += 1
        self._reduce(self._comm, self._number, tensor)


def worst(checkpoint: Path, reduce: Callable[[Communicator, int, Tensor], None]) -> float:
    """The largest difference from the reference's logits, over two ranks."""
    driver = Driver(checkpoint, 2)
    comms: list[Any] = [Changed(comm, reduce) for comm in driver.comms]
    driver.comms = comms
    inputs = driver._inputs([(0, PROMPT)])
    hidden = list(driver.pool.map(lambda rank: driver._run(rank, inputs), range(2)))
    logits = torch.cat([model.logits(part) for model, part in zip(driver.models, hidden, strict=True)], -1)
    expected = reference_logits(load_reference(checkpoint), PROMPT)
    return float((logits[:, : expected.shape[1]] - expected).abs().max())


@pytest.mark.parametrize("variant", ["llama", "qwen3", "gemma3", "gemma4 e4b"])
def test_each_reduction_is_needed(variant: str, tmp_path: Path) -> None:
    """Leaving out any one reduction is seen; leaving out none is not."""
    checkpoint = make_checkpoint(variant, tmp_path)
    numbers: set[int] = set()

    def all_of_them(comm: Communicator, number: int, tensor: Tensor) -> None:
        numbers.add(number)
        comm.all_reduce_(tensor)

    assert worst(checkpoint, all_of_them) <= RIGHT
    for skipped in numbers:

        def all_but_one(comm: Communicator, number: int, tensor: Tensor, skipped: int = skipped) -> None:
            if number != skipped:
                comm.all_reduce_(tensor)

        assert worst(checkpoint, all_but_one) >= WRONG, f"reduction {skipped} of {len(numbers)}"


@pytest.mark.parametrize(("variant", "module"), [("gemma3", gemma3), ("gemma4 31b", gemma4)])
def test_the_reduction_comes_before_the_norm(
    variant: str, module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum of norms is not the norm of the sum: text stays plausible, so only numbers show it."""
    here = threading.local()

    def put_off(comm: Communicator, number: int, tensor: Tensor) -> None:
        here.comm = comm
        if number == 0:
            comm.all_reduce_(tensor)

    def norm_then_reduce(
        x: Tensor, residual: Tensor, weight: Tensor, next_weight: Tensor, eps: float, scale: Tensor | None = None
    ) -> Tensor:
        normed = rms_norm_fp32(x, weight, eps)
        here.comm.all_reduce_(normed)
        residual.add_(normed).mul_(1 if scale is None else scale)
        return rms_norm_fp32(residual, next_weight, eps)

    monkeypatch.setattr(module, "rms_norm_add_rms_norm_", norm_then_reduce)
    assert worst(make_checkpoint(variant, tmp_path), put_off) >= WRONG
