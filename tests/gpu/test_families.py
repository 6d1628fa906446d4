"""Every family on the card, over one rank and several, says what it says on the CPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from peg.checkpoint.synth_config import RECIPES, SynthOptions
from peg.commands.synth import synth
from tests.gpu.cards import needs_card, on_card
from tests.parity.engines import Answer, answers, ask, running

pytestmark = [pytest.mark.gpu, needs_card]
WINDOW = 8
TOLERANCE = 1e-4
LENGTHS = (40, WINDOW - 1, WINDOW, WINDOW + 1, 17, 3, 2 * WINDOW, 100)
PROMPTS = [random.Random(seed).choices(range(10, 300), k=count) for seed, count in enumerate(LENGTHS)]


@pytest.fixture(scope="module", params=RECIPES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synth") / "model"
    synth(SynthOptions(family=request.param, window=WINDOW, dtype="float32"), folder)
    return folder


_ON_CPU: dict[Path, list[Answer]] = {}


async def said_on_cpu(family: Path) -> list[Answer]:
    if family not in _ON_CPU:
        _ON_CPU[family] = await answers(family, PROMPTS, 8, devices=("cpu",))
    return _ON_CPU[family]


@pytest.mark.parametrize("chunk", [7, 512])
@pytest.mark.parametrize("world_size", [1, 2, 4])
async def test_the_card_says_what_the_cpu_says(family: Path, world_size: int, chunk: int) -> None:
    """Scored and continued, alone and in a batch, whole or in chunks: every logprob of the vocabulary, and the ids."""
    expected = await said_on_cpu(family)
    async with running(family, **on_card(world_size), max_num_batched_tokens=chunk) as engine:
        alone = await ask(engine, PROMPTS[:1], 8)
        batch = await ask(engine, PROMPTS, 8)
        again = await ask(engine, PROMPTS, 8)
    for found, said in zip([*alone, *batch], [*expected[:1], *expected], strict=True):
        torch.testing.assert_close(found.logprobs, said.logprobs, atol=TOLERANCE, rtol=0)
        assert found.text == said.text
    assert [answer.generated for answer in again] == [answer.generated for answer in batch]
