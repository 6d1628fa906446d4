"""Tool calls as Qwen3.5 and Qwen3-Coder write them: a tag for the function and one for each parameter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from peg.text.output_parser import OutputParser, Step, refuse_constant

_DEEPEST = 4


class XmlCalls(OutputParser):
    """`<tool_call>`, `<function=NAME>`, then per parameter `<parameter=KEY>`, a line break, the value, a line break.

    Values are plain text, so the tool's schema decides their JSON type: text where it says string or nothing,
    otherwise what the value is as JSON if that fits the schema, and text if not.
    """

    call_open = "<tool_call>"
    call_close = "</tool_call>"

    def _read_calls(self) -> Step[bool]:
        yield from self._past()
        if not (yield from self._expect("<function=")):
            return False
        name = yield from self._word(">")
        if not name:
            return False
        self._begin_call(name)
        self._argument("{")
        schemas = _inside(_inside(self._tools.get(name), "parameters", {}), "properties", {})
        count = 0
        while (yield from self._past()) == "<" and (yield from self._expect("<parameter=")):
            if not (yield from self._read_parameter(schemas, first=count == 0)):
                return True
            count += 1
        if (yield from self._expect("</function>")):
            self._argument("}")
        return True

    def _read_parameter(self, schemas: Any, *, first: bool) -> Step[bool]:
        """One parameter from behind `<parameter=`; false where it is broken off."""
        key = yield from self._word(">")
        if not key:
            return False
        if (yield from self._peek()) == "\n":
            self._take(self._at + 1)
        self._argument(("" if first else ",") + json.dumps(key, ensure_ascii=False) + ":")
        ends = ("\n</parameter>", "</parameter>")
        types = _types(_inside(schemas, key, {}))
        if types <= {"string"}:
            self._argument('"')
            if not (yield from self._until(ends, self._string)):
                return False
            self._argument('"')
            return True
        value: list[str] = []
        if not (yield from self._until(ends, value.append)):
            return False
        self._argument(_typed("".join(value), types))
        return True

    def _string(self, text: str) -> None:
        self._argument(json.dumps(text, ensure_ascii=False)[1:-1])


def _inside(value: Any, key: str, default: Any) -> Any:
    """`value[key]` if it is there and of the default's type; schemas are the client's and may be anything."""
    found = value.get(key) if isinstance(value, Mapping) else None
    return found if isinstance(found, type(default)) else default


def _types(schema: Any, depth: int = 0) -> set[str]:
    """The JSON types that a schema speaks of, as far as that shows on its surface; none where it does not."""
    declared = [_inside(schema, "type", ""), *_inside(schema, "type", [])]
    types = {name for name in declared if isinstance(name, str) and name}
    types |= {_type_of(value) for value in _inside(schema, "enum", [])}
    if depth < _DEEPEST:
        branches = [inner for key in ("anyOf", "oneOf", "allOf") for inner in _inside(schema, key, [])]
        types = types.union(*(_types(inner, depth + 1) for inner in branches))
    return types or ({"object"} if _inside(schema, "properties", {}) or _inside(schema, "$ref", "") else set())


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _typed(text: str, types: set[str]) -> str:
    """`text` as JSON of one of `types` where it is that, and as a JSON string where it is not."""
    spelled = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    try:
        found = _type_of(json.loads(spelled, parse_constant=refuse_constant))
    except (ValueError, RecursionError):
        found = "string"
    fits = found in types or (found == "integer" and "number" in types) or (found == "number" and "integer" in types)
    return spelled if fits and found != "string" else json.dumps(text, ensure_ascii=False)
