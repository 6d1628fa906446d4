#!/usr/bin/env python3
"""How long it takes from a fault until /health is red, until the last client is answered, and until READY again.

    .venv/bin/python tools/fault_latency.py smollm2-135m --faults 200

Starts `peg serve` with three ranks and --on-failure rebuild, lets four streams run, and injects exceptions and stalls
in turn. The figures go to tools/snapshots/.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import threading
import time
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.faults.served import Served, serve_model  # noqa: E402  the tests' client is in this checkout only

STREAMS = 4
RANKS = 3


class Watcher:
    """Asks for health all the time, and notes when it turned red and when it was rebuilt."""

    def __init__(self, server: Served, rebuilds: int) -> None:
        self.red_s: float | None = None
        self.ready_s: float | None = None
        self._server = server
        self._rebuilds = rebuilds
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self) -> None:
        while self.ready_s is None:
            status, health = self._server.request("GET", "/health")
            now = time.monotonic()
            done = health["rebuilds"] > self._rebuilds
            if self.red_s is None and (status == 503 or done):
                self.red_s = now
            if done and status == 200:
                self.ready_s = now
            time.sleep(0.002)


@click.command(help=__doc__)
@click.argument("model")
@click.option("--faults", type=click.IntRange(min=2), default=200, show_default=True)
@click.option("--step-timeout", type=float, default=1.0, show_default=True)
def main(model: str, faults: int, step_timeout: float) -> None:
    flags = ["--tensor-parallel-size", str(RANKS), "--step-timeout", str(step_timeout), "--on-failure", "rebuild"]
    figures: dict[str, dict[str, list[float]]] = {
        kind: {"health_503": [], "last_answer": [], "ready": []} for kind in ("raise", "stall")
    }
    with serve_model(model, *flags, "--rebuild-limit", str(faults + 1), "--enable-fault-injection") as server:
        for number in range(faults):
            kind = ("raise", "stall")[number % 2]
            clients = server.streams(STREAMS)
            watcher = Watcher(server, number)
            struck_s = server.fault(kind, rank=number % RANKS, point=("before", "inside", "after")[number % 3])
            told = [client.wait() for client in clients]
            watcher.thread.join()
            assert watcher.red_s is not None
            assert watcher.ready_s is not None
            assert all(each.error["code"] == "engine_failed" for each in told)
            figures[kind]["health_503"].append(watcher.red_s - struck_s)
            figures[kind]["last_answer"].append(max(each.ended_s for each in told) - struck_s)
            figures[kind]["ready"].append(watcher.ready_s - watcher.red_s)
    summary = {kind: {name: spread(values) for name, values in each.items()} for kind, each in figures.items()}
    environment = {"python": platform.python_version(), "cpus": os.cpu_count(), "machine": platform.machine()}
    snapshot = {
        "counted_from": "the answer to POST /admin/fault: up to two steps pass until it strikes",
        "model": model,
        "ranks": RANKS,
        "streams": STREAMS,
        "faults": faults,
        "step_timeout_s": step_timeout,
    }
    told_text = json.dumps({**snapshot, "environment": environment, "seconds": summary}, indent=2)
    print(told_text)
    folder = ROOT / "tools" / "snapshots"
    folder.mkdir(exist_ok=True)
    (folder / f"fault_latency_cpu_{Path(model).name}.json").write_text(told_text + "\n", "utf-8")


def spread(values: list[float]) -> dict[str, float]:
    p99 = statistics.quantiles(values, n=100)[98] if len(values) > 1 else values[0]
    return {
        "p50": round(statistics.median(values), 4),
        "p99": round(min(p99, max(values)), 4),
        "max": round(max(values), 4),
    }


if __name__ == "__main__":
    main()
