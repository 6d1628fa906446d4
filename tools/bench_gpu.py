#!/usr/bin/env python3
"""Measures decode and prefill of a published model's shape on one GPU, beside what the card itself can do.

    .venv/bin/python tools/bench_gpu.py qwen3-4b --seqs 1,8,64,256 --prefill 2048,8000 --snapshot qwen3-4b

Weights are made up, so that no checkpoint is needed. Work goes through `Engine.submit`: greedy, prompts of 512 random
tokens; a step is (time of 129 tokens − time of 1) / 128, best of two. Floors are bytes over the streaming-read rate and
operations over the matrix rate, both measured in the same run. `--profile` adds where the time goes, kernel by kernel.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from peg.environment import prepare  # noqa: E402 (before torch is imported)

prepare(("0",))

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from peg.config import EngineConfig  # noqa: E402
from peg.engine import Engine  # noqa: E402
from peg.models.registry import find_family  # noqa: E402
from peg.plan import Full, SamplingParams, SequenceRequest, SlidingWindow  # noqa: E402
from tools.geometries import GEOMETRIES, write_geometry  # noqa: E402

PROMPT, TOKENS, LONG = 512, 129, 8000
ROOM = 8448
SMALL_IDS = 10  # what lies below may be special tokens


@triton.jit
def _read_kernel(p_x, p_out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    o_x = tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        b_sum += tl.load(p_x + start + o_x, eviction_policy="evict_first").to(tl.float32)
    tl.store(p_out + tl.program_id(0), tl.sum(b_sum, 0))


def seconds(work: Callable[[], object], times: int = 5) -> float:
    """The best of some runs on the card, after one that is not counted."""
    work()
    best = float("inf")
    for _ in range(times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return best


def rates() -> dict[str, float]:
    """Copying and reading in TB/s, bf16 products of large normal matrices in TFLOP/s."""
    big = torch.randn(1 << 30, device="cuda", dtype=torch.float32).to(torch.bfloat16)
    other, sums = torch.empty_like(big), torch.empty(132 * 16, device="cuda")
    copy_s = seconds(lambda: other.copy_(big))
    read_s = seconds(lambda: _read_kernel[(len(sums),)](big, sums, len(big), 4096, num_warps=8))
    a, b = big[: 8192 * 8192].view(8192, 8192), other[: 8192 * 8192].view(8192, 8192)
    product_s = seconds(lambda: a @ b)
    found = {"copy": 4 * len(big) / copy_s, "read": 2 * len(big) / read_s, "matrix": 2 * 8192**3 / product_s}
    return {name: rate / 1e12 for name, rate in found.items()}


class Bench:
    """An engine over one geometry, and what its work must cost at least. Owned by the loop."""

    def __init__(
        self, engine: Engine, groups: Sequence[Full | SlidingWindow], config: dict[str, Any], card: dict[str, float]
    ):
        self._engine = engine
        self._groups = groups
        self._config = config
        self._card = card
        self._dice = random.Random(0)
        self._asked = 0
        self.ids: set[int] = set()

    async def run(self, seqs: int, prompt: int, tokens: int) -> float:
        """Seconds until all of some sequences have ended; every token must have come."""
        began = time.perf_counter()
        counts = await asyncio.gather(*(self._one(prompt, tokens) for _ in range(seqs)))
        assert counts == [tokens] * seqs, counts
        return time.perf_counter() - began

    async def _one(self, prompt: int, tokens: int) -> int:
        self._asked += 1
        ids = tuple(self._dice.choices(range(SMALL_IDS, self._config["vocab_size"] - 300), k=prompt))
        stream = self._engine.submit(
            SequenceRequest(
                request_id=str(self._asked),
                prompt_ids=ids,
                sampling=SamplingParams(temperature=0),
                max_tokens=tokens,
                ignore_eos=True,
            )
        )
        count = 0
        async for output in stream:
            count += len(output.token_ids)
            self.ids.update(output.token_ids)
        return count

    async def step_ms(self, seqs: int, prompt: int = PROMPT) -> float:
        await self.run(seqs, prompt, 2)
        return min([await self._step_ms(seqs, prompt) for _ in range(2)])

    async def _step_ms(self, seqs: int, prompt: int) -> float:
        first = await self.run(seqs, prompt, 1)
        return 1e3 * (await self.run(seqs, prompt, TOKENS) - first) / (TOKENS - 1)

    async def prefill_ms(self, tokens: int) -> float:
        return 1e3 * min([await self.run(1, tokens, 1) for _ in range(3)])

    def floor_ms(self, seqs: int, context: float) -> float:
        """All weights once, and the K and V that each sequence sees."""
        kv = sum(group.bytes_per_token(2) * min(context, _window(group)) for group in self._groups)
        return 1e3 * (self._engine.info.weight_bytes + seqs * kv) / (self._card["read"] * 1e12)

    def prefill_floor_ms(self, tokens: int) -> float:
        """Every weight but the embedding twice a token, and attention over half a square or a window."""
        config = self._config
        weights = self._engine.info.weight_bytes / 2 - float(config["vocab_size"] * config["hidden_size"])
        seen = [(group, min(tokens / 2, _window(group))) for group in self._groups]
        heads = int(config["num_attention_heads"])
        attention = sum(4 * tokens * keys * heads * group.head_dim * len(group.layers) for group, keys in seen)
        return 1e3 * (2 * weights * tokens + attention) / (self._card["matrix"] * 1e12)


def _window(group: Full | SlidingWindow) -> float:
    return group.window if isinstance(group, SlidingWindow) else float("inf")


def age_s() -> float:
    """Seconds since this process began."""
    started = float(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - started


def row(name: str, found: float, floor: float) -> None:
    click.echo(f"{name:28} {found:9.2f} {floor:9.2f} {found / floor:7.2f}")


async def profiled(what: str, work: Any) -> None:
    """Print the kernels that `work` spends the card's time in."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        began = time.perf_counter()
        await work
        wall_ms = 1e3 * (time.perf_counter() - began)
    kernels = sorted(profile.key_averages(), key=lambda entry: -entry.self_device_time_total)
    total = sum(entry.self_device_time_total for entry in kernels)
    click.echo(f"{what}: {total / 1e3:.1f} ms of kernels in {wall_ms:.1f} ms, {sum(e.count for e in kernels)} launches")
    for entry in kernels[:14]:
        spent = entry.self_device_time_total
        each = f"{entry.count:7} x {spent / entry.count:8.1f} us {entry.key[:80]}"
        click.echo(f"  {spent / total:6.1%} {spent / 1e3:9.2f} ms {each}")


async def measure(
    geometry: str, seqs: Sequence[int], prefills: Sequence[int], long: bool, profile: bool
) -> dict[str, Any]:
    config = dict(GEOMETRIES[geometry][1])
    model = find_family(config["architectures"][0])
    with tempfile.TemporaryDirectory() as folder:
        write_geometry(geometry, Path(folder) / "model")
        engine = Engine(
            EngineConfig(
                model=geometry,
                model_dir=Path(folder) / "model",
                load_format="dummy",
                devices=("0",),
                max_model_len=ROOM,
                max_num_seqs=max(seqs),
            )
        )
        await engine.start()
    ready_s = age_s()
    card = rates()
    groups = [group for group in model.kv_groups(model.parse(config), 1) if isinstance(group, Full | SlidingWindow)]
    bench = Bench(engine, groups, config, card)
    click.echo(f"{geometry}: ready {ready_s:.1f} s after the process began: {dict(engine.info.load_times_s)}")
    click.echo(f"copy {card['copy']:.2f} TB/s, read {card['read']:.2f} TB/s, matrices {card['matrix']:.0f} TFLOP/s")
    click.echo(f"{'':28} {'ms':>9} {'floor':>9} {'ratio':>7}")
    found: dict[str, Any] = {"ready_s": ready_s, "rates": card, "step_ms": {}, "floor_ms": {}, "prefill_ms": {}}
    for count in seqs:
        found["step_ms"][str(count)] = await bench.step_ms(count)
        found["floor_ms"][str(count)] = bench.floor_ms(count, PROMPT + TOKENS / 2)
        row(f"step, {count} sequences", found["step_ms"][str(count)], found["floor_ms"][str(count)])
    if long:
        found["step_ms_at_8000"] = await bench.step_ms(1, LONG)
        row(f"step at {LONG} tokens", found["step_ms_at_8000"], bench.floor_ms(1, LONG + TOKENS / 2))
    for tokens in prefills:
        found["prefill_ms"][str(tokens)] = await bench.prefill_ms(tokens)
        row(f"prefill of {tokens}", found["prefill_ms"][str(tokens)], bench.prefill_floor_ms(tokens))
    assert len(bench.ids) > 1, "every token was the same"
    if profile:
        for count in (seqs[0], seqs[-1]):
            await profiled(f"{count} sequences, 64 tokens", bench.run(count, 16, 64))
        await profiled(f"prefill of {prefills[-1]}", bench.run(1, prefills[-1], 1))
    await engine.close()
    return found


def _commit() -> str:
    """What is measured, or nothing where this is no checkout."""
    if not (ROOT / ".git").exists():
        return ""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _numbers(_context: object, _param: object, value: str) -> list[int]:
    return [int(part) for part in value.split(",")]


@click.command(help=__doc__)
@click.argument("geometry", type=click.Choice(sorted(GEOMETRIES)))
@click.option("--seqs", default="1,8,32,64", callback=_numbers, help="Sequences together.")
@click.option("--prefill", default="2048,8000", callback=_numbers, help="Prompt lengths.")
@click.option("--long/--no-long", default=True, help=f"A step at {LONG} tokens of context too.")
@click.option("--profile", is_flag=True, help="Where the time goes, kernel by kernel.")
@click.option("--snapshot", help="Keep the figures in tools/snapshots/h200/NAME.json.")
def main(
    geometry: str, seqs: list[int], prefill: list[int], *, long: bool, profile: bool, snapshot: str | None
) -> None:
    sys.setswitchinterval(1e-4)
    found = asyncio.run(measure(geometry, seqs, prefill, long, profile))
    found |= {
        "commit": _commit(),
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "triton")},
    }
    click.echo(json.dumps(found))
    if snapshot is not None:
        folder = ROOT / "tools" / "snapshots" / "h200"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{snapshot}.json").write_text(json.dumps(found, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
