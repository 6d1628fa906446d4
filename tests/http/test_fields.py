"""What a request's fields come to at the ranks, and where the defaults come from."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from peg.config import EngineConfig, ServerConfig
from peg.plan import SamplingParams
from tests.http.echo_group import EOS
from tests.http.serving import Server, model_dir, serving

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETION, {"prompt": "the"}),
    (CHAT, {"messages": [{"role": "user", "content": "the"}]}),
)


def tokens(server: Server, text: str) -> tuple[int, ...]:
    return tuple(server.post("/tokenize", {"prompt": text}).json["tokens"])


def params(server: Server, route: str, body: dict[str, Any]) -> SamplingParams:
    answer = server.post(route, {"max_tokens": 4, "seed": 3, **body})
    assert answer.status == 200, answer.body
    return server.group.seen[-1].params


def is_open(server: Server, sequences: int) -> bool:
    return server.service.engine.stats().open_streams == sequences


@pytest.mark.parametrize(("route", "body"), BODIES, ids=["completion", "chat"])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"presence_penalty": -2, "frequency_penalty": 2}, {"presence_penalty": -2.0, "frequency_penalty": 2.0}),
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"logit_bias": {"5": 1000, "6": -1000, "7": 0.5}}, {"logit_bias": ((5, 100.0), (6, -100.0), (7, 0.5))}),
        ({"allowed_token_ids": [5, 6, 5]}, {"allowed_token_ids": frozenset({5, 6})}),
        ({"min_tokens": 2}, {"min_tokens": 2}),
        ({"min_tokens": 4}, {"min_tokens": 4}),
        ({"temperature": 0.003}, {"temperature": 0.01}),
        ({"temperature": 2, "top_k": -1, "top_p": 0.5, "min_p": 0.1}, {"temperature": 2.0, "top_p": 0.5, "min_p": 0.1}),
        ({"top_k": 0}, {}),
        ({"top_k": 7}, {"top_k": 7}),
        ({"seed": -(2**63)}, {"seed": -(2**63)}),
        ({"seed": 2**63 - 1}, {"seed": 2**63 - 1}),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_fields_reach_the_ranks(
    server: Server, route: str, body: dict[str, Any], fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Each field as it is written in the contract, alike on both routes."""
    wanted = SamplingParams(**{"temperature": 0.0, "seed": 3, **expected})
    assert params(server, route, body | fields) == wanted


def test_bad_words_are_banned_alone_and_after_a_space(server: Server) -> None:
    """A word is several token sequences: as it begins a text, and as it follows another."""
    found = params(server, *BODIES[0]).bad_words
    assert found == ()
    found = params(server, COMPLETION, {"prompt": "a", "bad_words": ["cat", " the", "toolcall"]}).bad_words
    words = ("cat", " cat", " the", "toolcall", " toolcall")
    assert found == tuple(dict.fromkeys(tokens(server, word) for word in words))


def test_min_tokens_holds_stops_back(server: Server) -> None:
    """What would stop before is text; the same stop ends it afterwards; the stop ids go to the ranks."""
    body = {"prompt": "the cat END", "stop": "cat", "max_tokens": 9, "stop_token_ids": [5]}
    assert server.post(COMPLETION, body | {"min_tokens": 3}).json["choices"][0]["text"] == "the cat ENDthe "
    assert server.post(COMPLETION, body).json["choices"][0]["text"] == "the "
    assert params(server, COMPLETION, body | {"min_tokens": 3}).min_tokens == 3
    assert set(server.group.seen[-1].stop_ids) == {5, EOS}


@pytest.mark.parametrize("opted_out", [False, True])
def test_defaults_of_the_checkpoint_hold_unless_left_out(
    echo: EngineConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str], opted_out: bool
) -> None:
    """Request before generation_config.json before OpenAI's; repetition_penalty too; the log says which, at start."""
    folder = model_dir(tmp_path)
    given = {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": None,
        "repetition_penalty": 1.05,
        "do_sample": True,
    }
    (folder / "generation_config.json").write_text(json.dumps(given))
    config = ServerConfig(generation_config="none" if opted_out else "auto")
    with serving(replace(echo, model_dir=folder), config) as server:
        found = params(server, *BODIES[1])
        asked = params(server, COMPLETION, {"prompt": "a", "top_k": 5, "repetition_penalty": 1})
    theirs = SamplingParams(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05, seed=3)
    openai = SamplingParams(temperature=1.0, seed=3)
    assert found == (openai if opted_out else theirs)
    assert asked == replace(openai if opted_out else theirs, top_k=5, repetition_penalty=1.0)
    logged = capfd.readouterr().out
    assert "sampling defaults" in logged
    assert "--generation-config none" in logged
    assert ("repetition_penalty=1.05" in logged) != opted_out


def test_priorities_order_the_queue(echo: EngineConfig) -> None:
    """A smaller number goes first, then who came first; without the policy any but 0 is refused."""
    with serving(replace(echo, scheduling_policy="priority", max_num_seqs=1)) as server:
        server.group.go.clear()
        socks = []
        for place, priority in enumerate((0, 5, -1, 5, None, -(2**31))):
            body = {"prompt": [65 + place], "max_tokens": 1, "priority": priority}
            socks.append(server.open(COMPLETION, body))
            server.wait_for(partial(is_open, server, place + 1), "admitted")
        server.group.go.set()
        server.wait_idle()
        assert [chr(row.prompt_ids[0]) for row in server.group.seen] == list("AFCEBD")
        for sock in socks:
            sock.close()
