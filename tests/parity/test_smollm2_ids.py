"""SmolLM2's real weights through the engine in fp32: the same ids however they are computed.

With `--whole` 20 prompts × 48 tokens (about ten minutes on two cores), else the last 7 prompts × 14 tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from peg.config import EngineConfig
from peg.engine import Engine
from peg.plan import SamplingParams, SequenceRequest
from peg.text.tokenizer import Tokenizer
from tests.parity.real_models import real_model

PROMPTS = (
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "Q: What is 17 + 25?\nA:",
    "In 1969, the first human",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three primary colours are",
    "1 2 3 4 5 6",
    "Ingredients:\n- flour\n- eggs\n",
    "import numpy as np\n",
    "La capitale de l'Italie est",
    "Shakespeare wrote",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "Once there was a robot who wanted to learn how to paint. Every day it went to the museum and",
    "SELECT name, age FROM users WHERE",
    "My favourite season is autumn because",
    "Photosynthesis is the process by which",
    "<|im_start|>user\nWrite a haiku about the sea.<|im_end|>\n<|im_start|>assistant\n",
    "日本の首都は",
)


def config(**changes: object) -> EngineConfig:
    base = EngineConfig(model="smollm2-135m", model_dir=real_model("smollm2-135m"), dtype="float32", max_model_len=512)
    return replace(base, **changes)  # type: ignore[arg-type]


Ids = tuple[int, ...]


@dataclass(frozen=True)
class Work:
    prompts: list[Ids]
    max_tokens: int


async def ids_of(engine_config: EngineConfig, work: Work, together: int) -> list[Ids]:
    """Greedy ids of every prompt, `together` of them at a time."""
    engine = Engine(engine_config)
    await engine.start()
    gate = asyncio.Semaphore(together)

    async def one(index: int, prompt: Ids) -> Ids:
        async with gate:
            stream = engine.submit(
                SequenceRequest(
                    request_id=str(index),
                    prompt_ids=prompt,
                    sampling=SamplingParams(temperature=0),
                    max_tokens=work.max_tokens,
                    ignore_eos=True,
                )
            )
            return tuple([token async for output in stream for token in output.token_ids])

    try:
        found = await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(work.prompts)))
        wants_preemption = engine_config.kv_cache_memory_bytes is not None
        assert (engine.stats().scheduler.counters.preemptions > 0) == wants_preemption
        return list(found)
    finally:
        await engine.close()


@pytest.fixture(scope="module")
def work(whole: bool) -> Work:
    tokenizer = Tokenizer.load(Path(real_model("smollm2-135m")))
    prompts = [tuple(tokenizer.encode(text)) for text in PROMPTS]
    return Work(prompts, 48) if whole else Work(prompts[13:], 14)


@pytest.fixture(scope="module")
def alone(work: Work) -> list[Ids]:
    """One rank, one prompt at a time, prefilled whole: what all others are compared with."""
    return asyncio.run(ids_of(config(), work, together=1))


# Bytes of 29 blocks of 4 tokens in fp32: one sequence of 112 tokens fits, several have to take turns.
TIGHT = 29 * 4 * 23040 * 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "together", "chunk", "kv_bytes"),
    [
        (1, 8, None, None),
        (1, 8, 1, None),
        (1, 8, 7, None),
        (1, 8, 16, TIGHT),
        (3, 1, 16, None),
        (3, 8, 1, None),
        (3, 8, 7, None),
        (3, 8, 16, TIGHT // 3),
        (3, 8, None, TIGHT // 3),
    ],
)
def test_same_ids(
    alone: list[Ids], work: Work, ranks: int, together: int, chunk: int | None, kv_bytes: int | None
) -> None:
    """Ids do not depend on ranks, batch mates, chunks or preemption. Slow: real weights."""
    lens = {"max_model_len": 112, "block_size": 4} if kv_bytes else {}
    changed = config(
        tensor_parallel_size=ranks, max_num_batched_tokens=chunk, kv_cache_memory_bytes=kv_bytes, max_num_seqs=8, **lens
    )
    assert asyncio.run(ids_of(changed, work, together)) == alone
