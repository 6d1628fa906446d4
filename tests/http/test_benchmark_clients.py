"""Requests as well-known benchmark clients send them, read as they read: tokens = requests × N."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.serving import Answer, Server

N = 12
VLLM_COMPLETION: dict[str, Any] = {
    "model": "echo",
    "prompt": "the cat END",
    "repetition_penalty": 1.0,
    "max_tokens": N,
    "logprobs": None,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
    "temperature": 0.0,
}
VLLM_CHAT: dict[str, Any] = {
    "model": "echo",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "the cat END"}]}],
    "max_completion_tokens": N,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
}
AIPERF_CHAT: dict[str, Any] = {
    "model": "echo",
    "messages": [{"role": "user", "name": "", "content": "the cat END"}],
    "stream": True,
    "max_completion_tokens": N,
    "min_tokens": N,
    "ignore_eos": True,
    "stream_options": {"include_usage": True},
}
GUIDELLM_COMPLETION: dict[str, Any] = {
    "model": "echo",
    "prompt": "the cat END",
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "max_tokens": N,
    "stop": None,
    "ignore_eos": True,
}
SGLANG_COMPLETION: dict[str, Any] = {
    "model": "echo",
    "prompt": "the cat END",
    "temperature": 0.0,
    "best_of": 1,
    "max_tokens": N,
    "stream": True,
    "ignore_eos": True,
}


def chunks(answer: Answer) -> Iterator[dict[str, Any]]:
    """The documents as these clients find them: line by line, comments and the end left out."""
    for line in answer.body.decode().splitlines():
        if line and not line.startswith(":") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", VLLM_COMPLETION),
        ("/v1/chat/completions", VLLM_CHAT),
        ("/v1/chat/completions", AIPERF_CHAT),
        ("/v1/completions", GUIDELLM_COMPLETION),
        ("/v1/completions", SGLANG_COMPLETION),
    ],
    ids=["vllm-completion", "vllm-chat", "aiperf-chat", "guidellm-completion", "sglang-completion"],
)
def test_a_benchmark_client_counts_its_tokens(server: Server, route: str, body: dict[str, Any]) -> None:
    """Readiness, then five requests: usage comes without a choice and with all tokens, the first choice with text."""
    assert server.get("/health").status == 200
    assert server.get("/v1/models").json["data"][0]["id"] == body["model"]
    counted = 0
    for number in range(5):
        answer = server.post(route, body, x_request_id=f"bench-{number}")
        assert answer.headers["x-request-id"] == f"bench-{number}"
        found = list(chunks(answer))
        usages = [chunk["usage"] for chunk in found if chunk.get("usage") and not chunk["choices"]]
        texts = [
            choice.get("text") or choice.get("delta", {}).get("content", "") for c in found for choice in c["choices"]
        ]
        assert "".join(texts) == "the cat END" * 3
        if "stream_options" in body:
            (usage,) = usages
            counted += usage["completion_tokens"]
        else:
            assert not usages
            counted += N
    assert counted == 5 * N
