"""Where the memory of each GPU went, and whether that is what was planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog

from peg.ranks.device import Device

log = structlog.get_logger("peg.ranks")

PHASES = ("context", "weights", "communicators", "workspace", "graphs")
"""What a GPU's memory is used for one after another, before the pools are made."""


def planned_bytes(used: Mapping[str, int], sharing: int, kv_bytes: int) -> int:
    """What should be in use once everything is there: what was before the pools, and those of all ranks on the GPU."""
    return used[PHASES[-1]] + sharing * kv_bytes


def tell_memory(ranks: Sequence[tuple[Device, Mapping[str, int]]], kv_bytes: int) -> None:
    """One log line a GPU. `used`: bytes in use after each phase, and at READY; `kv_bytes`: the pools of a rank."""
    for place in dict.fromkeys(device.place for device, _ in ranks if device.launches):
        here = [used for device, used in ranks if device.place == place]
        used, parts, before = here[0], {}, 0
        for phase in PHASES:
            parts[f"{phase}_bytes"], before = used[phase] - before, used[phase]
        planned = planned_bytes(used, len(here), kv_bytes)
        log.info(
            "GPU memory",
            device=str(place),
            ranks=len(here),
            **parts,
            kv_bytes=len(here) * kv_bytes,
            planned_bytes=planned,
            used_bytes=used["ready"],
            off=f"{(used['ready'] - planned) / planned:+.2%}",
        )
