"""Prompt logprobs through whole engines: exact, complete, the same each time, in bounded memory."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from peg.checkpoint.synth_config import SynthOptions
from peg.commands.synth import synth
from tests.parity.engines import Answer, answers, ask, running
from tests.parity.reference import load_reference, reference_logits

PROMPTS = [random.Random(seed).choices(range(10, 300), k=count) for seed, count in enumerate((90, 2, 33, 1, 64))]
LIMIT_BYTES = 200_000_000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("synth") / "model"
    synth(SynthOptions(family="gemma3", dtype="float32"), directory)
    return directory


def numbers(found: list[Answer]) -> list[object]:
    return [(answer.scored, answer.generated) for answer in found]


async def test_scores_are_the_references(checkpoint: Path) -> None:
    """Logprob, place and likeliest tokens of each prompt token but the first, within 1e-3, cold and repeated."""
    model = load_reference(checkpoint)
    async with running(checkpoint, tensor_parallel_size=2) as engine:
        cold = await ask(engine, PROMPTS, 2, top=5)
        again = await ask(engine, PROMPTS, 2, top=5)
    assert numbers(cold) == numbers(again)
    for answer in cold:
        assert [entry.token_id for entry in answer.scored] == answer.prompt[1:]
        expected = reference_logits(model, answer.prompt).log_softmax(-1)
        for entry, logprobs in zip(answer.scored, expected, strict=False):
            assert entry.logprob == pytest.approx(float(logprobs[entry.token_id]), abs=1e-3)
            assert entry.rank == 1 + int((logprobs > logprobs[entry.token_id]).sum())
            best = logprobs.topk(5)
            assert [token for token, _ in entry.top] == best.indices.tolist()
            assert torch.tensor([value for _, value in entry.top]).sub(best.values).abs().max() <= 1e-3


async def test_scores_do_not_depend_on_chunks(checkpoint: Path) -> None:
    """In chunks of one token or sixteen, or whole, each position has the same numbers to 1e-5."""
    whole = await answers(checkpoint, PROMPTS)
    for chunk in (1, 16):
        found = await answers(checkpoint, PROMPTS, max_num_batched_tokens=chunk)
        for answer, expected in zip(found, whole, strict=True):
            assert len(answer.scored) == len(answer.prompt) - 1
            if len(answer.prompt) > 1:
                torch.testing.assert_close(answer.logprobs, expected.logprobs, atol=1e-5, rtol=0)


async def test_scores_are_whole_where_memory_is_short(checkpoint: Path) -> None:
    """Five texts in pools that hold two at a time, and are preempted: nothing is missing, nothing is there twice."""
    prompts = [random.Random(seed).choices(range(10, 300), k=40) for seed in range(5)]
    expected = await answers(checkpoint, prompts, 40)
    async with running(checkpoint, max_model_len=96, kv_cache_memory_bytes=52 << 10, max_num_seqs=5) as engine:
        found = await ask(engine, prompts, 40)
        assert engine.stats().scheduler.counters.preemptions > 0
    for answer, whole in zip(found, expected, strict=True):
        assert answer.text == whole.text
        torch.testing.assert_close(answer.logprobs, whole.logprobs, atol=1e-5, rtol=0)


MEASURE = """
import asyncio, sys
from pathlib import Path
from tests.parity.engines import ask, running

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))

async def main():
    async with running(Path(sys.argv[1]), tensor_parallel_size=int(sys.argv[2]), max_model_len=1024) as engine:
        await ask(engine, [[3, 4, 5]], 1, top=20)
        idle = status("VmRSS:")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        (answer,) = await ask(engine, [list(range(10, 250)) * 2], 1, top=20)
        assert len(answer.scored) == 479
        print(status("VmHWM:") - idle)

asyncio.run(main())
"""


@pytest.mark.parametrize("world_size", [1, 2])
def test_memory_is_bounded(world_size: int, tmp_path: Path) -> None:
    """Scoring 480 tokens over 262,144 words, 503 MB of logits, raises resident memory by less than 200 MB."""
    options = SynthOptions(family="gemma3", layers=2, hidden_size=16, vocab_size=262_144)
    synth(options, tmp_path / "model")
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "model"), str(world_size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    more_bytes = int(done.stdout.splitlines()[-1])
    print(f"world size {world_size}: {more_bytes / 1e6:.0f} MB more")
    assert more_bytes < LIMIT_BYTES
