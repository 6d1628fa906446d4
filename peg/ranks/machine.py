"""What the machine offers to CPU ranks: cores, memory, bf16 instructions. Linux."""

from __future__ import annotations

import os
from pathlib import Path

_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})


def cores_per_rank(world_size: int) -> int:
    """The cores that this process may use, divided among its ranks; at least one."""
    return max(1, len(os.sched_getaffinity(0)) // world_size)


def free_memory_bytes() -> int:
    """What can still be allocated without swapping, by the kernel's estimate and the control group's limit."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text("ascii").splitlines())
    free = int(fields["MemAvailable"].split()[0]) << 10
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and (text := limit.read_text("ascii").strip()) != "max":
        free = min(free, max(0, int(text) - int(used.read_text("ascii"))))
    return free


def kv_budget_bytes(world_size: int) -> int:
    """What one rank's KV pools may take by default: together a quarter of free memory, and at most 4 GiB."""
    return min(free_memory_bytes() // 4, 4 << 30) // world_size


def has_bf16_instructions() -> bool:
    """Whether the CPU multiplies bf16 itself; without, bf16 is slower than fp32."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return not _BF16_FLAGS.isdisjoint(flags.split())
