"""Llama against the reference, on small random checkpoints."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.parity.driver import Driver
from tests.parity.reference import load_reference, reference_logits, save_random

TOLERANCE = 1e-4
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "untied": {"num_key_value_heads": 4, "vocab_size": 101, "intermediate_size": 50},
    "wide heads": {"num_key_value_heads": 2, "head_dim": 24},
    "linear": {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e4}},
    "llama3": {
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 1e4,
        },
    },
}
SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(100), k=count)


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(**SMALL | VARIANTS[request.param])
    return save_random(config, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def prompts(checkpoint: Path) -> list[tuple[list[int], Tensor]]:
    model = load_reference(checkpoint)
    drawn = [tokens(count, seed) for seed, count in enumerate((90, 5, 33, 16, 1, 40, 64, 17))]
    return [(prompt, reference_logits(model, prompt)) for prompt in drawn]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_prefill_equals_reference(checkpoint: Path, prompts: list[tuple[list[int], Tensor]], world_size: int) -> None:
    """Whole prompts and chunks of 1, 7 and 16 give the reference's logits at every position and world size."""
    driver = Driver(checkpoint, world_size)
    prompt, expected = prompts[0]
    for chunk in (0, 1, 7, 16):
        torch.testing.assert_close(driver.score(prompt, chunk), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_mixed_batch_equals_reference(
    checkpoint: Path, prompts: list[tuple[list[int], Tensor]], world_size: int
) -> None:
    """Eight sequences, prefilling and decoding in the same steps, each get the reference's logits."""
    driver = Driver(checkpoint, world_size)
    drawn = random.Random(1)
    done = [0] * len(prompts)
    while pieces := [
        (seq, prompt[done[seq] : done[seq] + drawn.choice((1, 1, 1, 2, 9))])
        for seq, (prompt, _) in enumerate(prompts)
        if done[seq] < len(prompt)
    ]:
        for (seq, piece), logits in zip(pieces, driver.step(pieces), strict=True):
            expected = prompts[seq][1][done[seq] : done[seq] + len(piece)]
            torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
            done[seq] += len(piece)
