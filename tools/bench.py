#!/usr/bin/env python3
"""Measures a running server over HTTP, and the same work beside it where asked.

    .venv/bin/peg serve smollm2-135m &
    .venv/bin/python tools/bench.py smollm2-135m -c 1 -c 8 --baseline engine --baseline transformers

Every request is greedy, ignores the end and must bring exactly its tokens: tokens = requests × N, or the run counts
for nothing. Rounds of the server and of each baseline alternate, and the figures are medians over the rounds. The last
line of the output is one JSON object; `--snapshot NAME` keeps it in tools/snapshots/NAME.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import click
import torch
import transformers

from peg.checkpoint.progress import Silent
from peg.checkpoint.resolve import cache_dir, resolve
from peg.config import EngineConfig
from peg.engine import Engine
from peg.plan import SamplingParams, SequenceRequest

ROOT = Path(__file__).resolve().parents[1]
WORDS = ("the", "cat", "sat", "on", "a", "mat", "while", "seven", "small", "engines", "read", "every", "word")


@dataclass(frozen=True, slots=True)
class Timing:
    """One request: seconds from its start to its first and to its last token, and how many came."""

    first_s: float
    last_s: float
    tokens: int


class Subject(Protocol):
    """Something that generates greedily, past any end."""

    async def run(self, prompts: Sequence[list[int]], max_tokens: int, concurrency: int) -> list[Timing]:
        """All prompts, `concurrency` at a time; one timing each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One round. Times of one request are medians over the requests."""

    tokens: int
    tokens_per_s: float
    decode_tokens_per_s: float
    first_token_ms: float
    first_token_p99_ms: float


async def measure(subject: Subject, prompts: Sequence[list[int]], max_tokens: int, concurrency: int) -> Figures:
    started_s = time.monotonic()
    timings = await subject.run(prompts, max_tokens, concurrency)
    took_s = time.monotonic() - started_s
    tokens = sum(timing.tokens for timing in timings)
    if tokens != len(prompts) * max_tokens:
        raise click.ClickException(f"{tokens} tokens came; {len(prompts)} requests × {max_tokens} were asked for")
    firsts = sorted(timing.first_s for timing in timings)
    return Figures(
        tokens=tokens,
        tokens_per_s=tokens / took_s,
        decode_tokens_per_s=statistics.median((t.tokens - 1) / (t.last_s - t.first_s) for t in timings),
        first_token_ms=1000 * statistics.median(firsts),
        first_token_p99_ms=1000 * firsts[-1 - len(firsts) // 100],
    )


# --- subjects ---------------------------------------------------------------------------------------------------


class OneByOne:
    """Keeps `concurrency` requests going, each on its own."""

    async def run(self, prompts: Sequence[list[int]], max_tokens: int, concurrency: int) -> list[Timing]:
        waiting, timings = list(prompts), []

        async def work() -> None:
            while waiting:
                timings.append(await self.one(waiting.pop(), max_tokens))

        await asyncio.gather(*(work() for _ in range(concurrency)))
        return timings

    async def one(self, prompt: list[int], max_tokens: int) -> Timing:
        raise NotImplementedError


class Server(OneByOne):
    """`/v1/completions`, streamed."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session, self._url, self._model = session, url, model

    async def one(self, prompt: list[int], max_tokens: int) -> Timing:
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        started_s = time.monotonic()
        first_s = last_s = 0.0
        tokens = 0
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise click.ClickException(f"status {response.status}: {await response.text()}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise click.ClickException(f"the stream failed: {event['error']['message']}")
                if event["choices"]:
                    last_s = time.monotonic() - started_s
                    first_s = first_s or last_s
                else:
                    tokens = event["usage"]["completion_tokens"]
        return Timing(first_s, last_s, tokens)


class InProcess(OneByOne):
    """`Engine.submit`, without text and HTTP."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._count = 0

    async def one(self, prompt: list[int], max_tokens: int) -> Timing:
        self._count += 1
        request = SequenceRequest(
            request_id=str(self._count),
            prompt_ids=tuple(prompt),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        started_s = time.monotonic()
        first_s = last_s = 0.0
        tokens = 0
        async for output in self._engine.submit(request):
            last_s = time.monotonic() - started_s
            first_s = first_s or last_s
            tokens += len(output.token_ids)
        return Timing(first_s, last_s, tokens)


class Reference:
    """`transformers` and its `generate`: prompts of one length as one batch."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()

    async def run(self, prompts: Sequence[list[int]], max_tokens: int, concurrency: int) -> list[Timing]:
        batches = [prompts[start : start + concurrency] for start in range(0, len(prompts), concurrency)]
        timings = []
        for batch in batches:
            timing = await asyncio.to_thread(self._generate, batch, max_tokens)
            timings += [timing] * len(batch)
        return timings

    @torch.inference_mode()
    def _generate(self, batch: Sequence[list[int]], max_tokens: int) -> Timing:
        ids, clock = torch.tensor(batch), TokenClock()
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
            streamer=clock,
        )
        started_s, first_s, *_ = clock.at_s
        return Timing(first_s - started_s, clock.at_s[-1] - started_s, len(clock.at_s) - 1)


class TokenClock(transformers.generation.BaseStreamer):
    """When `generate` had the prompt, and each token after it."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.at_s.append(time.monotonic())

    def end(self) -> None:
        pass


# --- the run ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is run: prompts of one length, made of words in an order that the seed decides."""

    prompt_tokens: int
    max_tokens: int
    requests: int
    rounds: int
    seed: int = 0

    async def prompts(self, session: aiohttp.ClientSession, url: str, count: int) -> list[list[int]]:
        dice = random.Random(self.seed)
        prompts = []
        for _ in range(count):
            text = " ".join(dice.choice(WORDS) for _ in range(2 * self.prompt_tokens))
            async with session.post(f"{url}/tokenize", json={"prompt": text}) as response:
                prompts.append((await response.json())["tokens"][: self.prompt_tokens])
        if any(len(prompt) != self.prompt_tokens for prompt in prompts):
            raise click.ClickException("the words give too few tokens")
        return prompts


async def compare(
    subjects: dict[str, Subject], work: Work, prompts: Sequence[list[int]], concurrency: int
) -> dict[str, Figures]:
    """Rounds in turn, after one that warms up; the median of each subject, field by field."""
    rounds: dict[str, list[Figures]] = {name: [] for name in subjects}
    for number in range(-1, work.rounds):
        for name, subject in subjects.items():
            some = prompts[:concurrency] if number < 0 else prompts
            figures = await measure(subject, some, work.max_tokens, concurrency)
            if number >= 0:
                rounds[name].append(figures)
    return {
        name: Figures(**{key: statistics.median(getattr(each, key) for each in found) for key in Figures.__slots__})
        for name, found in rounds.items()
    }


def ratios(server: Figures, other: Figures) -> dict[str, float]:
    """The server's figure over the baseline's: above 1 is faster for rates, slower for times."""
    return {key: getattr(server, key) / getattr(other, key) for key in Figures.__slots__ if key != "tokens"}


def environment(url: str) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    model_name = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "url": url,
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "cpu": model_name[0].partition(": ")[2] if model_name else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
    }


def show(name: str, figures: Figures) -> None:
    print(
        f"  {name:<13}{figures.tokens_per_s:9.1f} tokens/s in all   {figures.decode_tokens_per_s:8.1f} a stream"
        f"   first token {figures.first_token_ms:8.1f} ms (p99 {figures.first_token_p99_ms:.1f})"
    )


async def run(
    url: str, config: EngineConfig, work: Work, concurrencies: Sequence[int], baselines: Sequence[str]
) -> Any:
    report: dict[str, Any] = {"environment": environment(url), "work": asdict(work), "model": config.model, "runs": []}
    connector, endless = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(None)
    async with aiohttp.ClientSession(connector=connector, timeout=endless) as session:
        subjects: dict[str, Subject] = {"server": Server(session, url, config.model)}
        engine = Engine(config) if baselines else None
        if engine is not None:
            await engine.start()
            report["environment"] |= {"dtype": engine.info.dtype, "ranks": engine.info.world_size}
        try:
            if engine is not None and "engine" in baselines:
                subjects["engine"] = InProcess(engine)
            if engine is not None and "transformers" in baselines:
                subjects["transformers"] = Reference(config.model_dir, getattr(torch, engine.info.dtype))
            for concurrency in concurrencies:
                prompts = await work.prompts(session, url, max(work.requests, concurrency))
                found = await compare(subjects, work, prompts, concurrency)
                report["runs"].append(one_run(found, concurrency, len(prompts)))
        finally:
            if engine is not None:
                await engine.close()
    return report


def one_run(found: dict[str, Figures], concurrency: int, requests: int) -> dict[str, Any]:
    print(f"{requests} requests, {concurrency} at a time:")
    for name, figures in found.items():
        show(name, figures)
    compared = {name: ratios(found["server"], other) for name, other in found.items() if name != "server"}
    for name, values in compared.items():
        print(f"  server / {name}: " + ", ".join(f"{key} {value:.3f}" for key, value in values.items()))
    return {
        "concurrency": concurrency,
        "requests": requests,
        "figures": {name: asdict(figures) for name, figures in found.items()},
        "ratios": compared,
    }


@click.command(help=__doc__.split("\n\n")[0] if __doc__ else "")
@click.argument("model")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Where the server listens.")
@click.option("-c", "--concurrency", type=int, multiple=True, default=(1,), help="Requests at a time; repeatable.")
@click.option("--requests", type=int, default=4, show_default=True, help="Requests in a round, at least.")
@click.option("--rounds", type=int, default=3, show_default=True, help="Rounds that count.")
@click.option("--prompt-tokens", type=int, default=400, show_default=True, help="Tokens of each prompt.")
@click.option(
    "--max-tokens", type=click.IntRange(min=2), default=64, show_default=True, help="N, tokens of each answer."
)
@click.option("--baseline", type=click.Choice(["engine", "transformers"]), multiple=True, help="What runs beside it.")
@click.option("--dtype", default="auto", help="The server's --dtype, for the baselines.")
@click.option("--tensor-parallel-size", type=int, default=1, help="The server's, for the baselines.")
@click.option("--snapshot", help="Keep the figures in tools/snapshots/SNAPSHOT.json.")
def main(model: str, url: str, baseline: tuple[str, ...], snapshot: str | None, **options: Any) -> None:
    config = EngineConfig(
        model=model, model_dir=Path(), dtype=options["dtype"], tensor_parallel_size=options["tensor_parallel_size"]
    )
    if baseline:
        config = replace(config, model_dir=resolve(model, cache_dir(os.environ), Silent()))
    work = Work(**{name: options[name] for name in ("prompt_tokens", "max_tokens", "requests", "rounds")})
    report = asyncio.run(run(url, config, work, options["concurrency"], baseline))
    line = json.dumps(report)
    if snapshot:
        path = ROOT / "tools" / "snapshots" / f"{snapshot}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n")
    print(line)


if __name__ == "__main__":
    sys.exit(main())
