"""Structured output: what may come next, which sources are refused, and the grammars of tool calls."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken

from peg.errors import InvalidRequest
from peg.text import grammar
from peg.text.call_grammar import OutputGrammar, can_be_strict
from peg.text.events import Arguments, Content, ToolCall
from peg.text.grammar import GrammarCompiler, TokenGrammar
from peg.text.output_parser import OutputParser
from peg.text.parsers import PARSERS
from peg.text.tokenizer import Tokenizer
from tests.unit.small_tokenizers import byte_level

CONFIG = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
WEATHER: dict[str, Any] = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "detail": {"type": "object", "properties": {"wind": {"type": "boolean"}}, "required": ["wind"]},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
}
FUNCTIONS: list[dict[str, Any]] = [WEATHER, {"name": "now"}]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
FAMILIES = ("json", "qwen3", "qwen3_xml", "gemma4")


def tokenizer_for(family: str) -> Tokenizer:
    """Marks are special tokens for Gemma, plain added tokens for Qwen, and ordinary text for the others."""
    core: tokenizers.Tokenizer = byte_level()
    if family == "gemma4":
        core.add_special_tokens([AddedToken(text, normalized=False) for text in PARSERS[family].tokens])
    elif family.startswith("qwen"):
        core.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>", "</think>")])
    return Tokenizer(core, CONFIG)


def compiler(tokenizer: Tokenizer, **limits: Any) -> GrammarCompiler:
    assert tokenizer.eos_token_id is not None
    return GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, end_ids=[tokenizer.eos_token_id], **limits)


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return Tokenizer(byte_level(), CONFIG)


def allowed(mask: bytes) -> list[int]:
    return [token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1]


def accepts(tokenizer: Tokenizer, source: str, text: str) -> bool:
    """Whether the whole text may be the answer: every token is allowed in its turn, and then the end is."""
    place = compiler(tokenizer).compile(source, "p")
    mask: bytes | None = place.first_mask
    for token in tokenizer.encode(text):
        if mask is None or token not in allowed(mask):
            return False
        mask = place.advance(token)
    return mask is None or tokenizer.eos_token_id in allowed(mask)


def walk(place: TokenGrammar, tokenizer: Tokenizer, seed: int, liked: tuple[bytes, ...] = ()) -> str | None:
    """A random text that the grammar allows; None where it does not end soon."""
    rng, mask, ids = random.Random(seed), place.first_mask, list[int]()
    for _ in range(400):
        may = allowed(mask)
        if tokenizer.eos_token_id in may and (len(may) == 1 or rng.random() < 0.5):
            return tokenizer.decode(ids)
        may = [token for token in may if token != tokenizer.eos_token_id]
        marks = [token for token in may if tokenizer.token_bytes(token) in liked]
        plain = [token for token in may if tokenizer.token_bytes(token).isalnum() or len(may) < 20]
        ids.append(rng.choice(marks if marks and rng.random() < 0.4 else plain or may))
        after = place.advance(ids[-1])
        if after is None:
            return tokenizer.decode(ids)
        mask = after
    return None


@pytest.mark.parametrize(
    ("source", "fits", "does_not"),
    [
        (grammar.choice(["yes", 'no\n"é"/\''], "p"), ("yes", 'no\n"é"/\''), ("y", "yesno", "")),
        (grammar.regex(r"[a-c]{2,3}\d", "p"), ("ab1", "ccc9"), ("a1", "ab", "ab12")),
        (grammar.json_schema({"type": "object"}, "p"), ("{}", '{"a": [1, null]}'), ("[]", "{", "1", "{} ")),
        (grammar.json_schema(WEATHER["parameters"], "p"), ('{"city": "cat"}',), ("{}", '{"city": 1}')),
        (grammar.json_schema(True, "p"), ("1", "null", '"cat"'), ("cat", "")),
        (grammar.context_free('start: "a" b*\nb: "the" | "cat"', "p"), ("a", "athecat"), ("the", "ab")),
        (grammar.context_free('root ::= "a" ("b" | "c")', "p"), ("ab", "ac"), ("a", "abc")),
    ],
)
def test_exactly_what_fits_is_allowed(
    small: Tokenizer, source: str, fits: tuple[str, ...], does_not: tuple[str, ...]
) -> None:
    """A text can be said token by token, and ended, where it fits the source, and cannot otherwise."""
    assert [text for text in fits if not accepts(small, source, text)] == []
    assert [text for text in does_not if accepts(small, source, text)] == []


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (lambda: grammar.json_schema({"not": {"type": "string"}}, "p"), "not"),
        (lambda: grammar.json_schema({"type": "array", "uniqueItems": True}, "p"), "uniqueItems"),
        (lambda: grammar.json_schema({"x-guidance": {"lenient": True}, "not": {}}, "p"), "not"),
        (lambda: grammar.json_schema({"type": "blah"}, "p"), "blah"),
        (lambda: grammar.json_schema({"$ref": "http://example.com/schema"}, "p"), "http"),
        (lambda: grammar.json_schema({"$ref": "#"}, "p"), "NoExtension"),
        (lambda: grammar.json_schema(False, "p"), "not"),
        (lambda: grammar.json_schema({"enum": ["x" * 70_000]}, "p"), "at most 65536"),
        (lambda: grammar.regex("(?=a)b", "p"), "look-around"),
        (lambda: grammar.regex("[", "p"), "unclosed"),
        (lambda: grammar.regex("\ud800", "p"), "surrogate"),
        (lambda: grammar.regex("a" * 70_000, "p"), "at most 65536"),
        (lambda: grammar.choice(["a"] * 1025, "p"), "at most 1024"),
        (lambda: grammar.context_free("start: foo", "p"), "foo"),
        (lambda: grammar.context_free("start: start", "p"), "NoExtension"),
        (lambda: grammar.context_free("", "p"), "start"),
        (lambda: grammar.context_free("root ::= (", "p"), "GBNF"),
        (lambda: grammar.context_free("start: <[294]>", "p"), "no token"),
    ],
)
def test_what_cannot_be_enforced_is_refused(small: Tokenizer, source: Callable[[], str], says: str) -> None:
    """Keywords that are not understood, schemas that nothing fits, faults and sizes are named, with the field."""
    with pytest.raises(InvalidRequest, match=says) as refused:
        compiler(small, forbidden_ids=[294]).compile(source(), "p")
    assert refused.value.param == "p"


def test_a_deep_schema_is_refused(small: Tokenizer) -> None:
    """Nesting has a limit, which is an error of the request."""
    schema: dict[str, Any] = {}
    for _ in range(500):
        schema = {"properties": {"a": schema}}
    with pytest.raises(InvalidRequest, match="recursion"):
        compiler(small).compile(grammar.json_schema(schema, "p"), "p")


def test_a_copy_goes_its_own_way(small: Tokenizer) -> None:
    """The choices of a request share what was compiled, and not where they are in it."""
    place = compiler(small).compile(grammar.choice(["ab", "cd"], "p"), "p")
    other = place.copy()
    assert other.first_mask == place.first_mask
    (a,), (c,) = small.encode("a"), small.encode("c")
    assert place.advance(a) != other.advance(c)


def test_a_token_that_does_not_fit_is_an_error(small: Tokenizer) -> None:
    """A rank that samples past its mask is found out."""
    place = compiler(small).compile(grammar.choice(["ab"], "p"), "p")
    with pytest.raises(InvalidRequest, match="doesn't satisfy the grammar"):
        place.advance(small.encode("c")[0])


def test_special_tokens_are_not_text(small: Tokenizer) -> None:
    """A string may hold the text of a special token, and never the token itself."""
    place = compiler(small).compile(grammar.regex(".*", "p"), "p")
    assert small.eos_token_id in allowed(place.first_mask)
    assert small.bos_token_id not in allowed(place.first_mask)
    assert small.token_id("<think>") in allowed(place.first_mask), "an added token that is not special is text"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_calls_that_must_come(family: str, thinks: bool, several: bool) -> None:
    """Whatever the model would rather say, the parser reads calls of the offered tools with whole JSON arguments."""
    parser: type[OutputParser] = PARSERS[family]
    tokenizer = tokenizer_for(family)
    prompt = f"Hi{parser.think_open}\n" if thinks else "Hi"
    output = OutputGrammar(parser, tokenizer, prompt)
    place = compiler(tokenizer).compile(output.calls(FUNCTIONS, several=several), "tools")
    liked = (parser.think_close.encode(), *(mark.encode() for mark in parser.tokens), b"<", b"}")
    texts = [text for seed in range(12) if (text := walk(place.copy(), tokenizer, seed, liked)) is not None]
    assert texts
    for text in texts:
        reader = parser(prompt=prompt, tools=TOOLS)
        events = reader.feed(text) + reader.finish()
        names = [event.name for event in events if isinstance(event, ToolCall)]
        assert names
        assert {*names} <= {"weather", "now"}
        assert several or len(names) == 1
        assert not [event for event in events if isinstance(event, Content)]
        for index, name in enumerate(names):
            told = "".join(part.text for part in events if isinstance(part, Arguments) and part.index == index)
            arguments = json.loads(told)
            assert name == "now" or {"city"} <= arguments.keys() <= {"city", "days", "detail"}
            assert name == "now" or isinstance(arguments.get("days", 1), int)


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_that_may_come_fit(family: str) -> None:
    """Text is free until it opens a call: one that was offered, and without `several` the last thing said."""
    parser: type[OutputParser] = PARSERS[family]
    tokenizer = tokenizer_for(family)
    source = OutputGrammar(parser, tokenizer, "Hi").text_or_calls([{"name": "now"}], several=False)
    now = {
        "json": '<tool_call>[{"name": "now", "arguments": {}}]</tool_call>',
        "qwen3": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "qwen3_xml": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "gemma4": "<|tool_call>call:now{}<tool_call|>",
    }[family]
    assert accepts(tokenizer, source, "the cat")
    assert accepts(tokenizer, source, now)
    assert accepts(tokenizer, source, "the cat" + now)
    assert not accepts(tokenizer, source, now.replace("now", "other"))
    assert not accepts(tokenizer, source, now + now)
    assert not accepts(tokenizer, source, now + "the cat")
    several = OutputGrammar(parser, tokenizer, "Hi").text_or_calls([{"name": "now"}], several=True)
    assert accepts(tokenizer, several, f"the {now} cat {now}")
    assert not accepts(tokenizer, several, f"the {now} cat {now.replace('now', 'other')}")


def test_json_without_a_mark_is_no_way_around() -> None:
    """Models that begin with the JSON of a call may not where calls are held to their schemas."""
    tokenizer = tokenizer_for("json")
    source = OutputGrammar(PARSERS["json"], tokenizer, "Hi").text_or_calls([{"name": "now"}], several=True)
    assert not accepts(tokenizer, source, '{"name": "now", "arguments": 7}')
    assert not accepts(tokenizer, source, ' [{"name": "other"}]')


@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
def test_an_answer_behind_reasoning(family: str) -> None:
    """The model may think before the answer, in any words, and the answer has its form; a call may stand instead."""
    parser: type[OutputParser] = PARSERS[family]
    tokenizer = tokenizer_for(family)
    source = grammar.choice(["yes", "no"], "p")
    output = OutputGrammar(parser, tokenizer, "Hi").answer(source)
    thought = f"{parser.think_open}\nthe {{cat}}\n{parser.think_close}\n"
    assert accepts(tokenizer, output, "yes")
    assert accepts(tokenizer, output, thought + "no")
    assert not accepts(tokenizer, output, thought + "cat")
    begun = OutputGrammar(parser, tokenizer, f"Hi{parser.think_open}").answer(source)
    assert accepts(tokenizer, begun, f"the{parser.think_close}yes")
    assert not accepts(tokenizer, begun, "yes"), "the prompt has opened the reasoning"
    either = OutputGrammar(parser, tokenizer, "Hi").answer_or_calls(source, [{"name": "now"}], several=True)
    call = "<|tool_call>call:now{}<tool_call|>" if family == "gemma4" else None
    assert accepts(tokenizer, either, call or '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert accepts(tokenizer, either, "yes")
    assert not accepts(tokenizer, either, "cat")


def test_who_can_be_strict() -> None:
    """Gemma's own notation is held to keys and types only, so it does not promise `strict`."""
    assert {family: can_be_strict(PARSERS[family]) for family in FAMILIES} == {
        "json": True,
        "qwen3": True,
        "qwen3_xml": True,
        "gemma4": False,
    }
