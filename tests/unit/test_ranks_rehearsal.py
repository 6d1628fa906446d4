"""What a rank rehearses is all that it ever launches: a kernel that is loaded later may wait for its peers for ever."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

import peg.kernels
from peg.checkpoint.synth_config import SynthOptions
from peg.commands.synth import synth
from peg.engine import Engine
from peg.plan import SamplingParams, SequenceRequest
from peg.ranks.cuda_device import _places
from peg.ranks.device import CpuDevice, HostArray
from peg.ranks.rehearsal import Rehearsal
from tests.parity.engines import running

PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1, seed=3),
    SamplingParams(temperature=0.7, seed=1, top_k=20, top_p=0.9),
    SamplingParams(temperature=1, seed=9, presence_penalty=1.0),
    SamplingParams(temperature=0, logprobs=3),
]
LENGTHS = (40, 7, 1, 100, 33)


class Launches:
    """Notes the form of every kernel that is launched, and launches none."""

    def __init__(self) -> None:
        self.forms: set[tuple[object, ...]] = set()

    def record(self, kernel: Any, arguments: Sequence[Any], options: dict[str, Any]) -> None:
        values = dict(zip(kernel.arg_names, arguments, strict=False)) | options
        self.forms.add((kernel.fn.__name__, *(self._form(param, values[param.name]) for param in kernel.params)))

    def _form(self, param: Any, value: Any) -> object:
        """What Triton compiles anew for."""
        if param.is_constexpr:
            return value
        if isinstance(value, Tensor):
            return value.dtype, param.do_not_specialize_on_alignment or value.data_ptr() % 16 == 0
        if isinstance(value, int) and not param.do_not_specialize:
            return value == 1, value % 16 == 0
        return type(value)


class FakeCard(CpuDevice):
    """Works by itself, and places what is uploaded as a GPU's staging does."""

    launches = True

    def upload(self, arrays: Sequence[HostArray]) -> list[Tensor]:
        offsets, size = _places([array.nbytes for array in arrays])
        there = np.zeros(size + 16, np.uint8)
        for array, offset in zip(arrays, offsets, strict=True):
            there[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        pieces = zip(arrays, offsets, strict=True)
        return [
            torch.from_numpy(there[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape))
            for array, offset in pieces
        ]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Kernels leave zeros behind, and every row samples token 5."""
    launches, empty = Launches(), torch.empty

    def launcher(kernel: Any, grid: object) -> Callable[..., None]:
        return lambda *arguments, **options: launches.record(kernel, arguments, options)

    monkeypatch.setattr(JITFunction, "__getitem__", launcher)
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).zero_())
    for module in pkgutil.iter_modules(peg.kernels.__path__):
        loaded = importlib.import_module(f"peg.kernels.{module.name}")
        if hasattr(loaded, "on_cpu"):
            monkeypatch.setattr(loaded, "on_cpu", lambda *_: False)
    monkeypatch.setattr("peg.ranks.runner.key_ids", lambda keys: torch.full_like(keys, 5))
    monkeypatch.setattr("peg.ranks.launched.read_tokens", lambda keys: (5,) * len(keys))
    monkeypatch.setattr("peg.ranks.group.open_devices", lambda _: (FakeCard(1),))
    return launches


async def ask(engine: Engine, lengths: Sequence[int], params: Sequence[SamplingParams], scored: int | None) -> None:
    streams = [
        engine.submit(
            SequenceRequest(
                request_id=str(number),
                prompt_ids=tuple(range(10, 10 + length)),
                sampling=sampling,
                max_tokens=5,
                ignore_eos=True,
                prompt_logprobs=scored,
            )
        )
        for number, (length, sampling) in enumerate(zip(lengths, params, strict=True))
    ]
    for stream in streams:
        async for _ in stream:
            pass
        assert stream.published_tokens == 5, stream.terminal


@pytest.mark.parametrize("family", ["llama", "gemma4-31b"])
async def test_nothing_new_is_launched_after_the_start(family: str, launches: Launches, tmp_path: Path) -> None:
    """Rows of every kind, together and alone, scored, chunked and continued, launch forms that the start did."""
    synth(SynthOptions(family=family, window=32), tmp_path / "model")
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, "dtype": "bfloat16"}
    async with running(tmp_path / "model", **options, enforce_eager=True) as engine:
        rehearsed = set(launches.forms)
        for scored in (None, 2):
            await ask(engine, LENGTHS, PARAMS, scored)
        for length, params in zip(LENGTHS, PARAMS, strict=True):
            await ask(engine, [length], [params], None)
    assert len(rehearsed) > 15
    assert launches.forms == rehearsed


def test_the_most_memory_that_a_step_can_take_is_taken() -> None:
    """As many targets as are ever scored at once; every row drawn in all ways at once. Later memory may wait for ever.

    An allocation that asks the driver can wait for the whole GPU, on which a peer may wait for this rank.
    """
    rehearsal = Rehearsal(chunk=64, targets=33, batches=(1, 2, 8), context=256, num_groups=1, block_size=16)
    plans = list(rehearsal.plans())
    assert max(len(piece.targets) for plan in plans for piece in plan.slices) == 33
    (full,) = (plan for plan in plans if len(plan.new_rows) == 8 and len(plan.released_rows) == 8)
    for new, piece in zip(full.new_rows, full.slices, strict=True):
        params = new.params
        assert params.temperature > 0
        assert 0 not in (params.top_k, params.min_p, params.presence_penalty, params.frequency_penalty)
        assert 1 not in (params.top_p, params.repetition_penalty)
        assert None not in (params.allowed_token_ids, params.logprobs, piece.mask)
        assert params.bad_words
        assert params.logit_bias
        assert params.min_tokens > 1
        assert piece.samples
