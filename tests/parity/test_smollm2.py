"""Real weights against the reference: SmolLM2-135M, as the command line imports it."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
import torch

from tests.parity.driver import Driver
from tests.parity.real_models import real_model
from tests.parity.reference import load_reference, reference_logits

TEXT = """The history of tea is long and complex, spreading across multiple cultures over thousands of years. It likely
originated in the southwest of China as a medicinal drink. def fibonacci(n): return n if n < 2 else fibonacci(n - 1) +
fibonacci(n - 2). In 1969, 600 million people watched two men walk on the Moon; it was 20 July, 20:17 UTC. Sur le pont
d'Avignon, l'on y danse, l'on y danse. SELECT name, count(*) FROM visits WHERE year >= 2020 GROUP BY name; """


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return real_model("smollm2-135m")


@pytest.fixture(scope="module")
def ids(smollm2: Path) -> list[int]:
    tokenizer = tokenizers.Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    encoded: list[int] = tokenizer.encode(TEXT * 4, add_special_tokens=False).ids[:512]
    assert len(encoded) == 512
    return encoded


@pytest.fixture(scope="module")
def expected(smollm2: Path, ids: list[int]) -> torch.Tensor:
    return reference_logits(load_reference(smollm2), ids).log_softmax(-1)


@pytest.mark.parametrize(("world_size", "count"), [(1, 512), (3, 200), (9, 100)])
def test_logprobs_equal_the_reference(
    smollm2: Path, ids: list[int], expected: torch.Tensor, world_size: int, count: int
) -> None:
    """Teacher-forced logprobs of the whole vocabulary, in fp32, in chunks of 150, within 1e-3."""
    logprobs = Driver(smollm2, world_size, block=16).score(ids[:count], 150).log_softmax(-1)
    difference = (logprobs - expected[:count]).abs()
    print(f"world size {world_size}, {count} tokens: max {difference.max():.2e}, mean {difference.mean():.2e}")
    assert difference.max() <= 1e-3


def test_bf16_is_as_close_to_fp32_as_the_reference_is(smollm2: Path, ids: list[int], expected: torch.Tensor) -> None:
    """The mean error of bf16 in the top 20 logprobs is at most 1.1 times the reference's own."""
    top = expected.topk(20).indices

    def error(logits: torch.Tensor) -> float:
        return float((logits.log_softmax(-1) - expected).gather(-1, top).abs().mean())

    ours = error(Driver(smollm2, dtype=torch.bfloat16, block=16).score(ids, 128))
    theirs = error(reference_logits(load_reference(smollm2, torch.bfloat16), ids))
    print(f"bf16 against fp32, mean: peg {ours:.4f}, reference {theirs:.4f}")
    assert ours <= 1.1 * theirs
