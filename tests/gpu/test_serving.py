"""The server on a card: ten thousand captured steps over HTTP, the memory plan, and how it ends when it fails."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from peg.checkpoint.synth_config import SynthOptions
from peg.commands.synth import synth
from peg.config import EngineConfig, ServerConfig
from peg.engine import Engine
from peg.ranks.memory import planned_bytes
from peg.server.run import listening
from peg.server.service import Service
from tests.gpu.cards import needs_card, on_card
from tests.gpu.test_long_run import SHARED, STEPS, Held, Steps

pytestmark = [pytest.mark.gpu, needs_card, pytest.mark.timeout(300)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    synth(SynthOptions(family="gemma4-31b", window=64), tmp_path / "model")
    return tmp_path / "model"


async def client(session: aiohttp.ClientSession, url: str, seed: int, steps: Steps) -> None:
    """One request after another, of every kind, some left before their end."""
    dice = random.Random(seed)
    while steps.count < STEPS:
        body: dict[str, Any] = {
            "model": "small",
            "prompt": [dice.choices(range(10, 300), k=dice.choice((1, 5, 17, 60, 200)))],
            "max_tokens": dice.choice((1, 8, 40, 120)),
            "temperature": dice.choice((0.0, 1.0)),
            "ignore_eos": True,
            "stream": dice.random() < 0.5,
        }
        if dice.random() < 0.3:
            body |= {"top_p": 0.9, "top_k": 40}
        if dice.random() < 0.1:
            body |= {"logprobs": 3}
        leaves = dice.random() < 0.05
        async with session.post(url, json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for _ in answer.content:
                if leaves:
                    break


@pytest.mark.parametrize("world_size", [1, 2])
async def test_memory_is_flat_over_http(world_size: int, model: Path) -> None:
    """Memory, segments and kernels as at READY; planned bytes within two percent; nothing is left running."""
    config = EngineConfig(
        model="small",
        model_dir=model,
        dtype="bfloat16",
        max_model_len=512,
        max_num_batched_tokens=256,
        gpu_memory_utilization=0.3,
        **on_card(world_size),
    )
    with socket.create_server(("127.0.0.1", 0)) as sock:
        service = Service(Engine(config), config, ServerConfig(), sock.getsockname()[:2])
        async with listening(service, sock):
            await service.start()
            engine = service.engine
            ranks = engine._group._ranks
            used = ranks[0].runner.used
            kv_bytes = engine.info.kv_bytes // world_size
            planned = planned_bytes(used, world_size, kv_bytes)
            print(f"world size {world_size}: planned {planned:,}, used at READY {used['ready']:,}; {used}")
            assert SHARED or abs(used["ready"] - planned) <= 0.02 * planned
            ready, free, steps = Held.now(), engine.stats().scheduler, Steps(engine)
            url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1/completions"
            began_s = time.monotonic()
            async with aiohttp.ClientSession() as session:
                await asyncio.gather(*(client(session, url, seed, steps) for seed in range(24)))
            while engine.stats().scheduler.steps_in_flight or engine.stats().open_streams:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            took_s = time.monotonic() - began_s
            stats, end = engine.stats().scheduler, Held.now()
            print(
                f"world size {world_size}: {steps.count} steps in {took_s:.1f} s; {ready} at READY, then {end}; {stats}"
            )
            assert (stats.running, stats.waiting, stats.groups) == (0, 0, free.groups)
            assert end == ready


class ServerProcess:
    """`peg serve` in a process of its own."""

    def __init__(self, model: Path, *flags: str, module: str = "peg") -> None:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            self.port = sock.getsockname()[1]
        library = os.environ.get("PEG_NCCL_LIBRARY") if "0,0" in flags else None
        command = [
            sys.executable,
            "-m",
            module,
            "serve",
            str(model),
            "--port",
            str(self.port),
            "--max-model-len",
            "512",
        ]
        command += ["--kv-cache-memory", "64MiB", "--max-num-seqs", "16", "--enable-fault-injection", *flags]
        command += [] if library is None else ["--nccl-library", library]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "CUDA_"))}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        until_s = time.monotonic() + 150
        while self.get("/health") != 200:
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < until_s
            time.sleep(0.1)

    def get(self, path: str) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def post(self, path: str, body: object) -> int:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def complete(self) -> int:
        body = {"model": str(self.process.args[4]), "prompt": "Hello", "max_tokens": 300, "ignore_eos": True}  # type: ignore[index]
        return self.post("/v1/completions", body)

    def ends(self) -> tuple[int, float, str]:
        """Exit code, how long it took from now, and what was said."""
        began_s = time.monotonic()
        told = self.process.communicate(timeout=30)[1]
        return self.process.returncode, time.monotonic() - began_s, told


def test_a_failure_ends_the_process_and_frees_the_card(model: Path) -> None:
    """Code 70 within five seconds, with live graphs over two ranks, and the card's memory is free again."""
    on_card(2)
    before = torch.cuda.mem_get_info()[0]
    server = ServerProcess(model, "--devices", "0,0", "--tensor-parallel-size", "2")
    assert server.complete() == 200
    during = torch.cuda.mem_get_info()[0]
    fault = {"kind": "raise", "rank": 1, "after_steps": 30}
    assert server.post("/admin/fault", fault) == 200
    assert server.complete() >= 500
    code, took_s, told = server.ends()
    print(f"exit {code} after {took_s:.2f} s; free {before:,}, {during:,}, {torch.cuda.mem_get_info()[0]:,}")
    assert code == 70, told
    assert took_s < 5
    assert SHARED or torch.cuda.mem_get_info()[0] >= before - (64 << 20)


def test_an_illegal_access_ends_the_process_whatever_the_policy(model: Path) -> None:
    """The context is lost: no rebuild is tried to its end, and the code is 70."""
    server = ServerProcess(model, "--devices", "0", "--on-failure", "rebuild", module="tests.gpu.illegal_access")
    assert server.complete() >= 500
    code, took_s, told = server.ends()
    print(f"exit {code} after {took_s:.2f} s")
    assert code == 70, told
    assert "illegal memory access" in told.lower() or "IllegalAddress" in told


def test_weights_that_do_not_fit(model: Path) -> None:
    """Refused before anything is loaded, with the numbers and the knobs."""
    command = [sys.executable, "-m", "peg", "generate", str(model), "Hello", "--devices", "0"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "CUDA_"))}
    done = subprocess.run(
        [*command, "--gpu-memory-utilization", "0.0001"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "bytes of weights do not fit" in done.stderr
    assert "--gpu-memory-utilization 0.0001 allows" in done.stderr
