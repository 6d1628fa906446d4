#!/usr/bin/env python3
"""How long it takes from a fault until /health is red, until the last client is answered, and until READY again.

    .venv/bin/python tools/fault_latency.py smollm2-135m --faults 200

Starts `peg serve` with three ranks and --on-failure rebuild, lets four streams run, and injects exceptions and stalls
in turn. Times are counted from the moment at which a fault strikes. The figures go to tools/snapshots/.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.faults.served import Served, serve_model  # noqa: E402  the tests' client is in this checkout only

STREAMS = 4
RANKS = 3
POLL_S = 0.002
KINDS = ("raise", "stall")
POINTS = ("before", "inside", "after")


class Watcher:
    """Asks for health all the time, on one connection; notes when it turned red and when the engine was READY again.

    Stands for everyone who polls: a connection for each look would be half of what is measured.
    """

    def __init__(self, server: Served, rebuilds: int) -> None:
        self.red_s: float | None = None
        self.ready_s: float | None = None
        self._port = server.port
        self._rebuilds = rebuilds
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        with contextlib.closing(connection):
            while self.ready_s is None:
                connection.request("GET", "/health")
                response = connection.getresponse()
                self._note(response.status, json.loads(response.read()), time.monotonic())
                time.sleep(POLL_S)

    def _note(self, status: int, health: dict[str, Any], now: float) -> None:
        done = health["rebuilds"] > self._rebuilds
        if self.red_s is None and (status == 503 or done):
            self.red_s = now
        if done and status == 200:
            self.ready_s = now


def strike(server: Served, number: int) -> tuple[str, dict[str, float]]:
    """One fault while the streams run: its kind, and seconds from when it struck."""
    kind = KINDS[number % len(KINDS)]
    clients = server.streams(STREAMS)
    watcher = Watcher(server, number)
    server.fault(kind, rank=number % RANKS, point=POINTS[number // 2 % len(POINTS)])
    told = [client.wait() for client in clients]
    watcher.thread.join()
    assert watcher.red_s is not None
    assert watcher.ready_s is not None
    assert all(each.error["code"] == "engine_failed" for each in told)
    struck_s = strikes(server)[number]
    last_s = max(each.ended_s for each in told)
    return kind, {
        "health_503": watcher.red_s - struck_s,
        "last_answer": last_s - struck_s,
        "ready_after_answer": watcher.ready_s - last_s,
    }


def strikes(server: Served) -> list[float]:
    """When each fault struck, as the server's log has it: on the clock that all processes of a machine share."""
    lines = [json.loads(line) for line in list(server.log) if "fault strikes" in line]
    return [line["at_s"] for line in lines]


Figures: TypeAlias = dict[str, dict[str, list[float]]]
"""Seconds, by the kind of fault and what was measured."""


def measure(model: str, faults: int, step_timeout_s: float) -> Figures:
    """All faults, one after another, on one server."""
    figures: Figures = {kind: defaultdict(list) for kind in KINDS}
    flags = ["--tensor-parallel-size", str(RANKS), "--step-timeout", str(step_timeout_s), "--on-failure", "rebuild"]
    with serve_model(model, *flags, "--rebuild-limit", str(faults + 1), "--enable-fault-injection") as server:
        for number in range(faults):
            kind, took = strike(server, number)
            for name, seconds in took.items():
                figures[kind][name].append(seconds)
        rebuilds = server.request("GET", "/admin/health")[1]["rebuilds"]
    return {**figures, "all": {"rebuild": [past["took_s"] for past in rebuilds]}}


def snapshot(model: str, step_timeout_s: float, figures: Figures) -> str:
    """The figures and what they were read on, as JSON."""
    document = {
        "counted_from": "the moment at which the fault strikes, as the server logs it",
        "model": model,
        "ranks": RANKS,
        "streams": STREAMS,
        "faults": sum(len(figures[kind]["last_answer"]) for kind in KINDS),
        "step_timeout_s": step_timeout_s,
        "environment": environment(),
        "seconds": {kind: {name: spread(values) for name, values in each.items()} for kind, each in figures.items()},
    }
    return json.dumps(document, indent=2) + "\n"


@click.command(help=__doc__)
@click.argument("model")
@click.option("--faults", type=click.IntRange(min=2), default=200, show_default=True)
@click.option("--step-timeout", type=float, default=1.0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="The snapshot; by default one named after the model.")
def main(model: str, faults: int, step_timeout: float, out: Path | None) -> None:
    told = snapshot(model, step_timeout, measure(model, faults, step_timeout))
    print(told, end="")
    out = out or ROOT / "tools" / "snapshots" / f"fault_latency_cpu_{Path(model).name}.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(told, "utf-8")


def environment() -> dict[str, Any]:
    """The machine, and what computes on it."""
    return {
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def spread(values: list[float]) -> dict[str, float]:
    p99 = statistics.quantiles(values, n=100)[98] if len(values) > 1 else values[0]
    return {
        "p50": round(statistics.median(values), 4),
        "p99": round(min(p99, max(values)), 4),
        "max": round(max(values), 4),
    }


if __name__ == "__main__":
    main()
