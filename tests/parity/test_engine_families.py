"""Every family through whole engines against the reference: chunks, batches and decode, at one, two and four ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peg.checkpoint.synth_config import PREFIXES, RECIPES, SynthOptions
from peg.commands.synth import synth
from tests.parity.engines import Answer, ask, running
from tests.parity.reference import load_reference, reference_logits

WINDOW = 8
TOLERANCE = 1e-4
LENGTHS = (40, WINDOW - 1, WINDOW, WINDOW + 1, 17, 3, 2 * WINDOW, 30)  # across the window's edge, and beyond it
CHUNKS = (1, 7, 16, 512)  # the last holds everything
VARIANTS = dict.fromkeys(RECIPES, PREFIXES[0]) | {"gemma3 with a tower": PREFIXES[1]}


class Expected:
    """A synthetic checkpoint, and what the reference says about texts."""

    def __init__(self, variant: str, directory: Path) -> None:
        self.directory = directory
        family, prefix = variant.split(maxsplit=1)[0], VARIANTS[variant]
        synth(SynthOptions(family=family, prefix=prefix, window=WINDOW, dtype="float32"), directory)
        self._model: Any = load_reference(directory)
        self._logprobs: dict[tuple[int, ...], Tensor] = {}

    def check(self, answer: Answer) -> None:
        """Each position of the prompt and of what was generated, the whole vocabulary, teacher-forced."""
        text = tuple(answer.text)
        if text not in self._logprobs:
            self._logprobs[text] = reference_logits(self._model, list(text)).log_softmax(-1)[:-1]
        torch.testing.assert_close(answer.logprobs, self._logprobs[text], atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module", params=VARIANTS)
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return Expected(request.param, tmp_path_factory.mktemp("synth") / "model")


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
async def test_engine_equals_the_reference(expected: Expected, world_size: int, chunk: int) -> None:
    """A prompt alone and among seven others, scored and continued: each token as if the text were prefilled whole."""
    prompts = [random.Random(seed).choices(range(10, 300), k=count) for seed, count in enumerate(LENGTHS)]
    options = {"tensor_parallel_size": world_size, "max_num_batched_tokens": chunk}
    async with running(expected.directory, **options) as engine:
        found = [*await ask(engine, prompts[:1], 4), *await ask(engine, prompts, 4)]
    for answer in found:
        assert len(answer.scored) == len(answer.prompt) - 1
        assert len(answer.generated) == 4
        expected.check(answer)
    assert found[0].text == found[1].text
