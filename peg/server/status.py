"""A line in the log every few seconds while there is work."""

from __future__ import annotations

import asyncio
import time

import structlog

from peg.engine import EngineStats
from peg.server.service import Service

log = structlog.get_logger("peg.server")


async def tell_status(service: Service, interval_s: float) -> None:
    """Runs until it is cancelled. Says nothing where nothing has happened since the last line."""
    before, before_s = _reading(service), time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        now, now_s = _reading(service), time.monotonic()
        if _is_work(before, now):
            log.info("status", **_line(before, now, now_s - before_s))
        before, before_s = now, now_s


def _reading(service: Service) -> EngineStats:
    return service.engine.stats()


def _is_work(before: EngineStats, now: EngineStats) -> bool:
    busy = now.scheduler.running or now.scheduler.waiting
    return bool(busy) or now.scheduler.counters != before.scheduler.counters


def _line(before: EngineStats, now: EngineStats, took_s: float) -> dict[str, object]:
    was, counters = before.scheduler.counters, now.scheduler.counters
    groups = now.scheduler.groups
    return {
        "running": now.scheduler.running,
        "waiting": now.scheduler.waiting,
        "prompt_tokens_per_s": round((counters.prompt_tokens - was.prompt_tokens) / took_s, 1),
        "generated_tokens_per_s": round((counters.generated_tokens - was.generated_tokens) / took_s, 1),
        "kv_used": f"{max((group.used / group.total for group in groups if group.total), default=0.0):.1%}",
    }
