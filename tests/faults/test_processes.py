"""Faults of every kind in the process that the product ships, seen by its clients over HTTP."""

from __future__ import annotations

import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from peg.failure import FaultKind
from tests.faults.served import Served, Told, served, write_served_model

RANKS = ("--tensor-parallel-size", "3")
STEP_S = 1.0
EXIT_S = 5.0
BUSY_S = 4.0  # more than this a machine with two cores never is too late
LASTING = (  # kinds that never can be rebuilt
    FaultKind.SPIN,
    FaultKind.HANG,
    FaultKind.SEIZE,
    FaultKind.DIE,
    FaultKind.ABORT_HANGS,
    FaultKind.ABORT_RAISES,
    FaultKind.SUPERVISOR_RAISES,
)
WAITS_FOR_DEADLINE = (FaultKind.STALL, FaultKind.SPIN, FaultKind.HANG, FaultKind.SKIP, FaultKind.EXTRA)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("served"))


def test_whatever_can_be_rebuilt_is_rebuilt(model: Path) -> None:
    """One process survives each such kind: everyone is told, then the same text comes as before, and SIGTERM is 0."""
    flags = (*RANKS, "--on-failure", "rebuild", "--rebuild-limit", "99", "--step-timeout", str(STEP_S))
    kinds = [kind for kind in FaultKind if kind not in (*LASTING, FaultKind.UNREADABLE)]
    with served(model, *flags, "--max-num-seqs", "2") as server:
        expected = server.ask(max_tokens=20).wait().body
        for number, kind in enumerate(kinds, 1):
            clients = [*server.streams(2), server.ask(max_tokens=4)]
            struck_s = server.fault(kind, after_steps=2)
            told = [client.wait() for client in clients]
            late_s = max(each.ended_s for each in told) - struck_s
            assert late_s < (STEP_S if kind in WAITS_FOR_DEADLINE else 0.0) + BUSY_S
            assert [each.error["code"] for each in told] == ["engine_failed"] * 3, kind
            assert len({each.error["message"] for each in told}) == 1
            until_s = time.monotonic() + BUSY_S
            while (health := server.request("GET", "/health")[1])["status"] != "ready":
                assert time.monotonic() < until_s, health
                time.sleep(0.01)
            assert health["rebuilds"] == number
            assert health["last_rebuild"] in told[0].error["message"]
            assert _text(server.ask(max_tokens=20).wait().body) == _text(expected), kind
        costs_only_its_requests(server, len(kinds))
        assert server.request("POST", "/admin/rebuild", {"reason": "because"})[0] == 202
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) in (0, 70)  # 70 where the signal came before the rebuild was done


def test_whoever_comes_during_a_rebuild_may_wait(model: Path) -> None:
    """With --rebuild-admission wait a request that comes as soon as the failure is told is served, every time."""
    flags = (*RANKS, "--on-failure", "rebuild", "--rebuild-admission", "wait")
    with served(model, *flags) as server:
        for rebuilds in (1, 2, 3):
            (client,) = server.streams(1)
            server.fault(FaultKind.RAISE, after_steps=2)
            assert client.wait().error["code"] == "engine_failed"
            assert server.ask(max_tokens=4).wait().status == 200
            assert server.request("GET", "/health")[1]["rebuilds"] == rebuilds


def costs_only_its_requests(server: Served, rebuilds: int) -> None:
    """A step that one rank cannot read fails those that it sampled for; who waited is served, nothing is rebuilt."""
    clients = server.streams(2)
    waiting = server.ask(max_tokens=4)
    server.fault(FaultKind.UNREADABLE, after_steps=2)
    assert all("injected on rank 1" in client.wait().error["message"] for client in clients)
    assert waiting.wait().status == 200
    health = server.request("GET", "/health")[1]
    assert (health["status"], health["rebuilds"]) == ("ready", rebuilds)


def _text(body: bytes) -> bytes:
    found = re.search(rb'"text":"[^"]*"', body)
    assert found is not None, body
    return found[0]


@dataclass
class End:
    """How a process came to its end."""

    kind: FaultKind
    code: int
    took_s: float
    told: list[Told]
    health: tuple[int, str] | None = None
    log: list[str] = field(default_factory=list)


def come_to_an_end(model: Path, kind: FaultKind) -> End:
    flags = (*RANKS, "--on-failure", "rebuild", "--step-timeout", str(STEP_S), "--max-num-seqs", "2")
    with served(model, *flags) as server:
        clients = [*server.streams(2), server.ask(max_tokens=4)]
        struck_s = server.fault(kind, after_steps=2)
        told = [client.wait() for client in clients]
        health = None
        if kind not in (FaultKind.SEIZE, FaultKind.SUPERVISOR_RAISES):
            status, document = server.request("GET", "/health")
            health = (status, document["cause"])
        code = server.process.wait(30)
        return End(kind, code, time.monotonic() - struck_s, told, health, server.log)


@pytest.mark.timeout(400)
def test_whatever_cannot_come_back_ends_the_process(model: Path) -> None:
    """Under the policy rebuild, too: everyone is told and the code is 70; 1 where only the deadman is left."""
    with ThreadPoolExecutor(3) as pool:
        for end in pool.map(lambda kind: come_to_an_end(model, kind), LASTING):
            if end.kind is FaultKind.SEIZE:
                assert (end.code, [told.cut for told in end.told]) == (1, [True] * 3)
                assert end.took_s < STEP_S + EXIT_S + 1.0 + BUSY_S
                assert any(line.startswith("Thread 0x") or "most recent call first" in line for line in end.log)
                continue
            assert end.code == 70, (end.kind, end.log[-20:])
            assert [told.error["code"] for told in end.told] == ["engine_failed"] * 3, end.kind
            assert end.took_s < (STEP_S if end.kind in WAITS_FOR_DEADLINE else 0.0) + EXIT_S + BUSY_S
            if end.health is not None:
                assert end.health[0] == 503
                assert end.health[1] in end.told[0].error["message"]


@pytest.mark.parametrize("kind", ["raise", "stall"])
def test_four_streams_and_three_that_wait(model: Path, kind: str) -> None:
    """All seven are told in time, health says why, a new request is refused, and code 70 comes within five seconds."""
    limit_s = 3.0 if kind == "stall" else 0.0
    with served(model, *RANKS, "--step-timeout", "3", "--max-num-seqs", "4") as server:
        clients = server.streams(4)
        clients += [server.ask(max_tokens=4, stream=stream) for stream in (True, True, False)]
        time.sleep(0.1)
        struck_s = server.fault(kind, after_steps=2)
        told = [client.wait() for client in clients]
        took_s = max(each.ended_s for each in told) - struck_s
        print(f"\n{kind}: 7 answered within {took_s:.3f} s", end="")
        assert took_s < limit_s + 1.0
        assert [each.status for each in told] == [200] * 4 + [503] * 3
        assert {each.error["code"] for each in told} == {"engine_failed"}
        status, health = server.request("GET", "/health")
        assert (status, health["status"]) == (503, "broken")
        assert "rank 1" in health["cause"]
        assert server.request("POST", "/v1/completions", {"model": "tiny", "prompt": "x"})[0] == 503
        assert server.process.wait(10) == 70
        ended_s = time.monotonic() - struck_s
        print(f", code 70 after {ended_s:.3f} s")
        assert ended_s < limit_s + EXIT_S
        wound_up = server.wait_for_log("ranks wound up", 1)
        assert wound_up["joined"] is True


def test_sigterm_lets_two_streams_finish(model: Path) -> None:
    """They run to their end, a new request gets 503, and the code is 0."""
    with served(model, *RANKS) as server:
        clients = [server.ask(stream=True, max_tokens=400) for _ in range(2)]
        assert all(client.told.began.wait(20) for client in clients)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_log("draining", 5)
        assert server.request("POST", "/v1/completions", {"model": "tiny", "prompt": "x"})[0] == 503
        assert [client.wait().body.count(b'"finish_reason":"length"') for client in clients] == [1, 1]
        assert server.process.wait(10) == 0


def test_a_second_signal_ends_it_at_once(model: Path) -> None:
    """While it drains SIGINT ends it with 128 + 2."""
    with served(model) as server:
        server.streams(1)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_log("draining", 5)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(5) == 128 + signal.SIGINT


def test_killed_and_started_again_at_once(model: Path) -> None:
    """After kill -9, with connections open, the same port serves again."""
    with served(model) as first:
        first.streams(1)
        first.process.kill()
        first.process.wait(5)
        with served(model, port=first.port) as second:
            assert second.request("GET", "/health")[0] == 200
            second.process.send_signal(signal.SIGTERM)
            assert second.process.wait(10) == 0
