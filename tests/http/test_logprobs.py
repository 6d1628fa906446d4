"""Logprobs in both shapes, repeated prompts and token ids: what an answer tells beside its text."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import pytest

from tests.http.echo_group import IMPOSSIBLE, score
from tests.http.serving import Server

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"


def chained(parts: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(parts))


def ids(server: Server, text: str) -> list[int]:
    found: list[int] = server.post("/tokenize", {"prompt": text}).json["tokens"]
    return found


def text(server: Server, *token_ids: int) -> str:
    found: str = server.post("/detokenize", {"tokens": token_ids}).json["prompt"]
    return found


def ask(server: Server, prompt: Any = "the cat", **fields: Any) -> Any:
    answer = server.complete(prompt, **fields)
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]


def tops(server: Server, token_ids: list[int], count: int) -> list[dict[str, float]]:
    scores = [score(token_id, count) for token_id in token_ids]
    return [
        {text(server, token_id): logprob for token_id, logprob in (*each.top, (each.token_id, each.logprob))}
        for each in scores
    ]


@pytest.mark.parametrize("count", [0, 1, 2, 20])
def test_a_completion_tells_its_logprobs(server: Server, count: int) -> None:
    """One entry a token; the chosen token is always among its top, so up to one more than asked for; offsets count."""
    the, cat = ids(server, "the cat")
    assert ask(server, max_tokens=3, logprobs=count)["logprobs"] == {
        "tokens": ["the", " cat", "the"],
        "token_logprobs": [-1.5] * 3,
        "top_logprobs": tops(server, [the, cat, the], count),
        "text_offset": [0, 3, 7],
    }


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("given", ["text", "ids"])
def test_echo_tells_the_prompt_too(server: Server, given: str, max_tokens: int) -> None:
    """Text and logprobs begin with the prompt's, whose first token has none; 0 generates nothing at all."""
    prompt = "the cat END" if given == "text" else ids(server, "the cat END")
    answer = server.complete(prompt, max_tokens=max_tokens, echo=True, logprobs=1)
    (choice,) = answer.json["choices"]
    said = ["the", " cat", " ", "END"]
    assert choice["text"] == "the cat END" + "".join(said[:max_tokens])
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == said + said[:max_tokens]
    assert logprobs["token_logprobs"] == [None] + [-1.5] * (3 + max_tokens)
    assert logprobs["top_logprobs"][0] is None
    assert all(max(top.values()) == -0.5 for top in logprobs["top_logprobs"][1:])
    assert logprobs["text_offset"][:5] == [0, 3, 7, 8, 11][: 4 + max_tokens]
    assert answer.json["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": max_tokens,
        "total_tokens": 4 + max_tokens,
    }


def test_prompts_are_scored_as_the_scoring_harness_asks(server: Server) -> None:
    """Several id prompts of unequal length at once, one token, echoed: each list has its prompt and one more."""
    prompts = [[260, 261, 65], [66], [257] * 40]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    choices = server.post(COMPLETION, body).json["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    for prompt, choice in zip(prompts, choices, strict=True):
        logprobs = choice["logprobs"]
        assert {len(column) for column in logprobs.values()} == {len(prompt) + 1}
        assert all(logprob == -1.5 for logprob in logprobs["token_logprobs"][1:])


def test_an_impossible_token_is_told_as_a_number(server: Server) -> None:
    """−inf is −9999.0: JSON has no infinity. In the prompt, in the answer and among the top ones."""
    logprobs = ask(server, [65, IMPOSSIBLE], max_tokens=2, logprobs=2, echo=True)["logprobs"]
    assert logprobs["token_logprobs"] == [None, -9999.0, -1.5, -9999.0]
    assert logprobs["top_logprobs"][1] == {"\x00": -0.5, "\x01": -9999.0, "\x07": -9999.0}
    chat = server.chat("A\x07", max_tokens=2, logprobs=True, top_logprobs=2).json["choices"][0]["logprobs"]["content"]
    assert [each["logprob"] for each in chat] == [-1.5, -9999.0]
    assert [each["logprob"] for each in chat[1]["top_logprobs"]] == [-0.5, -9999.0]


def test_half_a_character_has_its_true_bytes(server: Server) -> None:
    """A token that is a part of a character: U+FFFD as text, and the bytes that make the character once joined."""
    content = server.chat("Ж", max_tokens=2, logprobs=True, top_logprobs=1).json["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in content] == ["\ufffd", "\ufffd"]
    assert bytes(byte for each in content for byte in each["bytes"]) == "Ж".encode()
    assert all(len(each["top_logprobs"]) == 1 and set(each["top_logprobs"][0]) == {"token", "logprob", "bytes"}
               for each in content)  # fmt: skip


def test_tokens_that_read_alike_can_be_told_apart(server: Server) -> None:
    """Two ids with the same text share a place in the map, the better one's; return_tokens_as_token_ids parts them."""
    first, _ = ids(server, "Ж")
    shared = ask(server, "Ж", max_tokens=1, logprobs=2)["logprobs"]
    assert shared["top_logprobs"] == [{"\ufffd": -0.5}]
    apart = ask(server, "Ж", max_tokens=1, logprobs=2, return_tokens_as_token_ids=True)["logprobs"]
    assert apart["tokens"] == [f"token_id:{first}"]
    assert apart["top_logprobs"] == [{f"token_id:{first + 1}": -0.5, f"token_id:{first}": -1.5}]


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"stop": ["at E", "zz"]}, {"n": 2, "echo": True}], ids=repr)
@pytest.mark.parametrize("prompt", ["the cat END 你好", "éЖ😀 tool"])
def test_streamed_logprobs_are_those_of_the_whole_answer(server: Server, prompt: str, fields: dict[str, Any]) -> None:
    """All pieces joined: text, every column and every offset; one entry for each token that the usage counts."""
    body = {"prompt": prompt, "max_tokens": 12, "logprobs": 2, **fields}
    whole = server.post(COMPLETION, body).json
    events = server.post(COMPLETION, body | {"stream": True}).events
    for choice in whole["choices"]:
        pieces = [each for event in events for each in event["choices"] if each["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        for column, values in choice["logprobs"].items():
            assert chained(piece["logprobs"][column] for piece in pieces if piece["logprobs"]) == values
    told = sum(len(choice["logprobs"]["tokens"]) for choice in whole["choices"])
    repeated = whole["usage"]["prompt_tokens"] * body.get("n", 1) if "echo" in fields else 0
    assert told == whole["usage"]["completion_tokens"] + repeated


def test_a_chat_stream_tells_the_logprobs_of_the_whole_answer(server: Server) -> None:
    """Every token's entry, in order, stop string or not."""
    fields: dict[str, Any] = {"max_tokens": 9, "logprobs": True, "top_logprobs": 3, "stop": "END"}
    whole = server.chat("the cat END", **fields).json
    events = server.chat("the cat END", stream=True, **fields).events
    pieces = [event["choices"][0]["logprobs"] for event in events]
    assert chained(piece["content"] for piece in pieces if piece) == whole["choices"][0]["logprobs"]["content"]
    assert len(whole["choices"][0]["logprobs"]["content"]) == whole["usage"]["completion_tokens"]
    assert server.chat("the", max_tokens=1, logprobs=True).json["choices"][0]["logprobs"]["content"][0][
        "top_logprobs"
    ] == []  # fmt: skip


def test_prompt_logprobs_are_as_long_as_the_prompt(server: Server) -> None:
    """Null first, then candidates by id, the token that is there among them; in a chat beside the choices."""
    prompt = ids(server, "the cat END")
    (choice,) = server.complete(prompt, max_tokens=1, prompt_logprobs=1).json["choices"]
    assert choice["logprobs"] is None
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert len(others) == len(prompt) - 1
    for token_id, entry in zip(prompt[1:], others, strict=True):
        assert entry == {
            str(token_id + 1): {"logprob": -0.5, "rank": 1, "decoded_token": text(server, token_id + 1)},
            str(token_id): {"logprob": -1.5, "rank": 2, "decoded_token": text(server, token_id)},
        }
    chat = server.chat("the cat END", max_tokens=1, prompt_logprobs=0).json
    assert [len(entry or ()) for entry in chat["prompt_logprobs"]] == [0, 1, 1, 1]
    both = ask(server, prompt, max_tokens=1, prompt_logprobs=0, logprobs=3, echo=True)
    assert [len(entry or ()) for entry in both["prompt_logprobs"]] == [0, 1, 1, 1]
    assert [len(top or ()) for top in both["logprobs"]["top_logprobs"]] == [0, 3, 3, 3, 3]


def test_token_ids_are_told(server: Server) -> None:
    """return_token_ids: the prompt's and the answer's, whole and streamed, an end that gives no text included."""
    prompt = ids(server, "the cat<|im_end|>")
    whole = ask(server, prompt, return_token_ids=True)
    assert (whole["prompt_token_ids"], whole["token_ids"], whole["text"]) == (prompt, prompt, "the cat")
    events = server.complete(prompt, return_token_ids=True, stream=True).events
    assert events[0]["choices"][0]["prompt_token_ids"] == prompt
    assert chained(event["choices"][0].get("token_ids", []) for event in events) == prompt
    chat = server.chat("the cat<|im_end|>", return_token_ids=True).json
    assert (chat["prompt_token_ids"], chat["choices"][0]["token_ids"]) == (prompt, prompt)
    events = server.chat("the cat<|im_end|>", return_token_ids=True, stream=True).events
    assert events[0]["prompt_token_ids"] == prompt
    assert chained(event["choices"][0].get("token_ids", []) for event in events) == prompt


def test_echo_repeats_each_prompt_before_its_choices(server: Server) -> None:
    """With several prompts and n; streamed, the prompt is the first event; special tokens are written out."""
    body: dict[str, Any] = {"prompt": ["the<|im_start|>", " cat"], "n": 2, "max_tokens": 1, "echo": True}
    said = [choice["text"] for choice in server.post(COMPLETION, body).json["choices"]]
    assert said == ["the<|im_start|>the"] * 2 + [" cat cat"] * 2
    events = server.complete("the<|im_start|>", max_tokens=1, echo=True, stream=True).events
    assert [event["choices"][0]["text"] for event in events] == ["the<|im_start|>", "the", ""]
    assert ask(server, ids(server, "the<|im_start|>"), max_tokens=1, echo=True)["text"] == "the<|im_start|>the"


@pytest.mark.parametrize("content", ["the cat", [{"type": "text", "text": "the"}, {"type": "text", "text": " cat"}]])
def test_a_chat_may_continue_its_last_message(server: Server, content: Any) -> None:
    """continue_final_message goes on where the message ends; with echo the answer begins with it."""
    messages = [{"role": "user", "content": "END"}, {"role": "assistant", "content": content}]
    begun = "the cat" if isinstance(content, str) else "the\n cat"
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 1}
    assert server.post(CHAT, body).json["choices"][0]["message"]["content"] == "END"
    assert server.post(CHAT, body | {"echo": True}).json["choices"][0]["message"]["content"] == begun + "END"
    events = server.post(CHAT, body | {"echo": True, "stream": True}).events
    deltas = [event["choices"][0]["delta"].get("content") for event in events]
    assert deltas == ["", begun, "END", None]
    both = server.post(CHAT, body | {"add_generation_prompt": True})
    assert (both.status, both.error["param"]) == (400, "continue_final_message")
