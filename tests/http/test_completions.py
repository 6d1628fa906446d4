"""`/v1/completions` and `/v1/chat/completions`: what an answer holds, whole and streamed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.http.serving import Answer, Server, joined

# Prompts that are echoed: multi-byte characters whose tokens are parts of characters, and plain words.
TEXTS = (
    "the cat",
    "the cat 你好 the cat END",
    "你好你好é😀é你好",
    "😀😀 the😀 cat😀",
    "a b c tool call <call>\n\n",
    "Ünïcödé – ‘quotes’ ﷽ 𝄞",
    "12 the12 cat12",
    "\u202eright to left\u202c \x00 nul",
    "   spaces   and\ttabs\r\n",
    "👩‍👩‍👧‍👦 family 👍🏽",
)
# Stop strings that begin inside one token and end inside another, never complete, or never come.
STOPS: tuple[list[str], ...] = ([], ["e c"], ["好 t", "END!"], ["😀é", "t😀"], ["zzz", "at"])


def choice(answer: Answer) -> Any:
    assert answer.status == 200, answer.body
    (only,) = answer.json["choices"]
    return only


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


def test_a_chat_completion_has_the_documented_shape(server: Server) -> None:
    """The whole document of a chat completion, field by field."""
    document = server.chat("the cat<|im_end|>").json
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", document.pop("id"))
    assert isinstance(document.pop("created"), int)
    message = {"role": "assistant", "content": "the cat", "refusal": None}
    assert document == {
        "object": "chat.completion",
        "model": "echo",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6},
        "system_fingerprint": None,
    }


def test_a_completion_stream_has_the_documented_events(server: Server) -> None:
    """Pieces, one event that finishes, the usage without a choice, then [DONE]; id, created and model never change."""
    answer = server.complete("the cat", max_tokens=3, stream=True, stream_options={"include_usage": True})
    assert answer.headers["cache-control"] == "no-cache"
    events = answer.events
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1
    assert events[0]["object"] == "text_completion"
    *pieces, last, usage = events
    assert joined([*pieces, last]) == "the catthe"
    assert all(event["choices"][0]["finish_reason"] is None and "usage" not in event for event in pieces)
    assert last["choices"][0]["finish_reason"] == "length"
    assert (usage["choices"], usage["usage"]) == (
        [],
        {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
    )


def test_a_chat_stream_has_the_documented_events(server: Server) -> None:
    """The role comes first, with the first token; one event finishes; there is no usage that nobody asked for."""
    events = server.chat("the cat<|im_end|>", stream=True).events
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[0]["choices"] == [
        {"delta": {"role": "assistant", "content": ""}, "index": 0, "logprobs": None, "finish_reason": None}
    ]
    *pieces, last = events[1:]
    assert joined(pieces) == "the cat"
    assert all(set(event["choices"][0]["delta"]) == {"content"} and "usage" not in event for event in pieces)
    assert last["choices"] == [
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]


@pytest.mark.parametrize("stops", STOPS, ids=repr)
@pytest.mark.parametrize("text", TEXTS, ids=ascii)
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_says_what_the_whole_answer_says(server: Server, route: str, text: str, stops: list[str]) -> None:
    """Joined text, finish, stop and usage of a stream are those of the whole answer, byte for byte."""
    body: dict[str, Any] = {"max_tokens": 40, "stop": stops, "ignore_eos": True}
    body |= {"prompt": text} if route == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    whole = server.post(route, body)
    streamed = server.post(route, body | {"stream": True, "stream_options": {"include_usage": True}}).events
    one = choice(whole)
    content = one["text"] if "text" in one else one["message"]["content"]
    assert joined(streamed) == content
    assert streamed[-1]["usage"] == whole.json["usage"]
    (finish,) = [each for event in streamed for each in event["choices"] if each["finish_reason"]]
    assert (finish["finish_reason"], finish["stop_reason"]) == (one["finish_reason"], one["stop_reason"])
    assert not any(stop in content for stop in stops)
    if one["finish_reason"] == "stop":
        assert (text * 20).startswith(content + one["stop_reason"])
    else:
        assert (text * 20).startswith(content.rstrip("\ufffd"))


def test_a_stop_string_ends_the_text_and_is_counted(server: Server) -> None:
    """The text is cut before the stop; the tokens that completed it count; include_stop_str_in_output keeps it."""
    answer = server.complete("the cat END", stop=["at E", "zzz"], max_tokens=20)
    assert choice(answer) | {"index": 0} == {
        "index": 0,
        "text": "the c",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": "at E",
    }
    assert answer.json["usage"]["completion_tokens"] < 20
    kept = choice(server.complete("the cat END", stop="at E", max_tokens=20, include_stop_str_in_output=True))
    assert kept["text"] == "the cat E"


def test_an_end_token_gives_no_text_unless_it_is_ignored(server: Server) -> None:
    """The model's own end stops it; with ignore_eos it is a token like any other, shown if special tokens are."""
    assert choice(server.complete("the<|im_end|> cat"))["text"] == "the"
    ignored = choice(server.complete("the<|im_end|> cat", max_tokens=3, ignore_eos=True))
    assert (ignored["text"], ignored["finish_reason"]) == ("the cat", "length")
    shown = choice(server.complete("the<|im_end|> cat", max_tokens=3, ignore_eos=True, skip_special_tokens=False))
    assert shown["text"] == "the<|im_end|> cat"


def test_a_stop_token_ends_the_text(server: Server) -> None:
    """stop_token_ids stop like the model's own end: without their text, named as the stop_reason."""
    ids = server.post("/tokenize", {"prompt": "the cat"}).json["tokens"]
    ended = choice(server.complete("the cat", stop_token_ids=[ids[1]]))
    assert (ended["text"], ended["finish_reason"], ended["stop_reason"]) == ("the", "stop", ids[1])
    kept = choice(server.complete("the cat", stop_token_ids=[ids[1]], include_stop_str_in_output=True))
    assert (kept["text"], kept["stop_reason"]) == ("the cat", ids[1])


def test_choices_are_prompt_major_and_a_prompt_counts_once(server: Server) -> None:
    """Index = prompt · n + sample, whole and streamed; usage counts each prompt once and every choice's tokens."""
    body: dict[str, Any] = {"prompt": ["the", " cat"], "n": 2, "max_tokens": 2}
    document = server.post("/v1/completions", body).json
    assert [(each["index"], each["text"]) for each in document["choices"]] == [
        (0, "thethe"),
        (1, "thethe"),
        (2, " cat cat"),
        (3, " cat cat"),
    ]
    assert document["usage"] == {"prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10}
    events = server.post("/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}}).events
    assert [joined(events, index) for index in range(4)] == ["thethe", "thethe", " cat cat", " cat cat"]
    finished = [each["index"] for event in events for each in event["choices"] if each["finish_reason"]]
    assert sorted(finished) == [0, 1, 2, 3]
    assert events[-1]["usage"] == document["usage"]


def test_seeds_decide_and_choices_differ(server: Server) -> None:
    """The same seed gives the same choices; the choices of one request have seeds of their own."""
    body: dict[str, Any] = {"prompt": "abcdefghijklmnopqrstuvwxyz", "n": 8, "max_tokens": 4, "temperature": 1.0}
    first, again, other = (
        [each["text"] for each in server.post("/v1/completions", body | {"seed": seed}).json["choices"]]
        for seed in (7, 7, 8)
    )
    assert first == again
    assert first != other
    assert len(set(first)) > 2
    alone = choice(server.post("/v1/completions", body | {"seed": 7, "n": 1}))
    assert alone["text"] == first[0]


def test_prompts_may_be_token_ids(server: Server) -> None:
    """A list of ids is one prompt, taken as it is; a list of lists is several."""
    ids = server.post("/tokenize", {"prompt": "the cat"}).json["tokens"]
    assert choice(server.complete(ids, max_tokens=2))["text"] == "the cat"
    document = server.complete([ids, ids[::-1]], max_tokens=2).json
    assert [each["text"] for each in document["choices"]] == ["the cat", " catthe"]
    assert document["usage"]["prompt_tokens"] == 4


def test_half_a_character_at_the_end_becomes_a_replacement_character(server: Server) -> None:
    """Tokens that are parts of a character give text once it is whole; what stays open is U+FFFD, streamed too."""
    ids = server.post("/tokenize", {"prompt": "Ж"}).json["tokens"]  # two tokens of one byte each
    assert len(ids) == 2
    assert choice(server.complete(ids, max_tokens=2))["text"] == "Ж"
    assert choice(server.complete(ids, max_tokens=3))["text"] == "Ж\ufffd"
    events = server.complete(ids, max_tokens=3, stream=True).events
    assert joined(events) == "Ж\ufffd"


def test_continuous_usage_counts_up(server: Server) -> None:
    """With continuous_usage_stats every event tells the usage so far, and the last one the whole."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.complete("the cat", max_tokens=4, stream=True, stream_options=options).events
    told = [event["usage"]["completion_tokens"] for event in events]
    assert told == sorted(told)
    assert told[-1] == 4


def test_a_missing_limit_is_sixteen_tokens_or_the_context(server: Server) -> None:
    """Completions stop at 16 tokens, or where the context (256) ends; a chat goes on to the context."""
    assert server.complete("the").json["usage"]["completion_tokens"] == 16
    assert server.complete([258] * 250).json["usage"]["completion_tokens"] == 6
    assert server.chat(" the" * 250).json["usage"] == {
        "prompt_tokens": 250,
        "completion_tokens": 6,
        "total_tokens": 256,
    }


def test_max_completion_tokens_wins(server: Server) -> None:
    """Of the two names of the limit the newer one counts."""
    usage = server.chat("the", max_tokens=9, max_completion_tokens=2).json["usage"]
    assert usage["completion_tokens"] == 2


def test_content_may_come_in_parts_and_roles_are_known(server: Server) -> None:
    """Text parts are joined by line breaks; system, developer and tool messages and a null content are taken."""
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "cat"}]
    messages = [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": "b"},
        {"role": "user", "content": parts, "name": "anna"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "c"},
    ]
    answer = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 50})
    assert choice(answer)["message"]["content"].startswith('abthe\ncat<tool_call>[{"name": "f"')


def test_fields_that_change_nothing_are_taken(server: Server) -> None:
    """Known fields at the value that changes nothing, null for every optional field, and the documented no-ops."""
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "logprobs": False,
        "top_logprobs": 0,
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "min_tokens": 0,
        "priority": 0,
        "echo": False,
        "bad_words": [],
        "user": "anna",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "stream": False,
    }
    assert server.chat("the", max_tokens=1, **neutral).status == 200
    nulls = dict.fromkeys([*neutral, "n", "seed", "stop", "temperature", "top_p", "top_k", "min_p", "max_tokens"])
    nulls |= dict.fromkeys(["stream_options", "stop_token_ids", "ignore_eos", "prompt_logprobs", "request_id", "model"])
    assert server.chat("the", **nulls, max_completion_tokens=1).status == 200
    completion = {
        "best_of": None,
        "suffix": None,
        "logprobs": None,
        "n": None,
        "max_tokens": None,
        "logit_bias": None,
        "echo": None,
        "seed": None,
    }
    assert server.complete("the", **completion).json["usage"]["completion_tokens"] == 16
