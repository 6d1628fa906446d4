"""The small routes: models, tokenize, detokenize, version, metrics."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from peg.config import EngineConfig, ServerConfig
from tests.http.echo_group import BOS, FORBIDDEN
from tests.http.serving import Server, model_dir, serving


def test_models_are_listed_and_shown(echo: EngineConfig) -> None:
    """Every served name is listed with its context, each can be shown, and each may be asked for."""
    with serving(echo, ServerConfig(served_model_names=("small", "org/echo"))) as server:
        document = server.get("/v1/models").json
        assert document["object"] == "list"
        assert [model["id"] for model in document["data"]] == ["small", "org/echo"]
        assert all(model["object"] == "model" and model["max_model_len"] == 256 for model in document["data"])
        assert server.get("/v1/models/org/echo").json == document["data"][1]
        assert server.get("/v1/models/org%2Fecho").json == document["data"][1]
        assert server.complete("the").json["model"] == "small"
        assert server.complete("the", model="org/echo").json["model"] == "org/echo"
        assert server.complete("the", model="echo").status == 404


@pytest.mark.parametrize("text", ["the cat", "你好 é😀", "<|im_start|>the<|im_end|>", "\x00\u202e"])
def test_tokenize_and_detokenize_are_inverse(server: Server, text: str) -> None:
    """What tokenize gives, detokenize turns back; special tokens written in the text count as tokens."""
    found = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 256
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json == {"prompt": text}


def test_tokenize_agrees_with_generation(server: Server) -> None:
    """The ids of a conversation are those that a chat completion counts."""
    messages = [{"role": "user", "content": "the cat 你好"}]
    count = server.post("/tokenize", {"messages": messages}).json["count"]
    answer = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert answer.json["usage"]["prompt_tokens"] == count


def test_tokenize_takes_more_than_the_context(server: Server) -> None:
    """A text may be counted that could not be generated from."""
    assert server.post("/tokenize", {"prompt": " the" * 1000}).json["count"] == 1000


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}, {"prompt": 1}, {"prompt": "a", "x": 1}])
def test_tokenize_refuses(server: Server, body: dict[str, object]) -> None:
    """Exactly one of prompt and messages, and nothing unknown."""
    assert server.post("/tokenize", body).status == 400


@pytest.mark.parametrize("tokens", [None, "a", [-1], [True], [1 << 40], [FORBIDDEN + 1]])
def test_detokenize_refuses(server: Server, tokens: object) -> None:
    """Ids that no token has."""
    answer = server.post("/detokenize", {"tokens": tokens})
    assert (answer.status, answer.error["param"].split(".")[0]) == (400, "tokens")


def test_metrics_count_each_request_once(echo: EngineConfig) -> None:
    """Counters, histograms and gauges have the known names, and every outcome is counted once."""
    with serving(echo) as server:
        server.complete("the cat", max_tokens=5)
        server.complete("the<|im_end|>", n=2, stream=True)
        server.complete("the", max_tokens=1 << 30)
        page = server.get("/metrics")
        assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
        for why, count in (("length", 1), ("stop", 2), ("rejected", 1), ("abort", 0), ("error", 0)):
            assert server.metric("peg:request_success_total", model_name="echo", finished_reason=why) == count
        assert server.metric("peg:prompt_tokens_total") == 2 + 2 * 2
        assert server.metric("peg:generation_tokens_total") == 5 + 2 * 2
        assert server.metric("peg:time_to_first_token_seconds_count") == 3
        assert server.metric("peg:inter_token_latency_seconds_count") == 4 + 2
        assert server.metric("peg:request_generation_tokens_sum") == 9
        assert server.metric("peg:http_requests_total", route="/v1/completions", status="200") == 2
        assert server.metric("peg:http_requests_total", route="/v1/completions", status="400") == 1
        assert server.metric("peg:engine_state", state="ready") == 1
        assert server.metric("process_open_fds") > 0


def test_sampling_defaults_come_from_the_checkpoint(server: Server, echo: EngineConfig) -> None:
    """generation_config.json (temperature 0 here) holds unless the request, or the start, says otherwise."""
    body = {"prompt": "abcdefghijklmnop", "max_tokens": 4, "seed": 5}
    assert server.post("/v1/completions", body).json["choices"][0]["text"] == "abcd"
    assert server.post("/v1/completions", body | {"temperature": 1}).json["choices"][0]["text"] == "fghi"
    with serving(echo, ServerConfig(generation_config="none")) as bare:
        assert bare.post("/v1/completions", body).json["choices"][0]["text"] == "fghi"


def test_the_beginning_of_a_text_is_marked_once(echo: EngineConfig, tmp_path: Path) -> None:
    """A tokenizer that adds BOS does so for a completion's text; ids and a conversation are taken as they are."""
    folder = model_dir(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": True}))
    with serving(replace(echo, model_dir=folder)) as server:

        def tokens(**body: object) -> list[int]:
            found: list[int] = server.post("/tokenize", body).json["tokens"]
            return found

        bare = tokens(prompt="the cat", add_special_tokens=False)
        assert tokens(prompt="the cat") == tokens(prompt="<|im_start|>the cat") == [BOS, *bare]
        messages = [{"role": "user", "content": "the cat"}]
        assert tokens(messages=messages) == bare
        assert tokens(messages=messages, add_special_tokens=True) == [BOS, *bare]
        for prompt, counted in (("the cat", 3), ("<|im_start|>the cat", 3), (bare, 2), ([BOS, *bare], 3)):
            assert server.complete(prompt).json["usage"]["prompt_tokens"] == counted
        assert server.complete("the cat", add_special_tokens=False).json["usage"]["prompt_tokens"] == 2
        assert server.chat("the cat", max_tokens=1).json["usage"]["prompt_tokens"] == 2
        assert server.chat("the cat", max_tokens=1, add_special_tokens=True).json["usage"]["prompt_tokens"] == 3
