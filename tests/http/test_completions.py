"""`/v1/completions` and `/v1/chat/completions`: what an answer holds, whole and streamed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.http.echo_group import EOS
from tests.http.serving import Server


def test_a_completion_has_the_documented_shape(server: Server) -> None:
    """The whole document of a completion, field by field."""
    answer = server.complete("the cat", max_tokens=3, model="echo")
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    document = answer.json
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", document.pop("id"))
    assert isinstance(document.pop("created"), int)
    assert document == {
        "object": "text_completion",
        "model": "echo",
        "choices": [
            {"index": 0, "text": "the catthe", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
        "system_fingerprint": None,
    }
