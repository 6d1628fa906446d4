"""The engine's life seen through HTTP: loading, failing, draining."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from peg.config import EngineConfig, ServerConfig
from peg.deadlines import Deadlines
from peg.engine import Engine
from peg.errors import CheckpointError
from peg.failure import EngineState
from peg.server.service import ModelTexts
from tests.http.serving import Answer, Server, serving
from tests.http.test_leaving import COMPLETION, echo_with, long_answer

FAST = Deadlines(step_cap_s=1.0, linger_s=1.0)


class Clients:
    """Requests that are sent together, each on a thread."""

    def __init__(self, server: Server, bodies: list[dict[str, Any]]) -> None:
        self.answers: list[Answer] = []
        self.ended_s: list[float] = []

        def ask(body: dict[str, Any]) -> None:
            self.answers.append(server.post(COMPLETION, body))
            self.ended_s.append(time.monotonic())

        self.threads = [threading.Thread(target=ask, args=(body,)) for body in bodies]
        for thread in self.threads:
            thread.start()

    def wait(self) -> list[Answer]:
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()
        return self.answers


@pytest.mark.parametrize("kind", ["raise", "stall"])
def test_everyone_is_answered_when_a_rank_fails(echo: EngineConfig, kind: str) -> None:
    """Streams get an error event and [DONE], waiting requests a 503, health says why, and the exit code is 70."""
    with serving(echo_with(echo, max_num_seqs=4), deadlines=FAST) as server:
        server.group.step_s = 0.005
        streams = Clients(server, [long_answer(stream=True)] * 4)
        server.wait_for(lambda: server.service.engine.stats().scheduler.counters.generated_tokens > 20, "they stream")
        waiting = Clients(server, [long_answer(stream=stream) for stream in (True, True, False)])
        server.wait_for(lambda: server.service.engine.stats().scheduler.waiting == 3, "three wait")
        fault = {"kind": kind, "rank": 0, "after_steps": 2}
        assert server.post("/admin/fault", fault).status == 200
        struck_s = time.monotonic()
        for answer in streams.wait():
            assert answer.status == 200
            *pieces, last = answer.events
            assert len(pieces) > 2
            assert last["error"]["type"] == "server_error"
            assert ("injected" if kind == "raise" else "took over") in last["error"]["message"]
        for answer in waiting.wait():
            assert (answer.status, answer.error["code"]) == (503, "engine_failed")
        assert max(streams.ended_s + waiting.ended_s) - struck_s < (1.0 if kind == "raise" else FAST.step_cap_s + 1.0)
        health = server.get("/health")
        assert (health.status, health.json["status"]) == (503, "broken")
        assert ("injected" if kind == "raise" else "took over") in health.json["cause"]
        late = server.complete("the")
        assert (late.status, late.error["code"], late.headers["retry-after"]) == (503, "engine_unavailable", "1")
        assert server.metric("peg:engine_state", state="broken") == 1
        assert server.metric("peg:request_success_total", finished_reason="error") == 7
        server.thread.join(5)
    assert server.exit_codes == [70]


def test_who_reads_after_the_rebuild_is_told_of_the_failure(
    echo: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that a failure ended gets 503, also where the engine is READY again before it is answered."""
    answer_everyone = Engine._answer_everyone

    def slowly(engine: Engine, message: str) -> None:
        answer_everyone(engine, message)
        time.sleep(0.1)  # the loop is held up, the supervisor is not: it rebuilds before any reader gets its turn

    monkeypatch.setattr(Engine, "_answer_everyone", slowly)
    with serving(echo_with(echo, on_failure="rebuild")) as server:
        server.group.step_s = 0.005
        clients = Clients(server, [long_answer(stream=stream) for stream in (True, False)])
        server.wait_for(lambda: server.service.engine.stats().scheduler.counters.generated_tokens > 4, "they run")
        assert server.post("/admin/fault", {"kind": "raise", "rank": 0}).status == 200
        streamed, whole = sorted(clients.wait(), key=lambda answer: answer.status)
        assert streamed.events[-1]["error"]["code"] == "engine_failed"
        assert (whole.status, whole.error["code"]) == (503, "engine_failed")
        assert server.complete("the").status == 200


def test_until_it_is_loaded_the_answer_is_503(echo: EngineConfig) -> None:
    """The listener is up before the model: health says starting, requests get 503, metrics are there at zero."""
    with serving(echo, wait_ready=False, prepare=lambda group: group.loaded.clear()) as server:
        health = server.get("/health")
        starting = {"status": "starting", "cause": None, "rebuilds": 0, "last_rebuild": None}
        assert (health.status, health.json) == (503, starting)
        for answer in (server.complete("the"), server.chat("the"), server.get("/v1/models")):
            assert (answer.status, answer.error["code"]) == (503, "engine_unavailable")
        assert server.metric("peg:num_requests_running") == 0
        assert server.metric("peg:request_success_total", finished_reason="stop") == 0
        assert server.metric("peg:time_to_first_token_seconds_count") == 0
        assert server.get("/version").status == 200
        server.group.loaded.set()
        server.wait_for(lambda: server.service.state is EngineState.READY, "ready")
        assert server.get("/health").json["status"] == "ready"


def test_it_is_ready_only_once_the_texts_are_there(echo: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is ready before the tokenizer is still starting, to everyone who asks."""
    load, go = ModelTexts.load, threading.Event()

    def slowly(*args: Any) -> ModelTexts:
        assert go.wait(10)
        return load(*args)

    monkeypatch.setattr(ModelTexts, "load", slowly)
    with serving(echo, wait_ready=False) as server:
        server.wait_for(lambda: server.service.engine.state is EngineState.READY, "the engine is ready")
        assert server.get("/health").json["status"] == "starting"
        assert server.complete("the").status == 503
        go.set()
        server.wait_for(lambda: server.service.state is EngineState.READY, "ready")


def test_a_stop_lets_streams_finish(echo: EngineConfig) -> None:
    """While it drains two streams run to their end, a new request gets 503, and the exit code is 0."""
    with serving(echo) as server:
        server.group.step_s = 0.005
        clients = Clients(server, [long_answer(stream=True, max_tokens=100)] * 2)
        server.wait_for(lambda: server.service.engine.stats().scheduler.counters.generated_tokens > 4, "they stream")
        server.loop.call_soon_threadsafe(server.stop.set)
        server.wait_for(lambda: server.service.state is EngineState.DRAINING, "draining")
        assert server.get("/health").json["status"] == "draining"
        assert server.complete("the").status == 503
        for answer in clients.wait():
            assert answer.events[-1]["choices"][0]["finish_reason"] == "length"
        server.thread.join(5)
    assert server.exit_codes == [0]


def test_a_slow_reader_gets_its_answer_to_the_end(echo: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the shutdown timeout a drain also waits for what is generated and not yet read."""
    monkeypatch.setattr("peg.server.run._CLOSING_S", 0.05)
    with serving(echo, ServerConfig(served_model_names=("x" * 50_000,))) as server:
        with server.open(COMPLETION, long_answer(stream=True)) as sock:
            server.wait_for(
                lambda: server.service.engine.stats().scheduler.counters.generated_tokens == 200, "all said"
            )
            server.loop.call_soon_threadsafe(server.stop.set)
            time.sleep(0.5)
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                part = sock.recv(1 << 20)
                assert part, "the answer was cut"
                received += part
        assert b"data: [DONE]\n\n" in received[-50:]
        server.thread.join(5)
    assert server.exit_codes == [0]


def test_streams_that_the_deadline_cuts_are_told(echo: EngineConfig) -> None:
    """At the end of the shutdown timeout what still runs gets an error event; the exit code is 0."""
    with serving(echo, ServerConfig(shutdown_timeout_s=0.2)) as server:
        server.group.step_s = 0.01
        clients = Clients(server, [long_answer(stream=True), long_answer(stream=False)])
        server.wait_for(lambda: server.service.engine.stats().scheduler.counters.generated_tokens > 4, "they run")
        server.loop.call_soon_threadsafe(server.stop.set)
        streamed, whole = sorted(clients.wait(), key=lambda answer: answer.status)
        assert "shut down" in streamed.events[-1]["error"]["message"]
        assert (whole.status, whole.error["type"]) == (503, "server_error")
        server.thread.join(5)
    assert server.exit_codes == [0]


def test_a_stop_while_loading_ends_it(echo: EngineConfig) -> None:
    """Nobody waits for a load that is not wanted any more."""
    with serving(echo, wait_ready=False, prepare=lambda group: group.loaded.clear()) as server:
        server.loop.call_soon_threadsafe(server.stop.set)
        server.group.loaded.set()
        server.thread.join(10)
    assert server.exit_codes == [0]


def test_texts_that_cannot_be_read_stop_the_start(echo: EngineConfig, tmp_path: Any) -> None:
    """A model directory without a tokenizer is a usage error, not a server that answers 500."""
    raised: list[BaseException] = []
    previous = threading.excepthook
    threading.excepthook = lambda args: raised.append(args.exc_value)  # type: ignore[arg-type]
    try:
        with serving(echo_with(echo, model_dir=tmp_path), wait_ready=False) as server:
            server.thread.join(10)
    finally:
        threading.excepthook = previous
    assert isinstance(raised[0], CheckpointError)
    assert "tokenizer.json" in str(raised[0])


def test_a_handler_that_breaks_is_a_500_that_gives_nothing_away(
    echo: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug of peg's own is logged; the client learns that it was not the request, before and after the first event."""
    with serving(echo) as server:

        def broken(self: object, plan: object) -> None:
            raise RuntimeError("secret")

        with monkeypatch.context() as patch:
            patch.setattr("peg.server.generation.Choice._feed", broken)
            for stream in (False, True):
                answer = server.complete("the", stream=stream)
                assert (answer.status, answer.error["code"]) == (500, "internal_error")
                assert b"secret" not in answer.body
        with monkeypatch.context() as patch:
            patch.setattr("peg.server.completions.CompletionForm.closing", broken)
            *pieces, last = server.complete("the", stream=True).events
            assert pieces
            assert last["error"]["code"] == "internal_error"
        server.wait_idle()
        assert server.complete("the").status == 200
