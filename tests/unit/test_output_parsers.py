"""Model output to events: right as a whole, and the same however the text is cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peg.text.events import Arguments, Content, Event, Reasoning, ToolCall
from peg.text.gemma_calls import GemmaCalls
from peg.text.json_calls import JsonCalls, PlainJsonCalls
from peg.text.output_parser import OutputParser
from peg.text.parsers import PARSERS, parser_name
from peg.text.xml_calls import XmlCalls

SCHEMAS: dict[str, Any] = {
    "s": {"type": "string"},
    "n": {"type": "number"},
    "i": {"type": "integer"},
    "b": {"type": "boolean"},
    "o": {"type": "object"},
    "a": {"type": "array"},
    "sn": {"type": ["string", "null"]},
    "e": {"enum": [1, 2, None]},
    "any": {"anyOf": [{"type": "integer"}, {"oneOf": [{"type": "boolean"}]}]},
    "r": {"$ref": "#/x"},
    "odd": {"type": [{"x": 1}], "enum": 7, "anyOf": "x"},
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": SCHEMAS}}},
    {"type": "function", "function": {"name": "g"}},
]


def events_of(
    kind: type[OutputParser], pieces: Iterable[str], tools: Sequence[dict[str, Any]] = TOOLS, prompt: str = ""
) -> list[Event]:
    parser = kind(prompt=prompt, tools=tools)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    assert parser.calls == sum(isinstance(event, ToolCall) for event in events)
    assert all(isinstance(event, ToolCall) or event.text for event in events)
    return joined(events)


def joined(events: Iterable[Event]) -> list[Event]:
    """Neighbours of one kind made one, as a client joins them."""
    whole: list[Event] = []
    for event in events:
        match whole[-1:], event:
            case [Content(before)], Content(text):
                whole[-1] = Content(before + text)
            case [Reasoning(before)], Reasoning(text):
                whole[-1] = Reasoning(before + text)
            case [Arguments(index, before)], Arguments(same, text) if index == same:
                whole[-1] = Arguments(index, before + text)
            case _:
                whole.append(event)
    return whole


def call(index: int, name: str, arguments: str) -> list[Event]:
    return [ToolCall(index, name), Arguments(index, arguments)]


THINKING: list[tuple[str, list[Event]]] = [
    ("", []),
    ("just\ntext\n\n", [Content("just\ntext\n\n")]),
    ("\n lead", [Content("\n lead")]),
    ("<think>\nwhy\n\nso\n</think>\n\nyes\n", [Reasoning("why\n\nso"), Content("yes\n")]),
    ("<think>\n\n</think>\n\n  yes", [Content("  yes")]),
    ("a <think>b</think> c", [Content("a "), Reasoning("b"), Content(" c")]),
    ("<think>cut off\n", [Reasoning("cut off\n")]),
    ("<think>a<b</thi</think>c", [Reasoning("a<b</thi"), Content("c")]),
    ("a</think>b <thin", [Content("a</think>b <thin")]),
]
FIRST = '{"name": "f", "arguments": {}}'
SECOND = '{"name": "g", "arguments": {"a": [1, "]}"], "s": "q\\"{"}}'


def json_call(inside: str) -> str:
    return f"<tool_call>\n{inside}\n</tool_call>"


JSON: list[tuple[str, list[Event]]] = [
    ('<tool_call>\n{"name": "f", "arguments": {"s": "x"}}\n</tool_call>', call(0, "f", '{"s": "x"}')),
    (
        f"Sure.\n\n{json_call(FIRST)}\n{json_call(SECOND)}\n",
        [Content("Sure."), *call(0, "f", "{}"), *call(1, "g", '{"a": [1, "]}"], "s": "q\\"{"}')],
    ),
    ('<tool_call>{"arguments": {"n": 1}, "name": "f"}</tool_call>', call(0, "f", '{"n": 1}')),
    ('<tool_call>{"name": "f"}</tool_call>', call(0, "f", "{}")),
    ('<tool_call>{"id": 7, "name": "f"}</tool_call>', call(0, "f", "{}")),
    ('<tool_call>{"name": "f", "arguments": {"n": 1}, "parameters": {}}</tool_call>', call(0, "f", '{"n": 1}')),
    ('<tool_call>{"name": "f", "arguments": "{\n}"}</tool_call>', call(0, "f", "{\n}")),
    ('<tool_call>{"id" 7, "name": "f"}</tool_call>', [Content('<tool_call>{"id" 7, "name": "f"}</tool_call>')]),
    ('<tool_call>{"name": "f", "parameters": {"n": 1}}</tool_call>', call(0, "f", '{"n": 1}')),
    ('<tool_call>{"name": "f", "arguments": "{\\"n\\": 1}"}</tool_call>', call(0, "f", '{"n": 1}')),
    (
        '<tool_call>{"id": [{}, "}"], "name": "f", "arguments": {}, "x": 1}</tool_call>after',
        [*call(0, "f", "{}"), Content("after")],
    ),
    (
        '<tool_call>[{"name": "f", "arguments": {"n": 1}}, {"name": "g", "arguments": {}}]</tool_call>',
        call(0, "f", '{"n": 1}') + call(1, "g", "{}"),
    ),
    ('<tool_call>{"name": "n\\u00e9w", "arguments": {"\\u00e9": 1}}', call(0, "néw", '{"\\u00e9": 1}')),
    ('<tool_call>{"name": "f", "arguments": {"n": 1}\n</tool_call>more', [*call(0, "f", '{"n": 1}'), Content("more")]),
    ('<tool_call>{"name": "f", "arguments": {"n": [1\n</tool_call>', call(0, "f", '{"n": [1\n')),
    ('<tool_call>{"name": "f", "arguments": {"s": "half', call(0, "f", '{"s": "half')),
    ('<tool_call>{"name": "f", "argu', [Content('<tool_call>{"name": "f", "argu')]),
    ('a\n<tool_call>\n{"name": ""}</tool_call>', [Content('a\n<tool_call>\n{"name": ""}</tool_call>')]),
    ('<tool_call>{"name": "\\ud800"}', [Content('<tool_call>{"name": "\\ud800"}')]),
    ("the tag <tool_call> is\nit", [Content("the tag <tool_call> is\nit")]),
    (
        '<tool_call>[{"name": "f", "arguments": {}}, {"nam": 1}]</tool_call>',
        [*call(0, "f", "{}"), Content('{"nam": 1')],
    ),
]
MARKED_JSON: list[tuple[str, list[Event]]] = [
    (
        '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        [Reasoning("hm"), *call(0, "f", "{}")],
    ),
    ('<think>hm\n<tool_call>{"name": "f"}</tool_call>ok', [Reasoning("hm"), *call(0, "f", "{}"), Content("ok")]),
    ('<tool_call>{"name": "f"}</tool_call>\n<think>hm</think>', [*call(0, "f", "{}"), Reasoning("hm")]),
    ("<think>the <tool_call> tag\n</think>ok", [Reasoning("the <tool_call> tag"), Content("ok")]),
    ('{"name": "f", "arguments": {}}', [Content('{"name": "f", "arguments": {}}')]),
]
BARE_JSON: list[tuple[str, list[Event]]] = [
    ('{"name": "f", "arguments": {"s": "x"}}', call(0, "f", '{"s": "x"}')),
    (
        ' [{"name": "f", "parameters": {}}, {"type": "function", "name": "g", "arguments": {"n": 1}}]\n',
        call(0, "f", "{}") + call(1, "g", '{"n": 1}'),
    ),
    ('{"name": "f", "arguments": {}}\nDone.', [*call(0, "f", "{}"), Content("Done.")]),
    ('{"name": "Ada", "age": 36}\n', [Content('{"name": "Ada", "age": 36}\n')]),
    ('{"age": 36, "name": "f"}', [Content('{"age": 36, "name": "f"}')]),
    ('[1, {"name": "f"}]', [Content('[1, {"name": "f"}]')]),
    ("\n [link](x) <think>", [Content("\n [link](x) <think>")]),
    ('Text first: {"name": "f"}', [Content('Text first: {"name": "f"}')]),
    ('[{"name": "f"}, {"name": "other"}] x', [*call(0, "f", "{}"), Content('{"name": "other"}] x')]),
]
Q = '<|"|>'
NESTED = f"o:{{k:[1,{Q}]}},{Q},true],e:{{}}}},z:[]"


def gemma_call(name: str, inside: str) -> str:
    return f"<|tool_call>call:{name}{{{inside}}}<tool_call|>"


GEMMA: list[tuple[str, list[Event]]] = [
    (f"<|tool_call>call:f{{s:{Q}x{Q},n:-1.5e3}}<tool_call|>", call(0, "f", '{"s":"x","n":-1.5e3}')),
    (
        f"On it.\n{gemma_call('a.b-c', '')}{gemma_call('g', NESTED)}",
        [Content("On it."), *call(0, "a.b-c", "{}"), *call(1, "g", '{"o":{"k":[1,"]},",true],"e":{}},"z":[]}')],
    ),
    (f'<|tool_call>call:f{{s:{Q}a"\n\\é\x01{Q}}}<tool_call|>', call(0, "f", '{"s":"a\\"\\n\\\\é\\u0001"}')),
    (f"<|tool_call>call:f{{ {Q}a b{Q} : null , x:None, y:wörd x}}", call(0, "f", '{"a b":null,"x":null,"y":"wörd x"}')),
    ('<|tool_call>call:f{s:"x",n:NaN,b:false}', call(0, "f", '{"s":"x","n":"NaN","b":false}')),
    ("<|channel>thought\nhm\n\nso\n<channel|>Yes", [Reasoning("hm\n\nso"), Content("Yes")]),
    ("<|channel>thought\n<channel|>Yes", [Content("Yes")]),
    ("<|channel>thought\nhm<|tool_call>call:f{}<tool_call|>", [Reasoning("hm"), *call(0, "f", "{}")]),
    (f"<|tool_call>call:f{{s:{Q}half", call(0, "f", '{"s":"half')),
    ("<|tool_call>call:f{n:12", call(0, "f", '{"n":')),
    (f"<|tool_call>call:f{{a b:{Q}x{Q}}}<tool_call|>", [*call(0, "f", "{"), Content(f"a b:{Q}x{Q}")]),
    ("<|tool_call>call:f{n:}<tool_call|>ok", [*call(0, "f", '{"n":'), Content("ok")]),
    ("<|tool_call>call:f{n:12<tool_call|>ok", [*call(0, "f", '{"n":12,'), Content("ok")]),
    (f"<|tool_call>call:{'f' * 257}{{}}", [Content(f"<|tool_call>call:{'f' * 257}{{}}")]),
    ("x\n<|tool_call>fall", [Content("x\n<|tool_call>fall")]),
    ("<|tool_call>call:two words{}", [Content("<|tool_call>call:two words{}")]),
    ("<|tool_call>call:", [Content("<|tool_call>call:")]),
]


def xml(*parameters: str, name: str = "f", end: str = "</function>\n</tool_call>") -> str:
    return f"<tool_call>\n<function={name}>\n" + "".join(f"<parameter={p}\n</parameter>\n" for p in parameters) + end


XML: list[tuple[str, list[Event]]] = [
    (xml("s>\nx"), call(0, "f", '{"s":"x"}')),
    (xml(), call(0, "f", "{}")),
    (xml('s>\n\n two\nlines\n "q" </par\n'), call(0, "f", '{"s":"\\n two\\nlines\\n \\"q\\" </par\\n"}')),
    (xml("i>\n12", "n>\n1.5", "b>\nTrue", "o>\n{}"), call(0, "f", '{"i":12,"n":1.5,"b":true,"o":{}}')),
    (xml("i>\ntwelve", "n>\nNaN", "b>\n1", "o>\n[]"), call(0, "f", '{"i":"twelve","n":"NaN","b":"1","o":"[]"}')),
    (xml("s>\n12", "a>\n[1, 2]", "sn>\nnull", "e>\n2"), call(0, "f", '{"s":"12","a":[1, 2],"sn":null,"e":2}')),
    (xml("sn>\n7", "any>\ntrue", 'r>\n{"x": 1}'), call(0, "f", '{"sn":"7","any":true,"r":{"x": 1}}')),
    (xml("n>\n2", "i>\n2.0", 'sn>\n"q"'), call(0, "f", '{"n":2,"i":2.0,"sn":"\\"q\\""}')),
    ("<tool_call><function=f><parameter=s>x</parameter></function></tool_call>", call(0, "f", '{"s":"x"}')),
    (xml("odd>\n7", "unknown>\n7"), call(0, "f", '{"odd":"7","unknown":"7"}')),
    (xml("x>\n1", name="unknown"), call(0, "unknown", '{"x":"1"}')),
    (xml("x>\n1", name="g"), call(0, "g", '{"x":"1"}')),
    (f"So.\n\n{xml('s>x')}\n{xml(name='g')}\n", [Content("So."), *call(0, "f", '{"s":"x"}'), *call(1, "g", "{}")]),
    (f"<think>\nhm\n</think>\n\n{xml()}", [Reasoning("hm"), *call(0, "f", "{}")]),
    ("<tool_call>\n<function=f>\n<parameter=s>\nhalf\n</para", call(0, "f", '{"s":"half\\n</para')),
    ("<tool_call>\n<function=f>\n<parameter=i>\n1", call(0, "f", '{"i":')),
    (xml("s>\nx", end="</tool_call>"), call(0, "f", '{"s":"x"')),
    (xml("\ns>x"), [*call(0, "f", "{"), Content("s>x\n</parameter>\n</function>")]),
    ("<tool_call>\n<fun>", [Content("<tool_call>\n<fun>")]),
    ("<tool_call><function=a b>", [Content("<tool_call><function=a b>")]),
]
ALL: list[tuple[type[OutputParser], str, list[Event]]] = [
    *((kind, *case) for kind in (OutputParser, JsonCalls, XmlCalls) for case in THINKING),
    *((kind, *case) for kind in (JsonCalls, PlainJsonCalls) for case in JSON),
    *((JsonCalls, *case) for case in MARKED_JSON),
    *((PlainJsonCalls, *case) for case in BARE_JSON),
    *((GemmaCalls, *case) for case in GEMMA),
    *((XmlCalls, *case) for case in XML),
]


@pytest.mark.parametrize(("kind", "text", "expected"), ALL)
def test_output_is_read_however_it_is_cut(kind: type[OutputParser], text: str, expected: list[Event]) -> None:
    """Whole, character by character, and in two pieces cut at every position: the events are the same and right."""
    assert events_of(kind, [text]) == expected
    assert events_of(kind, text) == expected
    for cut in range(len(text) + 1):
        assert events_of(kind, [text[:cut], text[cut:]]) == expected


FRAGMENTS = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "<parameter=s>", "<parameter=i>"),
        *("</parameter>", "</function>", "<|tool_call>", "<tool_call|>", "<|channel>thought", "<channel|>", Q),
        *('{"name": "f", "arguments": ', '"name"', '{"s": "', "call:f{", "s:", "n:", "call:", "[", "]", "{", "}"),
        *('"', "\\", ",", ":", "\n", " ", "x", "12", "true", "<", ">", "|", "é", "😀"),
    ]
)


@pytest.mark.parametrize("kind", PARSERS.values(), ids=PARSERS)
@given(fragments=st.lists(FRAGMENTS, max_size=14), data=st.data())
def test_events_do_not_depend_on_the_cuts(kind: type[OutputParser], fragments: list[str], data: st.DataObject) -> None:
    """Any mixture of markup, broken markup and text, cut anywhere, gives the events of the whole."""
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    assert events_of(kind, pieces) == events_of(kind, [text]) == events_of(kind, text)


@pytest.mark.parametrize("kind", PARSERS.values(), ids=PARSERS)
@given(text=st.text(st.sampled_from("ab\n <>{}|\"'[]"), max_size=30))
def test_text_without_marks_is_untouched(kind: type[OutputParser], text: str) -> None:
    """Text in which no mark is whole is content, to the letter."""
    assert events_of(kind, text) == ([Content(text)] if text else [])


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('a"\\,}]é\n'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab_", min_size=1), inner, max_size=3),
    max_leaves=8,
)


def gemma(value: Any) -> str:
    """A value as Gemma's chat template writes it."""
    match value:
        case str():
            return Q + value + Q
        case dict():
            return "{" + ",".join(f"{key}:{gemma(value[key])}" for key in sorted(value)) + "}"
        case list():
            return "[" + ",".join(gemma(item) for item in value) + "]"
        case _:
            return json.dumps(value)


@given(st.dictionaries(st.text("ab_", min_size=1), VALUES, max_size=4))
def test_gemma_arguments_come_back(arguments: dict[str, Any]) -> None:
    """Whatever a client could have sent as arguments is JSON of the same value after the way through Gemma's form."""
    begun, told = events_of(GemmaCalls, f"<|tool_call>call:f{gemma(arguments)}<tool_call|>")
    assert begun == ToolCall(0, "f")
    assert isinstance(told, Arguments)
    assert json.loads(told.text) == arguments


def test_deep_nesting_is_bounded() -> None:
    """A model that only opens brackets exhausts no stack: the call stays unfinished, the rest is content."""
    many = "[" * 100_000
    deep = events_of(GemmaCalls, ["<|tool_call>call:f{a:" + many + "x"])
    assert deep == [*call(0, "f", '{"a":' + many[:64]), Content("x")]
    assert events_of(JsonCalls, ['<tool_call>{"name": "f", "arguments": ' + many]) == call(0, "f", many)
    assert events_of(XmlCalls, [xml("o>\n" + many)]) == call(0, "f", '{"o":' + json.dumps(many) + "}")


def test_arguments_stream() -> None:
    """Arguments are told as they come, not when the call is complete."""
    for kind, start in (
        (JsonCalls, '<tool_call>{"name": "f", "arguments": {"s": "'),
        (GemmaCalls, f"<|tool_call>call:f{{s:{Q}"),
        (XmlCalls, "<tool_call>\n<function=f>\n<parameter=s>\n"),
    ):
        parser = kind(tools=TOOLS)
        assert parser.feed(start)[0] == ToolCall(0, "f")
        assert parser.feed("abc") == [Arguments(0, "abc")]
        assert parser.feed("def") == [Arguments(0, "def")]


def test_other_json_is_shown_at_once() -> None:
    """JSON that cannot be a call is not held back until it ends."""
    parser = PlainJsonCalls(tools=TOOLS)
    assert parser.feed('{"age"') == []
    assert parser.feed(": 3") == [Content('{"age": 3')]
    assert parser.feed("6, ") == [Content("6, ")]
    assert PlainJsonCalls().feed('{"na') == [Content('{"na')]


@pytest.mark.parametrize("text", ["<|tool_call>x", "<|tool_call>call:two "])
def test_what_is_no_call_is_shown_at_once(text: str) -> None:
    """What follows an opening mark is held back only while it may still become a call."""
    assert GemmaCalls(tools=TOOLS).feed(text) == [Content(text)]


@pytest.mark.parametrize("kind", [JsonCalls, PlainJsonCalls, XmlCalls, GemmaCalls])
def test_without_tools_no_call_is_read(kind: type[OutputParser]) -> None:
    """A request without tools gets what looks like a call as content."""
    for text in ('<tool_call>{"name": "f"}</tool_call>', '{"name": "f"}', "<|tool_call>call:f{}<tool_call|>"):
        assert events_of(kind, [text], tools=()) == [Content(text)]


@pytest.mark.parametrize(("kind", "opened"), [(JsonCalls, "<think>\n"), (GemmaCalls, "<|channel>thought\n")])
def test_reasoning_opened_by_the_prompt(kind: type[OutputParser], opened: str) -> None:
    """Where the prompt ends inside the reasoning the output begins there; where it has closed it, it does not."""
    text = f"hm\n{kind.think_close}\n\nyes"
    assert events_of(kind, text, prompt=f"<|im_start|>assistant\n{opened}") == [Reasoning("hm"), Content("yes")]
    assert events_of(kind, "yes", prompt=f"{opened}\n{kind.think_close}\n\n") == [Content("yes")]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<|tool_call>call:' }}<tool_call>", "gemma4"),
        ("<tool_call>\n<function=example>", "qwen3_xml"),
        ('<tool_call>\n{"name": x, "parameters": y}\n</tool_call></think>', "qwen3"),
        ('Respond in the format {"name": function name, "parameters": dictionary}', "json"),
        ("You are a helpful AI assistant named SmolLM", "json"),
        ("{{ content.split('</think>')[-1] }}", "think"),
        ("<start_of_turn>model", None),
        ("", None),
    ],
)
def test_the_template_tells_the_parser(template: str, name: str | None) -> None:
    """Each family is known by what its template writes; a template that says nothing gets no parser."""
    assert parser_name(template) == name
    assert name is None or name in PARSERS
