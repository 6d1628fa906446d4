"""What an operator is told: the engine's health in full, and in one line."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Mapping
from importlib.metadata import version

from peg.engine import EngineStats
from peg.failure import Cause, EngineState, Heartbeat
from peg.server.service import Service
from peg.vitals import Vitals

STALLED = "stalled"
"""What health says of an engine that is READY and has a step out for far too long."""

_PACKAGES = ("peg", "torch", "numpy", "aiohttp", "tokenizers", "safetensors")


def status(service: Service, vitals: Vitals) -> str:
    """The state, READY only where requests are taken and steps come back."""
    ready = service.state is EngineState.READY
    return STALLED if ready and vitals.stalled else str(service.state)


def short_health(service: Service) -> Mapping[str, object]:
    """The document of `/health`, in constant time. `status` is "ready" or a reason for a 503."""
    vitals = service.engine.vitals()
    last = vitals.rebuilt[-1].cause if vitals.rebuilt else None
    return {
        "status": status(service, vitals),
        "cause": None if vitals.cause is None else str(vitals.cause),
        "rebuilds": len(vitals.rebuilt),
        "last_rebuild": None if last is None else str(last),
    }


def full_health(service: Service) -> Mapping[str, object]:
    """The document of `/admin/health`. Times are ages in seconds."""
    vitals, now = service.engine.vitals(), time.monotonic()
    stats = service.read_engine()[1]
    return {
        "status": status(service, vitals),
        "state": vitals.state,
        "epoch": vitals.epoch,
        "cause": None if vitals.cause is None else _cause(vitals.cause, now),
        "secondary": [_cause(cause, now) for cause in vitals.secondary],
        "rebuilds": [
            {"epoch": past.epoch, "took_s": past.took_s, "cause": _cause(past.cause, now)} for past in vitals.rebuilt
        ],
        "ranks": [_rank(beat, now) for beat in vitals.heartbeats],
        "step": {"step": vitals.step, "age_s": vitals.step_s, "limit_s": vitals.step_limit_s},
        "requests": _requests(service, stats),
        "model": None if stats is None else _model(stats),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
    }


def _rank(beat: Heartbeat, now: float) -> Mapping[str, object]:
    return {
        "rank": beat.rank,
        "phase": beat.phase,
        "step": beat.step,
        "age_s": now - beat.since_s,
        "waits": beat.waits,
    }


def _cause(cause: Cause, now: float) -> Mapping[str, object]:
    return {
        "kind": cause.kind,
        "message": cause.message,
        "rank": cause.rank,
        "step": cause.step,
        "phase": cause.phase,
        "traceback": cause.traceback,
        "age_s": now - cause.at_s,
    }


def _requests(service: Service, stats: EngineStats | None) -> Mapping[str, object]:
    if stats is None:
        return {"live": len(service.live), "running": 0, "waiting": 0, "last_commit_age_s": None}
    return {
        "live": len(service.live),
        "running": stats.scheduler.running,
        "waiting": stats.scheduler.waiting,
        "last_commit_age_s": stats.last_commit_age_s,
    }


def _model(stats: EngineStats) -> Mapping[str, object]:
    info = stats.info
    return {
        "architecture": info.architecture,
        "world_size": info.world_size,
        "devices": info.devices,
        "communicator": info.communicator,
        "dtype": info.dtype,
    }
