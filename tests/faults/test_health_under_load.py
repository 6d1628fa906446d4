"""Health is true and quick whatever the server is busy with."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import statistics
import threading
from pathlib import Path

from tests.faults.health_poll import polled_health
from tests.faults.served import CONTEXT, Served, served, write_served_model

PROMPTS, PROMPT_TOKENS = 64, 1500
TEXT_BYTES = 8_000_000
P99_S = 0.05  # read here: 9 to 15 ms on two quiet cores
MAX_S = 0.5  # read here: 0.17 s, while the ids of the long text become Python's
TRIES = 3  # a machine that does something else for a moment is not the server's fault


def post_text(server: Served) -> None:
    text = json.dumps({"model": "tiny", "prompt": "the cat " * (TEXT_BYTES // 8)})
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", "/tokenize", text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        while response.read(1 << 20):
            pass


def poll_under_load(server: Served) -> tuple[float, float]:
    """The p99 and the longest poll while 64 long prompts prefill and 8 MB of text are tokenised, until all are done.

    Every answer must be a 200.
    """
    with polled_health(server.port) as polled:
        clients = [server.ask(prompt=[7] * PROMPT_TOKENS, max_tokens=2) for _ in range(PROMPTS)]
        tokenizing = threading.Thread(target=post_text, args=(server,))
        tokenizing.start()
        tokenizing.join(60)
        assert {client.wait().status for client in clients} == {200}
    p99_s = statistics.quantiles(polled.took_s, n=100)[98]
    median_ms, p99_ms, max_ms = (1000 * each for each in (statistics.median(polled.took_s), p99_s, max(polled.took_s)))
    print(f"\n{len(polled.took_s)} polls: p50 {median_ms:.1f} ms, p99 {p99_ms:.1f} ms, max {max_ms:.1f} ms")
    assert set(polled.statuses) == {200}
    return p99_s, max(polled.took_s)


def test_health_is_quick_under_load(tmp_path: Path) -> None:
    """At 50 Hz, while 64 long prompts prefill, 8 MB of text are tokenised and a reader stalls: 200, and soon."""
    flags = ("--max-num-seqs", "64", "--kv-cache-memory", "256MiB", "--max-num-batched-tokens", "512")
    with served(write_served_model(tmp_path), *flags) as server:
        body = {"model": "tiny", "prompt": "x", "max_tokens": CONTEXT - 10, "ignore_eos": True, "stream": True}
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: peg\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        with contextlib.ExitStack() as stalled:
            for _ in range(TRIES):
                sock = stalled.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                sock.sendall(head.encode() + data)
                p99_s, max_s = poll_under_load(server)
                if p99_s <= P99_S and max_s <= MAX_S:
                    return
    raise AssertionError(f"p99 over {1000 * P99_S:g} ms or an answer over {1000 * MAX_S:g} ms, {TRIES} times over")
