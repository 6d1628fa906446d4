"""What is refused: which status, in which shape, and that the field at fault is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.http.echo_group import FORBIDDEN, PADDED_VOCABULARY
from tests.http.serving import Server

COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"


def refused(server: Server, route: str, fields: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, Any] = (
        {"prompt": "the"} if route == COMPLETION else {"messages": [{"role": "user", "content": "a"}]}
    )
    answer = server.post(route, base | fields)
    assert answer.status == 400, answer.body
    error = answer.error
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    return error


# Fields that both routes have, with values that each must be refused for.
WRONG: tuple[tuple[str, Any], ...] = (
    ("n", 0),
    ("n", -1),
    ("n", True),
    ("n", 1.5),
    ("n", "1"),
    ("n", 100000),
    ("n", 10**30),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", True),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", False),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", True),
    ("max_tokens", 1 << 40),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", True),
    ("seed", 1.5),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", ["x"] * 65),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [PADDED_VOCABULARY]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", "1"),
    ("stream", 1),
    ("stream", "true"),
    ("stream_options", {"include_usage": True}),
    ("stream_options", {"include_usage": 1}),
    ("stream_options", {"no_such_option": True}),
    ("ignore_eos", 1),
    ("presence_penalty", 2.5),
    ("presence_penalty", True),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", "1"),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("logit_bias", {"1": True}),
    ("logit_bias", {"one": 1.0}),
    ("logit_bias", {"-1": 1.0}),
    ("logit_bias", {"1.0": 1.0}),
    ("logit_bias", {"295": 1.0}),
    ("logit_bias", {"9" * 40: 1.0}),
    ("logit_bias", [1]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", [295]),
    ("allowed_token_ids", [True]),
    ("allowed_token_ids", [FORBIDDEN]),
    ("bad_words", [""]),
    ("bad_words", "x"),
    ("bad_words", ["x"] * 1025),
    ("min_tokens", -1),
    ("min_tokens", 300),
    ("min_tokens", 1 << 40),
    ("min_tokens", True),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", True),
    ("echo", 1),
    ("return_token_ids", 1),
    ("stop_token_ids", [295]),
    ("spaces_between_special_tokens", False),
    ("response_format", "json"),
    ("structured_outputs", "a"),
    ("priority", 1),
    ("priority", 1 << 31),
    ("priority", 0.5),
    ("cache_salt", "x"),
    ("request_id", ""),
    ("request_id", "a b"),
    ("request_id", "x" * 129),
    ("request_id", "a/b"),
    ("user", 1),
    ("no_such_field", None),
)


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda value: ascii(value)[:40])
@pytest.mark.parametrize("route", [COMPLETION, CHAT])
def test_a_wrong_field_is_a_400_that_names_it(server: Server, route: str, field: str, value: Any) -> None:
    """Wrong types, values out of range, unknown fields, and what peg does not do: all are told by name."""
    error = refused(server, route, {field: value})
    assert error["param"].split(".")[0] == field
    assert field in error["message"] or field == "stop_token_ids"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 21),
        ("logprobs", True),
        ("logprobs", -1),
        ("suffix", "x"),
        ("best_of", 2),
        ("best_of", 0),
        ("prompt", None),
        ("prompt", ""),
        ("prompt", []),
        ("prompt", [""]),
        ("prompt", [[]]),
        ("prompt", ["a", ""]),
        ("prompt", [[1], []]),
        ("prompt", [1, "a"]),
        ("prompt", [[1], "a"]),
        ("prompt", [1, [1]]),
        ("prompt", [True]),
        ("prompt", [[True]]),
        ("prompt", [1.5]),
        ("prompt", [-1]),
        ("prompt", [[-1]]),
        ("prompt", [295]),
        ("prompt", [PADDED_VOCABULARY]),
        ("prompt", [2**64]),
        ("prompt", [FORBIDDEN]),
        ("prompt", "the｜é｜"),
        ("prompt", {"text": "a"}),
        ("prompt", 5),
        ("messages", []),
        ("max_completion_tokens", 5),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_a_completion_refuses_and_names(server: Server, field: str, value: Any) -> None:
    """Every empty prompt, every id that is none, and the fields that only chat has."""
    assert refused(server, COMPLETION, {field: value})["param"].split(".")[0] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", None),
        ("messages", []),
        ("messages", "hello"),
        ("messages", [{"content": "a"}]),
        ("messages", [{"role": "robot", "content": "a"}]),
        ("messages", [{"role": "user", "content": 5}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
        ("messages", [{"role": "user", "content": "a", "colour": "red"}]),
        ("messages", [{"role": "assistant", "content": "a"}]),
        ("messages", [{"role": "user", "content": "a", "audio": {"id": "x"}}]),
        ("messages", [{"role": "user", "content": ""}]),
        ("max_completion_tokens", 0),
        ("max_completion_tokens", True),
        ("logprobs", 1),
        ("top_logprobs", 1),
        ("top_logprobs", -1),
        ("top_logprobs", 21),
        ("echo", True),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("store", True),
        ("service_tier", "flex"),
        ("reasoning_effort", "high"),
        ("chat_template", "{{ messages }}"),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", {"enable_thinking": True}),
        ("chat_template_kwargs", {"bos_token": "x"}),
        ("continue_final_message", "yes"),
        ("prompt", "a"),
        ("suffix", "a"),
    ],
    ids=lambda value: ascii(value)[:60],
)
def test_a_chat_refuses_and_names(server: Server, field: str, value: Any) -> None:
    """Faulty messages, the template's own errors, and what only completions have."""
    error = refused(server, CHAT, {field: value})
    assert error["param"].split(".")[0] in (field, "prompt")


def test_the_template_speaks_for_itself(server: Server) -> None:
    """An error that the template raises is a 400 with its message."""
    error = refused(server, CHAT, {"messages": [{"role": "assistant", "content": "a"}]})
    assert "the user speaks first" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "temperature": 1e400}',
        b'{"prompt": "a", "top_p": -1e400}',
        b'{"prompt": "a", "max_tokens": 1e400}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "a"',
        b'{"prompt": "a"} x',
        b"",
        b"null",
        b"[]",
        b'"prompt"',
        b"\xef\xbb\xbf{}",
        b'{"prompt": "a", "logit_bias": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "a", "response_format": {"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
    ],
    ids=lambda body: ascii(body[:50]),
)
def test_a_body_that_is_not_json_is_a_400(server: Server, body: bytes) -> None:
    """Literals that JSON does not have, numbers out of range, bad UTF-8, halves of characters, endless nesting."""
    answer = server.post(COMPLETION, body)
    assert answer.status == 400, answer.body
    assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "route_not_found"),
        ("GET", "/", 404, "route_not_found"),
        ("GET", COMPLETION, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/none", 404, "model_not_found"),
        ("POST", "/v1/requests/none/cancel", 404, "request_not_found"),
        ("DELETE", "/v1/requests/none", 404, "request_not_found"),
    ],
)
def test_every_error_has_the_one_shape(server: Server, method: str, path: str, status: int, code: str) -> None:
    """Aiohttp's own errors too: a JSON document with message, type, param and code."""
    answer = server.request(method, path)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/json"
    assert answer.error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert status != 405 or answer.headers["allow"]


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1", ""]
)
def test_only_json_is_taken(server: Server, content_type: str) -> None:
    """A form or a text is a 415, and so is JSON in another encoding."""
    answer = server.post(COMPLETION, b'{"prompt": "a"}', Content_Type=content_type)
    assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")


def test_another_model_is_a_404(server: Server) -> None:
    """The model's name is looked at on every route that takes one."""
    for path, body in (
        (COMPLETION, {"prompt": "a"}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        answer = server.post(path, body | {"model": "gpt-5"})
        assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")


def test_the_context_is_the_limit_to_the_token(server: Server) -> None:
    """Prompt and max_tokens together may fill the context of 256 exactly; one more is a 400 with the numbers."""
    assert server.complete([258] * 255, max_tokens=1).json["usage"]["total_tokens"] == 256
    assert server.complete([258] * 250, max_tokens=6).json["usage"]["total_tokens"] == 256
    over = server.complete([258] * 250, max_tokens=7)
    assert over.status == 400
    assert all(number in over.error["message"] for number in ("250", "7", "256"))
    full = server.complete([258] * 256)
    assert (full.status, full.error["param"]) == (400, "prompt")
    long = server.chat(" the" * 300)
    assert long.status == 400
    assert "256" in long.error["message"]


def test_a_megabyte_in_one_line_is_refused_without_tokenising(server: Server) -> None:
    """A text that cannot fit whatever its tokens are is refused by its length."""
    answer = server.complete("x" * (1 << 20))
    assert (answer.status, answer.error["param"]) == (400, "prompt")


def test_choices_are_capped_over_all_prompts(server: Server) -> None:
    """N × prompts has one limit, which the message names; the limit itself is served."""
    limit = server.service.config.max_choices
    over = server.complete(["a"] * 2, n=limit // 2 + 1)
    assert (over.status, over.error["param"]) == (400, "n")
    assert str(limit) in over.error["message"]
    assert len(server.complete("a", n=limit, max_tokens=1).json["choices"]) == limit


def test_a_faulty_request_id_in_the_header_is_a_400(server: Server) -> None:
    """The header is held to the same rule as the field."""
    answer = server.post(COMPLETION, {"prompt": "a"}, X_Request_Id="a b")
    assert (answer.status, answer.error["param"]) == (400, "X-Request-Id")


def test_json_errors_show_the_value(server: Server) -> None:
    """The message has the field, what it must be, and what it was."""
    error = server.post(COMPLETION, json.dumps({"prompt": "a", "stop": ["a", 3]}).encode()).error
    assert error["param"] == "stop.1"
    assert "got 3" in error["message"]
