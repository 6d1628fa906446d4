"""Which parser reads which model's output."""

from __future__ import annotations

from collections.abc import Mapping

from peg.text.gemma_calls import GemmaCalls
from peg.text.json_calls import JsonCalls, PlainJsonCalls
from peg.text.output_parser import OutputParser
from peg.text.xml_calls import XmlCalls

PARSERS: Mapping[str, type[OutputParser]] = {
    "gemma4": GemmaCalls,
    "qwen3": JsonCalls,
    "qwen3_xml": XmlCalls,
    "json": PlainJsonCalls,
    "think": OutputParser,
}

# A word of the chat template and what it means; the first that is found decides.
_SIGNS = (
    ("<|tool_call>", "gemma4"),
    ("<function=", "qwen3_xml"),
    ("<tool_call>", "qwen3"),
    ('"parameters": ', "json"),
    ("SmolLM", "json"),
    ("</think>", "think"),
)


def parser_name(template: str) -> str | None:
    """The name in PARSERS that fits a chat template, None where none is known to."""
    return next((name for sign, name in _SIGNS if sign in template), None)
