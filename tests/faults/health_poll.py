"""Asks a server for its health at 50 Hz, in a process of its own: nothing else holds its interpreter lock."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

POLL_S = 0.02


@dataclass
class Polled:
    """What came of it; there once the polling is over."""

    statuses: list[int] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)


@contextlib.contextmanager
def polled_health(port: int) -> Iterator[Polled]:
    """Poll while the body runs."""
    polled = Polled()
    command = [sys.executable, __file__, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield polled
        told, _ = process.communicate(timeout=30)
    polled.statuses, polled.took_s = json.loads(told)


def poll(port: int, over: threading.Event) -> tuple[list[int], list[float]]:
    """Until it is over, on one connection: a poll goes out when it is due, or as soon as the one before is answered."""
    statuses, took_s = [], []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        due_s = time.monotonic()
        while not over.wait(max(0.0, due_s - time.monotonic())):
            asked_s = time.monotonic()
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            statuses.append(response.status)
            took_s.append(time.monotonic() - asked_s)
            due_s = max(due_s + POLL_S, time.monotonic())
    return statuses, took_s


def main() -> None:
    """Until standard input ends."""
    over = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait).start()
    json.dump(poll(int(sys.argv[1]), over), sys.stdout)


if __name__ == "__main__":
    main()
