"""Clients that leave or cancel, in every phase: their sequences end at once and nobody else notices."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from peg.config import EngineConfig, ServerConfig
from tests.http.serving import Server, joined, serving

COMPLETION = "/v1/completions"


@pytest.fixture
def slow(echo: EngineConfig) -> Iterator[Server]:
    """A server with two places, whose steps take 5 ms."""
    with serving(echo_with(echo, max_num_seqs=2)) as server:
        server.group.step_s = 0.005
        yield server
        server.group.go.set()
        server.wait_idle()


def echo_with(config: EngineConfig, **fields: Any) -> EngineConfig:
    values = {name: getattr(config, name) for name in config.__slots__} | fields
    return EngineConfig(**values)


def long_answer(*, stream: bool, **fields: Any) -> dict[str, Any]:
    return {"prompt": "the cat", "max_tokens": 200, "ignore_eos": True, "stream": stream, **fields}


def open_streams(server: Server) -> int:
    return server.call(lambda: server.service.engine.stats().open_streams)


def reset(sock: socket.socket) -> None:
    """Close with RST instead of FIN."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def leave(sock: socket.socket, how: str) -> None:
    if how == "reset":
        reset(sock)
    elif how == "half-close":
        sock.shutdown(socket.SHUT_WR)
    else:
        sock.close()


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
def test_a_client_that_leaves_is_cancelled(slow: Server, phase: str, stream: bool, how: str) -> None:
    """FIN, half-close and RST end the sequence in the queue, before its first token and after, streamed or not."""
    if phase in ("queue", "prefill"):
        slow.group.go.clear()
    others = [slow.open(COMPLETION, long_answer(stream=True)) for _ in range(2 if phase == "queue" else 0)]
    slow.wait_for(lambda: slow.service.engine.stats().open_streams == len(others), "the others run")
    sock = slow.open(COMPLETION, long_answer(stream=stream))
    slow.wait_for(lambda: slow.service.engine.stats().open_streams == len(others) + 1, "it is admitted")
    if phase == "decode":
        slow.wait_for(lambda: slow.service.engine.stats().scheduler.counters.generated_tokens > 3, "it decodes")
    leave(sock, how)
    slow.wait_for(lambda: slow.service.engine.stats().open_streams == len(others), "it is gone", 1.0)
    slow.group.go.set()
    for other in [*others, sock]:
        other.close()


def test_a_cancelled_stream_says_abort(slow: Server) -> None:
    """A stream that is cancelled by its id ends with what it has, finish_reason abort and [DONE]; twice is fine."""
    outcome: list[Any] = []

    def read() -> None:
        outcome.append(slow.complete(**long_answer(stream=True, request_id="mine")))

    reader = threading.Thread(target=read)
    reader.start()
    slow.wait_for(lambda: slow.service.engine.stats().scheduler.counters.generated_tokens > 3, "it decodes")
    answer = slow.request("POST", "/v1/requests/mine/cancel")
    assert (answer.status, answer.json) == (200, {"id": "mine", "cancelled": True})
    reader.join()
    events = outcome[0].events
    assert {event["id"] for event in events} == {"cmpl-mine"}
    assert events[-1]["choices"][0]["finish_reason"] == "abort"
    assert outcome[0].headers["x-request-id"] == "mine"
    assert slow.request("POST", "/v1/requests/mine/cancel").status == 404


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
def test_a_cancelled_answer_has_what_there_is(slow: Server, phase: str) -> None:
    """DELETE, by the answer's id, in every phase: 200 with the tokens so far; all n choices end."""
    if phase != "decode":
        slow.group.go.clear()
    others = [slow.open(COMPLETION, long_answer(stream=True)) for _ in range(2 if phase == "queue" else 0)]
    slow.wait_for(lambda: slow.service.engine.stats().open_streams == len(others), "the others run")
    outcome: list[Any] = []
    body = long_answer(stream=False, request_id="mine", n=2)
    reader = threading.Thread(target=lambda: outcome.append(slow.complete(**body)))
    reader.start()
    slow.wait_for(lambda: slow.service.engine.stats().open_streams == len(others) + 2, "it is admitted")
    if phase == "decode":
        slow.wait_for(lambda: slow.service.engine.stats().scheduler.counters.generated_tokens > 6, "it decodes")
    assert slow.request("DELETE", "/v1/requests/cmpl-mine").status == 200
    reader.join()
    assert outcome[0].status == 200
    document = outcome[0].json
    assert [each["finish_reason"] for each in document["choices"]] == ["abort", "abort"]
    assert bool(document["usage"]["completion_tokens"]) == (phase == "decode")
    for other in others:
        other.close()


def test_an_id_that_is_live_is_a_409(slow: Server) -> None:
    """Two live requests never share an id, nor an answer's id; afterwards it is free again."""
    with slow.open(COMPLETION, long_answer(stream=True, request_id="mine")):
        slow.wait_for(lambda: slow.service.engine.stats().open_streams == 1, "it runs")
        for taken in ("mine", "cmpl-mine"):
            again = slow.complete("the", request_id=taken)
            assert (again.status, again.error["code"]) == (409, "request_id_in_use")
    slow.wait_for(lambda: not len(slow.service.live), "it is gone")
    assert slow.complete("the", request_id="mine").status == 200


def test_every_answer_carries_its_request_id(slow: Server) -> None:
    """X-Request-Id goes in and out, names the answer, and is made where it is not given; errors have it too."""
    given = slow.post(COMPLETION, {"prompt": "the"}, X_Request_Id="a.b-c_1")
    assert (given.headers["x-request-id"], given.json["id"]) == ("a.b-c_1", "cmpl-a.b-c_1")
    field = slow.post(COMPLETION, {"prompt": "the", "request_id": "field"}, X_Request_Id="header")
    assert (field.headers["x-request-id"], field.json["id"]) == ("field", "cmpl-field")
    made = slow.complete("the")
    assert made.json["id"] == "cmpl-" + made.headers["x-request-id"]
    assert slow.get("/nowhere").headers["x-request-id"]


def test_a_reader_that_stalls_is_cut_off(echo: EngineConfig) -> None:
    """A client that takes nothing is cut after the limit; a neighbour on the same server streams on, unchanged."""
    fat = ServerConfig(reader_stall_s=0.3, served_model_names=("x" * 20_000,))  # a name that is in every event
    with serving(echo_with(echo, max_model_len=65536), fat) as server:
        server.group.step_s = 0.001
        stalled = server.open(COMPLETION, {"prompt": "the cat", "max_tokens": 60_000, "stream": True})
        with contextlib.closing(stalled):
            server.wait_for(lambda: server.service.engine.stats().open_streams == 1, "it runs")
            neighbour = server.complete("the cat", max_tokens=50, stream=True)
            assert joined(neighbour.events) == "the cat" * 25
            server.wait_for(lambda: server.service.engine.stats().open_streams == 0, "it is cut off", 20.0)
        server.wait_idle()
        assert server.metric("peg:request_success_total", finished_reason="abort") == 1


def test_five_hundred_come_and_go(echo: EngineConfig) -> None:
    """Random disconnects and cancels in every phase: gauges go back to zero and a neighbour's text is unchanged."""
    with serving(echo_with(echo, max_num_seqs=4)) as server:
        server.group.step_s = 0.0005
        dice = random.Random(5)
        neighbour: list[str] = []

        def stay() -> None:
            for _ in range(10):
                answer = server.complete("the cat", max_tokens=100, ignore_eos=True)
                neighbour.append(answer.json["choices"][0]["text"])

        def come_and_go(seed: int) -> None:
            own = random.Random(seed)
            for number in range(125):
                name = f"r{seed}-{number}"
                body = long_answer(stream=own.random() < 0.5, request_id=name, n=own.choice((1, 1, 2)))
                with server.open(COMPLETION, body) as sock:
                    time.sleep(own.choice((0, 0, 0.002, 0.02)))
                    if own.random() < 0.3:
                        server.request("DELETE", f"/v1/requests/{name}")
                    elif own.random() < 0.5:
                        reset(sock)

        threads = [threading.Thread(target=stay)]
        threads += [threading.Thread(target=come_and_go, args=(dice.randrange(1 << 30),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.wait_idle()
        assert neighbour == ["the cat" * 50] * 10
        assert server.metric("peg:num_requests_running") == 0
        assert server.metric("peg:num_requests_waiting") == 0
        assert server.metric("peg:kv_cache_usage_perc") == 0
        scheduler = server.call(lambda: server.service.engine.stats().scheduler)
        ended = [server.metric("peg:request_success_total", finished_reason=why) for why in ("stop", "length", "abort")]
        assert sum(ended) == scheduler.counters.admitted
