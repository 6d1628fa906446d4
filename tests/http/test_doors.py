"""Who may do what: API keys, the admin routes, and the routes that are always open."""

from __future__ import annotations

import socket

import pytest

from peg.config import EngineConfig, ServerConfig
from tests.http.serving import Server, serving
from tests.http.test_leaving import echo_with

FAULT = {"kind": "raise", "rank": 0, "after_steps": 1000000}


@pytest.fixture(scope="module")
def keyed(echo: EngineConfig) -> object:
    """A server with two API keys and an admin key."""
    with serving(echo, ServerConfig(api_keys=("one", "zwei-ü"), admin_key="root")) as server:
        yield server


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/tokenize", "/nowhere"])
@pytest.mark.parametrize("given", [None, "", "one", "Bearer", "Bearer ", "Bearer two", "Bearer root", "Basic one"])
def test_without_a_key_there_is_a_401(keyed: Server, path: str, given: str | None) -> None:
    """In the one shape, whatever the route; the admin key is no API key."""
    answer = keyed.request("GET", path, headers={} if given is None else {"Authorization": given})
    assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"


def test_every_key_opens(keyed: Server) -> None:
    """Each key of the list, the scheme in any case, and a key beyond ASCII."""
    for key in ("Bearer one", "bearer one", "Bearer zwei-ü"):
        assert (
            keyed.request("GET", "/v1/models", headers={"Authorization": key.encode().decode("latin-1")}).status == 200
        )


def test_some_paths_are_open(keyed: Server) -> None:
    """Health, version, metrics and the document of the interface need no key."""
    assert {keyed.get(path).status for path in ("/health", "/version", "/metrics", "/openapi.json")} == {200}


def test_admin_needs_its_own_key(keyed: Server) -> None:
    """An API key does not open the admin routes; the admin key does."""
    assert keyed.post("/admin/fault", FAULT, Authorization="Bearer one").status == 401
    assert keyed.get("/admin/health").status == 401
    assert keyed.post("/admin/fault", FAULT, Authorization="Bearer root").status == 200


def test_no_key_is_in_the_repr() -> None:
    """What is logged of a configuration has no key in it."""
    text = repr(ServerConfig(api_keys=("eins",), admin_key="root"))
    assert "eins" not in text
    assert "root" not in text


def test_admin_without_a_key_is_for_loopback_alone(server: Server) -> None:
    """Open on a loopback address, but not to a request that came through a proxy; a web page cannot send JSON."""
    assert server.get("/admin/health").json["state"] == "ready"
    assert server.post("/admin/fault", FAULT).status == 200
    for name in ("Forwarded", "X-Forwarded-For"):
        forwarded = server.request("POST", "/admin/fault", FAULT, {name: "for=192.0.2.1"})
        assert (forwarded.status, forwarded.error["code"]) == (403, "forbidden")
        assert name in forwarded.error["message"]
    assert server.post("/admin/fault", FAULT, Content_Type="text/plain").status == 415


def test_admin_is_closed_on_another_address(echo: EngineConfig) -> None:
    """Bound to every address, the admin routes are a 403 that says what is needed, even to a local client."""
    with serving(echo, host="0.0.0.0") as server:
        refused = server.get("/admin/health")
        assert refused.status == 403
        assert "--admin-key" in refused.error["message"]
        assert server.get("/health").status == 200


def test_faults_need_the_flag(echo: EngineConfig) -> None:
    """Without --enable-fault-injection nobody breaks the engine."""
    with serving(echo_with(echo, enable_fault_injection=False)) as server:
        refused = server.post("/admin/fault", FAULT)
        assert (refused.status, refused.error["code"]) == (403, "forbidden")
        assert "--enable-fault-injection" in refused.error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"kind": "explode", "rank": 0},
        {"kind": "raise", "rank": 1},
        {"kind": "raise", "rank": -1},
        {"kind": "raise", "rank": True},
        {"kind": "raise", "rank": 0, "after_steps": 0},
        {"kind": "raise", "rank": 0, "when": "now"},
    ],
)
def test_a_faulty_fault_is_refused(server: Server, body: dict[str, object]) -> None:
    """Kinds, ranks and steps that do not exist are a 400."""
    assert server.post("/admin/fault", body).status == 400


def test_a_body_over_the_limit_is_a_413(echo: EngineConfig) -> None:
    """In the one shape, and the connection of the next client is served."""
    with serving(echo, ServerConfig(max_body_bytes=2048)) as server:
        answer = server.complete("x" * 4096)
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")
        assert "2048" in answer.error["message"]
        assert server.complete("the").status == 200


def test_what_is_not_http_closes_only_its_own_connection(server: Server) -> None:
    """Garbage instead of a request line gets an answer and harms nobody."""
    with socket.create_connection(server.address, timeout=5) as sock:
        sock.sendall(b"\x16\x03\x01 not http\r\n\r\n")
        assert b"400" in sock.recv(4096)
    assert server.get("/health").status == 200
