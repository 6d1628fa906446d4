"""The operator's routes: health in full, aborting requests, draining, stopping, and the list of faults."""

from __future__ import annotations

from typing import Any

import pytest

from peg.config import EngineConfig
from peg.deadlines import Deadlines
from peg.failure import EngineState, FaultKind
from tests.http.serving import Server, serving
from tests.http.test_failing import Clients
from tests.http.test_leaving import long_answer

QUICK = Deadlines(linger_s=0.5)


def busy(server: Server, count: int = 2) -> Clients:
    """Streams that run until somebody ends them."""
    server.group.step_s = 0.01
    before = server.call(server.service.engine.stats).scheduler.counters.generated_tokens
    clients = Clients(server, [long_answer(stream=True)] * count)
    server.wait_for(
        lambda: (
            server.service.engine.stats().scheduler.running == count
            and server.service.engine.stats().scheduler.counters.generated_tokens > before + 4
        ),
        "they stream",
    )
    return clients


def test_health_in_full(server: Server) -> None:
    """State, epoch, ranks, the step in flight, requests, the model, threads and versions."""
    health = server.get("/admin/health")
    assert health.status == 200
    told = health.json
    assert (told["status"], told["state"], told["epoch"], told["cause"]) == ("ready", "ready", 0, None)
    assert (told["secondary"], told["rebuilds"]) == ([], [])
    assert [rank["rank"] for rank in told["ranks"]] == [0]
    assert told["requests"]["running"] == 0
    assert told["model"]["communicator"] == "none"
    assert {"echo-rank", "peg-supervisor"} <= set(told["threads"])
    assert {"peg", "python", "torch"} <= set(told["versions"])


def test_a_step_that_takes_too_long_shows_before_its_deadline(echo: EngineConfig) -> None:
    """Health says stalled, 503, once a step has taken more than half of what it may; and ready when it is back."""
    with serving(echo, deadlines=Deadlines(step_cap_s=1.0)) as server:
        server.group.go.clear()
        clients = Clients(server, [long_answer(max_tokens=2, stream=False)])
        server.wait_for(lambda: server.service.engine.vitals().stalled, "stalled")
        health = server.get("/health")
        assert (health.status, health.json["status"], health.json["cause"]) == (503, "stalled", None)
        server.group.go.set()
        assert [answer.status for answer in clients.wait()] == [200]
        assert server.get("/health").json["status"] == "ready"


def test_one_request_is_aborted(server: Server) -> None:
    """By the id that its client knows; its answer has what there is. The neighbour goes on."""
    clients = busy(server)
    one = next(iter(server.call(lambda: list(server.service.live._by_id))))
    assert server.post("/admin/abort", {"request_id": one}).json == {"aborted": 1}
    server.wait_for(lambda: server.service.engine.stats().scheduler.running == 1, "one is left")
    assert server.post("/admin/abort", {"all": True}).json == {"aborted": 1}
    reasons = [answer.events[-1]["choices"][0]["finish_reason"] for answer in clients.wait()]
    assert reasons == ["abort", "abort"]
    server.wait_idle()


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"request_id": "nobody"}, 404, "request_id"),
        ({"request_id": ""}, 400, "request_id"),
        ({}, 400, "request_id"),
        ({"request_id": "x", "all": True}, 400, "request_id"),
        ({"id": "x"}, 400, "id"),
    ],
)
def test_faulty_aborts_are_refused(server: Server, body: dict[str, Any], status: int, param: str) -> None:
    """An id that is not live is a 404, no id a 400, and both together one too."""
    refused = server.post("/admin/abort", body)
    assert (refused.status, refused.error["param"]) == (status, param)


def test_drain_is_like_a_signal(echo: EngineConfig) -> None:
    """What runs is finished, nothing new is taken, and the exit code is 0."""
    with serving(echo) as server:
        clients = busy(server)
        assert server.post("/admin/drain", {}).json == {"draining": 2}
        server.wait_for(lambda: server.service.state is EngineState.DRAINING, "draining")
        assert server.complete("the").status == 503
        assert [answer.events[-1]["choices"][0]["finish_reason"] for answer in clients.wait()] == ["length", "length"]
        server.thread.join(5)
    assert server.exit_codes == [0]


def test_an_operators_stop(echo: EngineConfig) -> None:
    """Everyone is told the operator's reason, metrics count it, a second stop is a 409, and the exit code is 70."""
    with serving(echo, deadlines=QUICK) as server:
        clients = busy(server)
        assert server.post("/admin/fail", {"reason": "the rack is on fire"}).status == 202
        for answer in clients.wait():
            assert "the rack is on fire" in answer.events[-1]["error"]["message"]
        assert server.get("/health").json["cause"] == "operator_stop: the rack is on fire"
        assert server.metric("peg:engine_failures_total", kind="operator_stop", rank="") == 1
        assert server.metric("peg:engine_failures_total", kind="rank_died", rank="") == 0
        assert server.metric("peg:rebuilds_total") == 0
        assert server.post("/admin/fail", {}).status == 409
        assert server.post("/admin/rebuild", {}).status == 409
        cause = server.get("/admin/health").json["cause"]
        assert (cause["kind"], cause["rank"], cause["step"]) == ("operator_stop", None, None)
        server.thread.join(5)
    assert server.exit_codes == [70]


def test_what_the_supervisor_measures(server: Server) -> None:
    """The step's deadline and the age of each rank's heartbeat are there for alerts."""
    assert server.metric("peg:step_deadline_seconds") > 0
    assert server.metric("peg:rank_heartbeat_age_seconds", rank="0") >= 0
    assert server.metric("peg:engine_state", state="ready") == 1


def test_faults_are_listed(server: Server) -> None:
    """Whoever may inject faults can ask which there are."""
    listed = server.get("/admin/fault").json
    assert set(listed["kinds"]) == set(FaultKind)
    assert listed["points"] == ["before", "inside", "after"]


@pytest.mark.parametrize("path", ["/admin/abort", "/admin/drain", "/admin/fail", "/admin/rebuild", "/admin/fault"])
def test_a_web_page_cannot_send_them(server: Server, path: str) -> None:
    """Without application/json an admin POST is a 415."""
    assert server.post(path, {}, Content_Type="text/plain").status == 415
