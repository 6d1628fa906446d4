"""Health is true and quick whatever the server is busy with."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import statistics
import threading
import time
from pathlib import Path

from tests.faults.served import CONTEXT, Served, served, write_served_model

PROMPTS, PROMPT_TOKENS = 64, 1500
TEXT_BYTES = 8_000_000
POLL_S = 0.02
POLLED_S = 8.0
P99_S = 0.15  # read here: 32 to 60 ms on two cores that were busy with other work too


def poll(server: Served, seconds: float) -> tuple[list[int], list[float]]:
    """Ask for health at 50 Hz on one connection; statuses and times."""
    statuses, took_s = [], []
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    with contextlib.closing(connection):
        due_s = until_s = time.monotonic()
        until_s += seconds
        while due_s < until_s:
            time.sleep(max(0.0, due_s - time.monotonic()))
            began_s = time.monotonic()
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            statuses.append(response.status)
            took_s.append(time.monotonic() - began_s)
            due_s = max(due_s + POLL_S, time.monotonic())
    return statuses, took_s


def post_text(server: Served) -> None:
    text = json.dumps({"model": "tiny", "prompt": "the cat " * (TEXT_BYTES // 8)})
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", "/tokenize", text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        while response.read(1 << 20):
            pass


def test_health_is_quick_under_load(tmp_path: Path) -> None:
    """At 50 Hz, while 64 long prompts prefill, 8 MB of text are tokenised and a reader stalls: 200, and soon."""
    flags = ("--max-num-seqs", "64", "--kv-cache-memory", "256MiB", "--max-num-batched-tokens", "512")
    with served(write_served_model(tmp_path), *flags) as server:
        body = {"model": "tiny", "prompt": "x", "max_tokens": CONTEXT - 10, "ignore_eos": True, "stream": True}
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: peg\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as stalled:
            stalled.sendall(head.encode() + data)
            prompt = [7] * PROMPT_TOKENS
            clients = [server.ask(prompt=prompt, max_tokens=2) for _ in range(PROMPTS)]
            tokenizing = threading.Thread(target=post_text, args=(server,))
            tokenizing.start()
            statuses, took_s = poll(server, POLLED_S)
            p99_s = statistics.quantiles(took_s, n=100)[98]
            median_ms, p99_ms, max_ms = (1000 * value for value in (statistics.median(took_s), p99_s, max(took_s)))
            print(f"\n{len(took_s)} polls: p50 {median_ms:.1f} ms, p99 {p99_ms:.1f} ms, max {max_ms:.1f} ms")
            assert set(statuses) == {200}
            assert p99_s <= P99_S
            tokenizing.join(60)
            assert server.request("POST", "/admin/abort", {"all": True})[0] == 200
            assert all(client.wait(60).status for client in clients)
