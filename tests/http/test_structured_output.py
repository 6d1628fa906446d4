"""Structured output over HTTP: what does not fit is never said, whatever the model would rather say."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from peg.config import EngineConfig
from peg.text.grammar import TokenGrammar
from tests.http.serving import Server, joined, serving

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["cat", "the"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "ab", "schema": SCHEMA, "strict": True}}
KINDS: list[tuple[dict[str, Any], str, str]] = [  # fields, what the model would say, what it says
    ({"response_format": {"type": "json_object"}}, '{"a": [1, "cat"]} the cat', '{"a": [1, "cat"]}'),
    ({"response_format": FORMAT}, '{"a": 12, "b": "cat", "c": 1}', '{"a": 12, "b": "cat"}'),
    ({"structured_outputs": {"json": SCHEMA}}, '{"a":12,"b":"the"}}}', '{"a":12,"b":"the"}'),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"a":12,"b":"the"}}}', '{"a":12,"b":"the"}'),
    ({"structured_outputs": {"regex": "(the )+cat!"}}, "the the cat the", "the the cat!"),
    ({"structured_outputs": {"choice": ["cat", "the cat"]}}, "the dog", "the cat"),
    ({"structured_outputs": {"grammar": 'start: "the" ("12" | "cat")+ "END"'}}, "the1212catEND12", "the1212catEND"),
    ({"structured_outputs": {"grammar": 'root ::= "the" ("a" | "b")'}}, "the cat", "thea"),
]


@pytest.mark.parametrize(("fields", "would_say", "says"), KINDS)
@pytest.mark.parametrize("route", ["completions", "chat"])
def test_the_answer_fits(server: Server, route: str, fields: dict[str, Any], would_say: str, says: str) -> None:
    """Every kind, on both routes; the answer ends by itself, and is the same streamed, joined."""
    ask = server.complete if route == "completions" else server.chat
    (choice,) = ask(would_say, max_tokens=100, **fields).json["choices"]
    text = choice["text"] if route == "completions" else choice["message"]["content"]
    assert (text, choice["finish_reason"], choice["stop_reason"]) == (says, "stop", None)
    streamed = ask(would_say, max_tokens=100, stream=True, **fields).events
    assert joined(streamed) == says
    assert [event["choices"][0]["finish_reason"] for event in streamed][-1] == "stop"
    server.wait_idle()


def test_each_choice_has_its_own_place(server: Server) -> None:
    """With n and several prompts, streamed: every choice fits, and each goes its own way."""
    events = server.complete(
        ['{"a": 1, "b": "cat"}', '{"a": 2, "b": "the"}'], n=2, max_tokens=100, stream=True, response_format=FORMAT
    ).events
    assert [json.loads(joined(events, index))["a"] for index in range(4)] == [1, 1, 2, 2]


def test_max_tokens_cuts_and_says_so(server: Server) -> None:
    """Where the limit comes first the text is what there is, and the reason is `length`."""
    (choice,) = server.complete('{"a": 12, "b": "cat"}', max_tokens=3, response_format=FORMAT).json["choices"]
    assert (choice["text"], choice["finish_reason"]) == ('{"a', "length")


def test_stop_strings_and_cancelling_still_work(server: Server) -> None:
    """A stop string ends a constrained answer like any other."""
    answer = server.complete('{"a": 12, "b": "cat"}', stop="12", max_tokens=100, response_format=FORMAT).json
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ('{"a": ', "stop", "12")


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
            "response_format.json_schema.schema",
            "not",
        ),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON"),
        ({"structured_outputs": {"json": '{"type": "blah"}'}}, "structured_outputs.json", "blah"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex", "70000 bytes: at most 65536"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "length"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", "x"),
        ({"structured_outputs": {"grammar": "start: <[294]>"}}, "structured_outputs.grammar", "no token"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag", "unknown"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "only one"),
        ({"structured_outputs": {"regex": "a"}, "response_format": FORMAT}, "structured_outputs", "response_format"),
        ({"response_format": FORMAT, "allowed_token_ids": [1]}, "allowed_token_ids", "not with response_format"),
        ({"response_format": FORMAT, "bad_words": ["the"]}, "bad_words", "not with response_format"),
        ({"response_format": FORMAT, "min_tokens": 1}, "min_tokens", "not with response_format"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "not with structured_outputs"),
    ],
)
def test_what_cannot_be_enforced_is_a_400(server: Server, fields: dict[str, Any], param: str, says: str) -> None:
    """A fault, a size over its limit, a keyword that is not enforced: refused, with the field; nothing is ignored."""
    for answer in (server.complete(**fields), server.chat(**fields)):
        assert answer.status == 400, answer.body
        assert answer.error["param"] == param
        assert says in answer.error["message"]


def test_neutral_values_change_nothing(server: Server) -> None:
    """`response_format` text and an empty `structured_outputs` are no constraint."""
    answer = server.complete("the cat", max_tokens=2, response_format={"type": "text"}, structured_outputs={})
    assert answer.json["choices"][0]["text"] == "the cat"


def test_a_neighbour_keeps_its_pace(echo: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a grammar that takes five steps for each mask, an unconstrained neighbour still gets a token every step."""
    advance = TokenGrammar.advance

    def slowly(self: TokenGrammar, token_id: int) -> bytes | None:
        time.sleep(0.1)
        return advance(self, token_id)

    monkeypatch.setattr(TokenGrammar, "advance", slowly)
    with serving(echo) as server:
        server.group.step_s = 0.02
        constrained = threading.Thread(target=lambda: server.complete("aaaa", structured_outputs={"regex": "a{40}"}))
        constrained.start()
        time.sleep(0.1)
        before, began_s = server.group.steps, time.monotonic()
        server.complete("the cat", max_tokens=30)
        took_s, steps = time.monotonic() - began_s, server.group.steps - before
        constrained.join()
    assert steps <= 33, "a step for each token, and those that were out before the first and after the last"
    assert took_s < 30 * 0.02 * 1.5
