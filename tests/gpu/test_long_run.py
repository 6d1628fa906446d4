"""Ten thousand steps of mixed load on a card leave its memory as it was when the engine became ready."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from peg.checkpoint.synth_config import SynthOptions
from peg.commands.synth import synth
from peg.engine import Engine
from peg.plan import SamplingParams, SequenceRequest, StepPlan
from tests.gpu.cards import needs_card, on_card
from tests.parity.engines import running

pytestmark = [pytest.mark.gpu, needs_card, pytest.mark.timeout(300)]
STEPS = 10_000
SHARED = "PEG_CARD_IS_SHARED" in os.environ


@dataclass(frozen=True)
class Held:
    """What the process holds of the card: the allocator's segments, and kernels.

    `used_bytes` is what all processes hold: it is looked at only where a test has the card to itself.
    """

    used_bytes: int = field(compare=not SHARED)
    reserved_bytes: int
    segments: int
    allocations: int
    kernels: int

    @classmethod
    def now(cls) -> Held:
        free, total = torch.cuda.mem_get_info()
        stats = torch.cuda.memory_stats()
        return cls(
            total - free,
            stats["reserved_bytes.all.current"],
            stats["segment.all.current"],
            stats["segment.all.allocated"],
            loaded_kernels(),
        )


def loaded_kernels() -> int:
    """How many compiled forms of peg's kernels are loaded."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("peg.kernels.")]
    kernels = {value for module in modules for value in vars(module).values() if isinstance(value, triton.JITFunction)}
    return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())


def drawn(dice: random.Random, number: int) -> SequenceRequest:
    """A request of any kind: greedy or sampled, filtered, ruled, scored, short or long."""
    sampling: dict[str, Any] = {"temperature": dice.choice((0.0, 0.7, 1.0)), "seed": number}
    if dice.random() < 0.3:
        sampling |= {"top_k": dice.choice((0, 1, 50)), "top_p": dice.choice((1.0, 0.9)), "min_p": 0.02}
    if dice.random() < 0.2:
        sampling |= {"presence_penalty": 0.5, "frequency_penalty": 0.1, "repetition_penalty": 1.1}
    if dice.random() < 0.2:
        sampling |= {"logprobs": dice.choice((0, 5, 20))}
    return SequenceRequest(
        request_id=str(number),
        prompt_ids=tuple(dice.choices(range(10, 300), k=dice.choice((1, 5, 17, 40, 150, 400)))),
        sampling=SamplingParams(**sampling),
        max_tokens=dice.choice((1, 3, 20, 90)),
        ignore_eos=True,
        prompt_logprobs=dice.choice((None, None, None, 0, 3)),
    )


class Steps:
    """Counts the steps that an engine issues."""

    def __init__(self, engine: Engine) -> None:
        self.count = 0
        self._run = engine._group.run
        engine._group.run = self.run  # type: ignore[method-assign]

    def run(self, plan: StepPlan) -> None:
        self.count += 1
        self._run(plan)


async def load(engine: Engine, seed: int, steps: Steps) -> None:
    """One client: a request after another, some of them left before their end."""
    dice, number = random.Random(seed), seed * 1_000_000
    while steps.count < STEPS:
        number += 1
        stream = engine.submit(drawn(dice, number))
        leaves = dice.random() < 0.1
        async for _ in stream:
            if leaves:
                stream.cancel()
        assert stream.terminal is not None


@pytest.mark.parametrize("world_size", [1, 2])
async def test_memory_is_flat(world_size: int, tmp_path: Path) -> None:
    """Device memory, segments and allocations as at READY; all rows and blocks given back; no thread left over."""
    folder = tmp_path / "model"
    synth(SynthOptions(family="gemma4-31b", window=64), folder)
    options = on_card(world_size) | {"kv_cache_memory_bytes": 8 << 20, "max_model_len": 512, "block_size": 16}
    async with running(folder, **options, dtype="bfloat16", max_num_batched_tokens=256, enforce_eager=True) as engine:
        ready, free, steps = Held.now(), engine.stats().scheduler, Steps(engine)
        await asyncio.gather(*(load(engine, seed, steps) for seed in range(1, 25)))
        while engine.stats().scheduler.steps_in_flight:  # noqa: ASYNC110 (nothing tells of the last commit)
            await asyncio.sleep(0.01)
        stats, end = engine.stats().scheduler, Held.now()
        print(f"world size {world_size}: {ready} at READY, {end} after {steps.count} steps; {stats}")
        assert steps.count >= STEPS
        assert (stats.running, stats.waiting, stats.groups) == (0, 0, free.groups)
        assert end == ready
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("peg-")]
