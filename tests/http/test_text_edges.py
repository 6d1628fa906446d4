"""Text at its edges: templates that requests bring, very long lines, stop strings that meet in one token."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from peg.config import EngineConfig, ServerConfig
from tests.http.serving import Server, joined, serving

CHAT = "/v1/chat/completions"


def test_a_request_may_bring_its_template_where_that_is_trusted(echo: EngineConfig) -> None:
    """It renders instead of the model's, in the sandbox; a faulty one is a 400 that names it."""
    with serving(echo, ServerConfig(trust_request_chat_template=True)) as server:

        def say(template: str, **fields: Any) -> Any:
            return server.chat("cat", max_tokens=2, chat_template=template, **fields)

        said = say("{{ bos_token }}the {{ messages[0].content }}").json
        assert (said["choices"][0]["message"]["content"], said["usage"]["prompt_tokens"]) == ("the", 3)
        assert say("{{ colour }}", chat_template_kwargs={"colour": "END"}).status == 200
        for faulty in ("{% if %}", "{{ messages.__class__.__mro__ }}", "{{ raise_exception('no') }}", ""):
            refused = say(faulty)
            assert (refused.status, refused.error["type"]) == (400, "invalid_request_error"), faulty


def test_a_megabyte_in_one_line_holds_nobody_up(echo: EngineConfig) -> None:
    """Where the context is long enough it is taken, and tokenised beside a neighbour's stream, not before it."""
    with serving(replace(echo, max_model_len=1 << 21, max_num_batched_tokens=1 << 21)) as server:
        server.group.step_s = 0.002
        counted: list[Any] = []

        def ask() -> None:
            counted.append(server.complete("the cat" * 150_000, max_tokens=1).json["usage"])

        long = threading.Thread(target=ask)
        started_s = time.monotonic()
        long.start()
        gaps = []
        while long.is_alive():
            asked_s = time.monotonic()
            assert server.get("/health").status == 200
            gaps.append(time.monotonic() - asked_s)
        assert counted == [{"prompt_tokens": 300_000, "completion_tokens": 1, "total_tokens": 300_001}]
        assert max(gaps) < 0.8 * (time.monotonic() - started_s), "the loop stood still"


@pytest.mark.parametrize(
    ("stops", "said", "matched"),
    [
        (["at", "c"], "the ", "c"),
        (["at", "ca"], "the ", "ca"),
        (["cat", "ca"], "the ", "ca"),
        (["t", "the c"], "", "t"),
        (["he c", "zz"], "t", "he c"),
        ([" cat", "zz"], "the", " cat"),
        (["catx", "the cat!"], "the catthe catth", None),
    ],
    ids=repr,
)
@pytest.mark.parametrize("stream", [False, True])
def test_two_stops_in_one_step(server: Server, stops: list[str], said: str, matched: str | None, stream: bool) -> None:
    """Of stops that one token completes, the one that begins first ends the text; one that never completes is text."""
    answer = server.complete("the cat", max_tokens=5, stop=stops, stream=stream)
    if stream:
        assert joined(answer.events).startswith(said)
        last = answer.events[-1]["choices"][0]
        assert last["stop_reason"] == matched
        assert matched is None or joined(answer.events) == said
    else:
        choice = answer.json["choices"][0]
        assert choice["stop_reason"] == matched
        assert choice["text"] == (said if matched else "the catthe catthe")


@pytest.mark.parametrize(
    "content",
    ["\x00", "a\x00b", "\u202e\u2066x\u2069\u202c", "\ufeffa", "\u2028", "\U0010ffff", "e\u0301" * 30, "﷽" * 20],
    ids=ascii,
)
def test_characters_that_look_like_nothing_are_text(server: Server, content: str) -> None:
    """NUL, bidi marks, byte order marks, line separators, noncharacters: said again to the letter, on both routes."""
    count = server.post("/tokenize", {"prompt": content}).json["count"]
    assert server.complete(content, max_tokens=count).json["choices"][0]["text"] == content
    assert server.chat(content, max_tokens=count).json["choices"][0]["message"]["content"] == content
    assert joined(server.chat(content, max_tokens=count, stream=True).events) == content


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a", "stop": "\\ud800"}',
        b'{"prompt": "a", "bad_words": ["\\udfff"]}',
        b'{"prompt": ["a", "\\ud83d"]}',
        b'{"prompt": "a", "user": "\\ud800x"}',
        b'{"prompt": "a", "\\ud800": 1}',
    ],
)
def test_a_lone_surrogate_is_refused_wherever_it_stands(server: Server, body: bytes) -> None:
    """Half of a pair is no character: a 400, and nothing reaches the engine."""
    before = server.call(lambda: server.service.engine.stats().scheduler.counters.admitted)
    assert server.post("/v1/completions", body).status == 400
    assert server.call(lambda: server.service.engine.stats().scheduler.counters.admitted) == before


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "developer", "content": "the"}, {"role": "user", "content": " cat"}],
        [{"role": "system", "content": "the"}, {"role": "user", "content": [{"type": "text", "text": " cat"}]}],
        [{"role": "user", "content": "the"}, {"role": "user", "content": " cat", "refusal": None, "tool_calls": None}],
        [{"role": "user", "content": "the", "name": "anna"}, {"role": "user", "content": " cat"}],
    ],
)
def test_roles_and_parts(server: Server, messages: list[dict[str, Any]]) -> None:
    """Roles, both forms of content and nulls come to the same text."""
    said = server.post(CHAT, {"messages": messages, "max_tokens": 2}).json
    assert said["choices"][0]["message"]["content"] == "the cat"


def test_an_old_client_gets_its_stream_unchunked(server: Server) -> None:
    """HTTP/1.0 knows no chunks: the same events, and the end of the connection ends them."""
    body = b'{"prompt": "the cat", "max_tokens": 4, "stream": true}'
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection(server.address, timeout=5) as sock:
        sock.sendall(head + body)
        received = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    head, _, events = received.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    *documents, done, rest = events.decode().split("\n\n")
    assert joined([json.loads(each.removeprefix("data: ")) for each in documents]) == "the catthe cat"
    assert (done, rest) == ("data: [DONE]", "")
