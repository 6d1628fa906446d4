"""Overload and time: what may wait, for how long, and what a client that waits is told."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from typing import Any

import pytest

from peg.config import EngineConfig, ServerConfig
from peg.text.tokenizer import Tokenizer
from tests.http.serving import Answer, Server, joined, serving

COMPLETION = "/v1/completions"


def long_answer(**fields: Any) -> dict[str, Any]:
    return {"prompt": "the cat", "max_tokens": 100, "ignore_eos": True, **fields}


def together(server: Server, bodies: list[dict[str, Any]]) -> tuple[list[threading.Thread], list[Answer]]:
    """Requests that are sent at once; their answers come into the list."""
    answers: list[Answer] = []

    def ask(body: dict[str, Any]) -> None:
        answers.append(server.post(COMPLETION, body))

    threads = [threading.Thread(target=ask, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    return threads, answers


@pytest.mark.parametrize("stream", [False, True])
def test_fifty_requests_against_a_cap_of_four(echo: EngineConfig, stream: bool) -> None:
    """Two run and four wait; the other 44 get a 429 with Retry-After while nothing moves, and each is counted once."""
    with serving(replace(echo, max_num_seqs=2, max_num_queued_reqs=4)) as server:
        server.group.go.clear()
        threads, answers = together(server, [long_answer(stream=stream)] * 50)
        server.wait_for(lambda: len(answers) == 44, "44 are refused")
        for answer in answers:
            assert (answer.status, answer.error["code"], answer.error["type"]) == (
                429,
                "queue_full",
                "rate_limit_error",
            )
            assert answer.headers["retry-after"] == "1"
            assert "at most 4 may" in answer.error["message"]
        assert server.metric("peg:num_requests_running") + server.metric("peg:num_requests_waiting") == 6
        server.group.go.set()
        for thread in threads:
            thread.join()
        assert sorted(answer.status for answer in answers) == [200] * 6 + [429] * 44
        server.wait_idle()
        assert server.metric("peg:request_success_total", finished_reason="rejected") == 44
        assert server.metric("peg:request_success_total", finished_reason="length") == 6
        assert server.metric("peg:http_requests_total", route=COMPLETION, status="429") == 44


def test_tokens_that_wait_are_bounded(echo: EngineConfig) -> None:
    """A prompt that would bring the waiting ones over the limit is a 429; one that fits waits; more than ever a 400."""
    with serving(replace(echo, max_num_seqs=1, max_num_queued_tokens=100)) as server:
        server.group.go.clear()
        threads, answers = together(server, [{"prompt": [65] * 200, "max_tokens": 1}])
        server.wait_for(lambda: server.service.engine.stats().scheduler.running == 1, "one runs")
        more, waited = together(server, [{"prompt": [65] * 60, "max_tokens": 1}])
        server.wait_for(lambda: server.service.engine.stats().scheduler.waiting == 1, "one waits")
        full = server.complete([65] * 41, max_tokens=1)
        assert (full.status, full.headers["retry-after"]) == (429, "1")
        assert "101 tokens would wait: at most 100 may" in full.error["message"]
        admitted = server.call(lambda: server.service.engine.stats().scheduler.counters.admitted)
        assert server.complete([[65] * 30, [66] * 30], max_tokens=1).status == 429
        assert server.call(lambda: server.service.engine.stats().scheduler.counters.admitted) == admitted, (
            "not even one"
        )
        never = server.complete([65], n=200, max_tokens=1)
        assert (never.status, never.error["type"]) == (400, "invalid_request_error")
        server.group.go.set()
        for thread in threads + more:
            thread.join()
        assert [answer.status for answer in answers + waited] == [200, 200]


def test_a_full_queue_says_so_before_it_tokenises(echo: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte that could not be let in anyway costs nothing."""
    with serving(replace(echo, max_num_seqs=1, max_num_queued_reqs=0)) as server:
        server.group.go.clear()
        with server.open(COMPLETION, long_answer(stream=True)):
            server.wait_for(lambda: server.service.engine.stats().scheduler.running == 1, "one runs")
            with monkeypatch.context() as patch:
                patch.setattr(Tokenizer, "encode_async", None)
                assert server.complete("x" * (1 << 20)).status == 429
                assert server.chat("x" * (1 << 20)).status == 429
            server.group.go.set()


def test_several_sequences_are_let_in_together_or_not_at_all(echo: EngineConfig) -> None:
    """With one place left n = 2 is refused whole: nothing of it runs, and it is counted once."""
    with serving(replace(echo, max_num_seqs=1, max_num_queued_reqs=1)) as server:
        server.group.go.clear()
        with server.open(COMPLETION, long_answer(stream=True)):
            server.wait_for(lambda: server.service.engine.stats().scheduler.running == 1, "one runs")
            assert server.complete(**long_answer(n=2)).status == 429
            assert server.complete(**long_answer(prompt=["a", "b"])).status == 429
            assert server.call(lambda: server.service.engine.stats().scheduler.counters.admitted) == 1
            assert server.metric("peg:request_success_total", finished_reason="rejected") == 2
            assert server.complete(**long_answer(n=3)).status == 400, "more than could ever be let in"
            server.group.go.set()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_ended(echo: EngineConfig, stream: bool) -> None:
    """Before its first token it is a 504; a stream that has begun gets an error event, and its sequence ends."""
    with serving(replace(echo, max_num_seqs=1), ServerConfig(request_timeout_s=0.3)) as server:
        server.group.go.clear()
        threads, answers = together(server, [long_answer(stream=stream)] * 2)  # one runs, one waits
        for thread in threads:
            thread.join()
        assert [(answer.status, answer.error["code"]) for answer in answers] == [(504, "request_timeout")] * 2
        server.wait_for(lambda: not server.service.engine.stats().open_streams, "both are gone")
        server.group.go.set()
        server.group.step_s = 0.02
        late = server.complete(**long_answer(stream=stream))
        if stream:
            *pieces, last = late.events
            assert joined(pieces).startswith("the cat")
            assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "request_timeout")
        else:
            assert late.status == 504
        server.wait_idle()
        server.group.step_s = 0.0
        assert server.complete("the").status == 200
        assert server.metric("peg:request_success_total", finished_reason="abort") == 3


def test_a_body_that_does_not_come_is_ended(echo: EngineConfig) -> None:
    """A client that sends a head and then nothing does not keep its place for ever."""
    with (
        serving(echo, ServerConfig(request_timeout_s=0.2)) as server,
        socket.create_connection(server.address, timeout=5) as sock,
    ):
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: peg\r\nContent-Type: application/json\r\n")
        sock.sendall(b"Content-Length: 100\r\n\r\n{")
        assert sock.recv(4096).startswith(b"HTTP/1.1 504")


def read_until(sock: socket.socket, mark: bytes, received: bytes = b"") -> bytes:
    while mark not in received:
        part = sock.recv(1 << 16)
        assert part, received
        received += part
    return received


def test_a_silent_stream_says_that_it_lives(echo: EngineConfig) -> None:
    """Comments while nothing comes, before the first token and between two; the events beside them are as ever."""
    with serving(echo, ServerConfig(keep_alive_s=0.05)) as server:
        server.group.go.clear()
        with server.open(COMPLETION, long_answer(stream=True, max_tokens=2)) as sock:
            received = read_until(sock, b": keep-alive\n\n")
            assert received.startswith(b"HTTP/1.1 200")
            assert b"data:" not in received
            server.group.go.set()
            received = read_until(sock, b"[DONE]", received)
        assert received.count(b'"text":') == 3  # two tokens and the end
        server.group.step_s = 0.2
        between = server.complete(**long_answer(stream=True, max_tokens=3)).body
        assert between.count(b": keep-alive\n\n") >= 2
        server.group.step_s = 0.0
        assert b"keep-alive" not in server.complete(**long_answer(stream=True)).body


def test_a_failure_after_a_comment_is_an_event(echo: EngineConfig) -> None:
    """A status that has gone out cannot be taken back: the error comes as an event, then [DONE]."""
    with serving(echo, ServerConfig(keep_alive_s=0.03, request_timeout_s=0.3)) as server:
        server.group.go.clear()
        body = server.complete(**long_answer(stream=True)).body.decode()
        *comments, error, done, rest = body.split("\n\n")
        assert set(comments) == {": keep-alive"}
        assert '"code":"request_timeout"' in error
        assert (done, rest) == ("data: [DONE]", "")
        server.group.go.set()


def test_tokens_that_are_there_together_have_an_event_each(echo: EngineConfig) -> None:
    """However fast they come, a stream's events do not depend on it."""
    with serving(echo) as server:
        for max_tokens in (1, 2, 99, 200):
            *pieces, last = server.complete(**long_answer(stream=True, max_tokens=max_tokens)).events
            assert [each["choices"][0]["text"] for each in pieces] == (["the", " cat"] * 100)[:max_tokens]
            assert last["choices"][0]["text"] == ""


@pytest.mark.parametrize("interval", [1, 4, 1000])
def test_events_may_come_by_several_tokens(echo: EngineConfig, interval: int) -> None:
    """The first token comes at once, then so many together, then the rest; text and usage do not change."""
    with serving(echo, ServerConfig(stream_interval=interval)) as server:
        server.group.step_s = 0.003
        fields = long_answer(stream=True, max_tokens=50, stream_options={"include_usage": True})
        *pieces, last, usage = server.complete(**fields).events
        assert joined(pieces) == "the cat" * 25
        most = 1 + -(-49 // interval)
        assert most / 2 < len(pieces) <= most
        assert last["choices"][0]["finish_reason"] == "length"
        assert usage["usage"]["completion_tokens"] == 50


def test_metrics_are_there_before_the_first_request(echo: EngineConfig) -> None:
    """Every name that dashboards know, at zero, with the model's name and one engine."""
    with serving(echo) as server:
        for name in (
            "num_requests_running",
            "num_requests_waiting",
            "kv_cache_usage_perc",
            "prompt_tokens_total",
            "generation_tokens_total",
            "num_preemptions_total",
            *(
                f"{name}_count"
                for name in (
                    "time_to_first_token_seconds",
                    "inter_token_latency_seconds",
                    "e2e_request_latency_seconds",
                    "request_queue_time_seconds",
                    "request_prefill_time_seconds",
                    "request_decode_time_seconds",
                    "request_inference_time_seconds",
                    "request_prompt_tokens",
                    "request_generation_tokens",
                    "request_max_num_generation_tokens",
                    "request_params_n",
                    "request_params_max_tokens",
                    "iteration_tokens_total",
                )
            ),
        ):
            assert server.metric(f"peg:{name}", model_name="echo", engine="0") == 0
        for why in ("stop", "length", "abort", "error", "rejected"):
            assert server.metric("peg:request_success_total", model_name="echo", finished_reason=why) == 0
        assert server.metric("peg:cache_config_info", block_size="16", engine="0") == 1


def test_where_the_time_went(echo: EngineConfig) -> None:
    """Queue, prefill and decode are told apart and make the whole; steps by size; a sequence never started has none."""
    with serving(replace(echo, max_num_seqs=1)) as server:
        server.group.step_s = 0.02
        threads, _ = together(server, [long_answer(max_tokens=6)] * 2)
        server.wait_for(lambda: server.service.engine.stats().scheduler.waiting == 1, "one waits")
        with server.open(COMPLETION, long_answer()):
            server.wait_for(lambda: server.service.engine.stats().scheduler.waiting == 2, "another waits")
        for thread in threads:
            thread.join()
        server.wait_idle()
        sums = {
            name: server.metric(f"peg:{name}_seconds_sum")
            for name in ("request_queue_time", "request_prefill_time", "request_decode_time", "request_inference_time")
        }
        assert sums["request_inference_time"] == pytest.approx(
            sums["request_prefill_time"] + sums["request_decode_time"]
        )
        assert sums["request_queue_time"] > 0.1
        assert sums["request_decode_time"] > 0.15
        assert server.metric("peg:request_queue_time_seconds_count") == 2
        assert server.metric("peg:e2e_request_latency_seconds_count") == 3
        assert server.metric("peg:iteration_tokens_total_sum") == 2 * (2 + 5)
        assert server.metric("peg:iteration_tokens_total_bucket", le="1.0") == 10
        assert server.metric("peg:iteration_tokens_total_bucket", le="2.0") == 12
        assert server.metric("peg:request_max_num_generation_tokens_sum") == 12
