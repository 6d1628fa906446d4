"""Where a reading was taken: without it the numbers mean nothing."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from peg.plan import EngineInfo


def describe(info: EngineInfo, checkpoint: str) -> Iterator[tuple[str, str]]:
    """Names and values. `info` is that of the largest group of ranks, `checkpoint` the digest."""
    yield "checkpoint", checkpoint
    yield "architecture", info.architecture
    yield "dtype", info.dtype
    yield "world size", f"{info.world_size}, communicator {info.communicator}"
    yield "devices", ", ".join(info.devices)
    if any(device != "cpu" for device in info.devices):
        yield "device", torch.cuda.get_device_name(0)
    yield "processor", f"{_processor()}, {len(os.sched_getaffinity(0))} cores, shared by the ranks"
    yield "torch", f"{torch.__version__}, Python {platform.python_version()}"
    yield "step", f"at most {info.max_num_batched_tokens} tokens, blocks of {info.block_size}"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
