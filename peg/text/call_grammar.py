"""Grammars of whole outputs: tool calls that must come or must be right, and the reasoning that may stand before."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from peg.text.gemma_calls import GemmaCalls
from peg.text.grammar import json_schema, quoted
from peg.text.json_calls import JsonCalls, PlainJsonCalls
from peg.text.output_parser import OutputParser
from peg.text.tokenizer import Tokenizer
from peg.text.xml_calls import XmlCalls

Function: TypeAlias = Mapping[str, Any]
"""`function` of a tool: name, and parameters where it has any."""

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_ANY_TEXT = "/(.|\\n)*/"


class OutputGrammar:
    """Writes the source of one grammar: rules in Lark's syntax, and schemas that they refer to by name."""

    def __init__(self, parser: type[OutputParser], tokenizer: Tokenizer, prompt: str) -> None:
        """`parser` knows the marks of the model's family, `prompt` may have opened the reasoning."""
        self._parser = parser
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._rules: list[str] = []
        self._sources: list[dict[str, Any]] = []

    def answer(self, source: str) -> str:
        """What fits `source`, a source of `peg.text.grammar`, behind any reasoning."""
        if not self._parser.think_open:
            return source
        return self._finish(self._refer("answer", source))

    def answer_or_calls(self, source: str, functions: Sequence[Function], *, several: bool) -> str:
        """What fits `source`, or calls. Raises InvalidRequest for a faulty schema."""
        return self._finish(f"({self._calls(functions, several=several)} | {self._refer('answer', source)})")

    def calls(self, functions: Sequence[Function], *, several: bool) -> str:
        """At least one call of the functions, behind any reasoning. Raises InvalidRequest for a faulty schema."""
        return self._finish(self._calls(functions, several=several))

    def text_or_calls(self, functions: Sequence[Function], *, several: bool) -> str:
        """Any text, in which every call is one of these functions and fits its schema. Raises InvalidRequest."""
        form = _FORMS[self._parser]
        inside = self._inside(form, functions, several=several)
        # Without a mark some models begin with the JSON of a call, so free text may not begin like that.
        text = r"/([^\[{ \t\r\n](.|\n)*)?/" if form.lists else _ANY_TEXT
        called = self._up_to("called", text, self._parser.call_open)
        self.rule("rest", text)
        if not several:
            return self._finish(f"({called} {inside} | rest)")
        again = self._up_to("again", _ANY_TEXT, self._parser.call_open)
        self.rule("more", _ANY_TEXT)
        return self._finish(f"({called} {inside} ({again} {inside})* more | rest)")

    # --- pieces -------------------------------------------------------------------------------------------

    def mark(self, text: str) -> str:
        """A mark of the model's family: the special token of that text if there is one, or just the text."""
        token_id = self._tokenizer.token_id(text)
        return f"<[{token_id}]>" if token_id in self._tokenizer.special_ids else quoted(text)

    def rule(self, name: str, body: str) -> str:
        """Add a rule; its name."""
        self._rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def schema(self, name: str, schema: Mapping[str, Any]) -> str:
        """Add a JSON schema; how rules refer to it."""
        return self._refer(name, json_schema(schema, "tools"))

    def _refer(self, name: str, source: str) -> str:
        first, *others = json.loads(source)["grammars"]
        self._sources += [{**first, "name": name}, *others]
        return f"@{name}"

    def _up_to(self, name: str, text: str, mark: str) -> str:
        """A rule for text that ends with the first such mark."""
        written = self.mark(mark)
        return self.rule(name if written.startswith("<") else f"{name}[lazy]", f"{text} {written}")

    def _calls(self, functions: Sequence[Function], *, several: bool) -> str:
        form = _FORMS[self._parser]
        inside = self._inside(form, functions, several=several)
        call = f"{self.mark(self._parser.call_open)} {inside}"
        again = f" ({form.between} {call})*" if several and not form.lists else ""
        return call + again

    def _inside(self, form: _Form, functions: Sequence[Function], *, several: bool) -> str:
        one = " | ".join(form.write(self, place, function) for place, function in enumerate(functions))
        one = self.rule("one", one)
        if form.lists and several:
            one = f'{one} (", " {one})*'
        return f"{form.before} {one} {form.after} {self.mark(self._parser.call_close)}"

    def _reasoning(self) -> str:
        parser = self._parser
        if not parser.think_open:
            return ""
        thought = self._up_to("thought", _ANY_TEXT, parser.think_close) + r' "\n"? "\n"?'
        if self._prompt.rstrip().endswith(parser.think_open):
            return thought
        first = parser.tokens[0] if parser.tokens else parser.think_open  # Gemma's mark is a token and a word
        word = parser.think_open.removeprefix(first)
        return f"({self.mark(first)} {quoted(word) if word else ''} {thought})?"

    def _finish(self, body: str) -> str:
        start = f"start: {self._reasoning()} {body}"
        return json.dumps({"grammars": [{"lark_grammar": "\n".join([start, *self._rules])}, *self._sources]})


# --- JSON: {"name": …, "arguments": …} ------------------------------------------------------------------------


def _json_call(grammar: OutputGrammar, place: int, function: Function) -> str:
    arguments = grammar.schema(f"arguments_{place}", function.get("parameters") or _ANY_OBJECT)
    opening = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
    return grammar.rule(f"call_{place}", f'{quoted(opening)} {arguments} "}}"')


# --- XML: a tag for the function and one for each parameter ---------------------------------------------------


def _xml_call(grammar: OutputGrammar, place: int, function: Function) -> str:
    """Parameters in the order of the schema; those that are not required may be missing."""
    schema = function.get("parameters") or _ANY_OBJECT
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = _required(schema)
    parts = [quoted(f"<function={function['name']}>\n")]
    for number, (key, inner) in enumerate(_properties(schema)):
        name = f"value_{place}_{number}"
        if _type(inner) in ("", "string") and "enum" not in inner:
            value = grammar.rule(f"{name}[lazy]", _ANY_TEXT + r' "\n</parameter>\n"')
        else:
            value = grammar.schema(name, {**definitions, **inner}) + r' "\n</parameter>\n"'
        opening = quoted(f"<parameter={key}>\n")
        parts.append(f"({opening} {value}){'' if key in required else '?'}")
    return grammar.rule(f"call_{place}", " ".join([*parts, '"</function>"']))


# --- Gemma 4: call:NAME{key:value,…} --------------------------------------------------------------------------

_GEMMA_TYPES: Mapping[str, str] = {
    "string": "text",
    "integer": "integer",
    "number": "number",
    "boolean": '("true" | "false")',
    "array": "list",
    "object": "object",
    "null": '"null"',
}


def _gemma_call(grammar: OutputGrammar, place: int, function: Function) -> str:
    """The schema's own keys where it has any, sorted as the chat template does; of its values, the type."""
    if place == 0:
        quote = grammar.mark('<|"|>')
        grammar.rule("text", f"{quote} {_ANY_TEXT} {quote}")
        grammar.rule("integer", r"/-?(0|[1-9][0-9]*)/")
        grammar.rule("number", r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?/")
        grammar.rule("list", '"[" (value ("," value)*)? "]"')
        grammar.rule("pair", '/[A-Za-z_][A-Za-z0-9_-]*/ ":" value')
        grammar.rule("object", '"{" (pair ("," pair)*)? "}"')
        grammar.rule("value", 'text | number | list | object | "true" | "false" | "null"')
    schema = function.get("parameters") or _ANY_OBJECT
    opening, required = quoted(f"call:{function['name']}"), _required(schema)
    pairs = [
        (f"{quoted(key + ':')} {_GEMMA_TYPES.get(_type(inner), 'value')}", key in required)
        for key, inner in sorted(_properties(schema), key=lambda pair: pair[0].lower())
    ]
    body = f'"{{" {_comma_list(pairs)} "}}"' if pairs else "object"
    return grammar.rule(f"call_{place}", f"{opening} {body}")


def _comma_list(items: Sequence[tuple[str, bool]]) -> str:
    """Items in order with commas between them; those that are not required may be missing."""
    after = ""  # what may follow an item
    first = ""  # the list from here on, its first item without a comma; empty where it may have none
    for item, required in reversed(items):
        begins = f"{item} {after}"
        first = f"({begins})" if required else f"({begins} | {first})" if first else f"({begins})?"
        after = f'"," {item} {after}' if required else f'("," {item})? {after}'
    return first


# --- what schemas say on their surface ------------------------------------------------------------------------


def _properties(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Names and schemas; a schema that is not an object says nothing."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return []
    return [(key, inner if isinstance(inner, Mapping) else {}) for key, inner in properties.items()]


def _required(schema: Mapping[str, Any]) -> Sequence[Any]:
    required = schema.get("required")
    return required if isinstance(required, Sequence) else ()


def _type(schema: Mapping[str, Any]) -> str:
    """The one type that a schema names; empty where it names none, or says more than that."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return kind
    return "" if kind is None and not {"anyOf", "oneOf", "allOf", "$ref", "properties"} & schema.keys() else "any"


def can_be_strict(parser: type[OutputParser]) -> bool:
    """Whether calls in this family's form can be held to their schemas, which `strict` asks for."""
    return _FORMS[parser].strict


@dataclass(frozen=True, slots=True)
class _Form:
    """How a family writes calls: what stands between a mark and a call, and between one call and the next.

    `lists`: one pair of marks holds several calls. `strict`: the whole schema of the arguments is enforced.
    """

    write: Callable[[OutputGrammar, int, Function], str]
    before: str = ""
    after: str = ""
    between: str = ""
    lists: bool = False
    strict: bool = True


_LINE = quoted("\n")
_FORMS: Mapping[type[OutputParser], _Form] = {
    JsonCalls: _Form(_json_call, _LINE, _LINE, _LINE),
    PlainJsonCalls: _Form(_json_call, '"["', '"]"', lists=True),
    XmlCalls: _Form(_xml_call, _LINE, _LINE, _LINE),
    GemmaCalls: _Form(_gemma_call, strict=False),
}
