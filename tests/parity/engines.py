"""Runs prompts through whole engines: scheduler, ranks, caches, as the server would."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peg.config import EngineConfig
from peg.engine import Engine
from peg.plan import FinishReason, SamplingParams, SequenceRequest, TokenLogprobs
from peg.token_stream import TokenStream

SMALL: dict[str, Any] = {"dtype": "float32", "block_size": 4, "kv_cache_memory_bytes": 8 << 20, "max_model_len": 256}


@dataclass(frozen=True)
class Answer:
    """What came back for one prompt: an entry for each of its tokens but the first, then one a generated token."""

    prompt: list[int]
    scored: tuple[TokenLogprobs, ...]
    generated: tuple[TokenLogprobs, ...]

    @property
    def text(self) -> list[int]:
        return [*self.prompt, *(entry.token_id for entry in self.generated)]

    @property
    def logprobs(self) -> Tensor:
        """[text tokens − 1, V] where all of the vocabulary was listed."""
        return torch.tensor([[logprob for _, logprob in sorted(e.top)] for e in (*self.scored, *self.generated)])


@asynccontextmanager
async def running(directory: Path, **options: Any) -> AsyncIterator[Engine]:
    """A started engine of `SMALL` sizes unless `options` say otherwise."""
    engine = Engine(EngineConfig(model="small", model_dir=directory, **SMALL | options))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


async def ask(
    engine: Engine, prompts: Sequence[list[int]], new_tokens: int = 0, top: int | None = None
) -> list[Answer]:
    """Submit all at once, greedy, scored; `top` None lists the whole vocabulary."""
    top = engine.info.vocab_size if top is None else top
    streams = [
        engine.submit(
            SequenceRequest(
                request_id=str(number),
                prompt_ids=tuple(prompt),
                sampling=SamplingParams(temperature=0, logprobs=top),
                max_tokens=new_tokens,
                ignore_eos=True,
                prompt_logprobs=top,
            )
        )
        for number, prompt in enumerate(prompts)
    ]
    return [await _answer(prompt, stream) for prompt, stream in zip(prompts, streams, strict=True)]


async def _answer(prompt: list[int], stream: TokenStream) -> Answer:
    generated = [entry async for output in stream for entry in output.logprobs if entry is not None]
    assert stream.terminal is not None
    assert stream.terminal.reason is FinishReason.LENGTH, stream.terminal
    assert len(generated) == stream.terminal.completion_tokens
    return Answer(prompt, stream.prompt_logprobs, tuple(generated))


async def answers(directory: Path, prompts: Sequence[list[int]], new_tokens: int = 0, **options: Any) -> list[Answer]:
    """One engine for one batch."""
    async with running(directory, **options) as engine:
        return await ask(engine, prompts, new_tokens)
