"""Captured decode steps sample what the same steps launched one by one do, over one rank and several."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from peg.checkpoint.synth_config import SynthOptions
from peg.commands.synth import synth
from peg.engine import Engine
from peg.plan import SamplingParams, SequenceRequest
from tests.gpu.cards import needs_card, on_card
from tests.parity.engines import running

pytestmark = [pytest.mark.gpu, needs_card, pytest.mark.timeout(200)]
PROMPTS = [random.Random(seed).choices(range(10, 300), k=count) for seed, count in enumerate((40, 7, 9, 1, 100, 33, 5))]
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1, seed=3),
    SamplingParams(temperature=0.7, seed=1, top_k=20, top_p=0.9),
    SamplingParams(temperature=1, seed=9, presence_penalty=1.0),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, logprobs=3),
    SamplingParams(temperature=1, seed=2),
]


async def tokens(engine: Engine, params: list[SamplingParams], new_tokens: int = 40) -> list[list[int]]:
    """All prompts at once."""
    streams = [
        engine.submit(
            SequenceRequest(
                request_id=str(number),
                prompt_ids=tuple(prompt),
                sampling=sampling,
                max_tokens=new_tokens,
                ignore_eos=True,
            )
        )
        for number, (prompt, sampling) in enumerate(zip(PROMPTS, params, strict=True))
    ]
    return [[token async for output in stream for token in output.token_ids] for stream in streams]


async def said(folder: Path, **options: Any) -> list[list[int]]:
    """Rows of every kind together; greedy ones alone; twice."""
    async with running(folder, **options) as engine:
        mixed = [await tokens(engine, PARAMS) for _ in range(2)]
        greedy = [await tokens(engine, [SamplingParams(temperature=0)] * len(PROMPTS)) for _ in range(2)]
    assert mixed[0] == mixed[1]
    assert greedy[0] == greedy[1]
    return mixed[0] + greedy[0]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4-31b", "gemma4-e2b"])
async def test_graphs_on_and_off(family: str, world_size: int, tmp_path: Path) -> None:
    """The same ids, in bf16, for greedy, sampled, filtered, ruled and scored rows."""
    synth(SynthOptions(family=family, window=8), tmp_path / "model")
    options = on_card(world_size) | {"dtype": "bfloat16", "max_model_len": 256}
    captured = await said(tmp_path / "model", **options)
    eager = await said(tmp_path / "model", **options, enforce_eager=True)
    assert captured == eager
