"""Real weights against the reference: Gemma 3 270M, as the command line imports it, across its window of 512."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.parity.driver import Driver
from tests.parity.real_models import real_model
from tests.parity.reference import load_reference, reference_logits

WATER = "Water boils at a temperature of"


@pytest.fixture(scope="module")
def gemma3() -> Path:
    return real_model("gemma3-270m")


@pytest.fixture(scope="module")
def tokenizer(gemma3: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(gemma3 / "tokenizer.json"))


@pytest.fixture(scope="module")
def reference(gemma3: Path) -> Any:
    return load_reference(gemma3)


@pytest.mark.parametrize("count", [511, 512, 513, 1500])
def test_logprobs_equal_the_reference(
    gemma3: Path, tokenizer: tokenizers.Tokenizer, reference: Any, count: int
) -> None:
    """The last 40 positions of prompts around the window's edge and far behind it, in chunks of 200, fp32."""
    text = " ".join(f"The {word} number of the series is {word * word + 7}." for word in range(400))
    ids: list[int] = tokenizer.encode(text).ids[:count]
    assert len(ids) == count
    driver = Driver(gemma3, block=16)
    for first in range(0, count - 40, 200):
        driver.forward([(0, ids[first : min(first + 200, count - 40)])])
    logprobs = driver.step([(0, ids[-40:])])[0].log_softmax(-1)
    expected = reference_logits(reference, ids, 40).log_softmax(-1)
    difference = (logprobs - expected).abs()
    print(f"{count} tokens: max {difference.max():.2e}, mean {difference.mean():.2e}")
    assert difference.mean() <= 1e-3


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_greedy_ids_are_the_same_at_every_world_size(
    gemma3: Path, tokenizer: tokenizers.Tokenizer, world_size: int
) -> None:
    """Water boils at 100 degrees Celsius, over one rank, two and four."""
    driver = Driver(gemma3, world_size, block=16)
    logits = driver.step([(0, tokenizer.encode(WATER).ids)])[0][-1]
    ids = []
    for _ in range(7):
        ids.append(int(logits.argmax()))
        logits = driver.step([(0, ids[-1:])])[0][-1]
    assert tokenizer.decode(ids) == " 100 degrees Celsius."
