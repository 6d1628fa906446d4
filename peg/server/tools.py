"""Tools and reasoning in a conversation: how they are told to the model, and how its output is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from peg.server.errors import invalid
from peg.server.service import ServedModel
from peg.server.structured import source_of
from peg.server.types import ChatRequest, NamedTool, Tool
from peg.text.call_grammar import OutputGrammar, can_be_strict
from peg.text.json_calls import JsonCalls, PlainJsonCalls
from peg.text.output_parser import OutputParser
from peg.text.parsers import PARSERS, parser_name
from peg.text.tool_prompt import with_tools

_NO_FORM = "the model's chat template takes tools in a form that peg does not know"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the output of one conversation is read. `tools` are those that may be called; without a parser it is text.

    With `in_words` the tools are told as text of the roles that every chat template knows.
    """

    parser: type[OutputParser] | None
    tools: Sequence[dict[str, Any]]
    in_words: bool

    @classmethod
    def of(cls, body: ChatRequest, model: ServedModel) -> Reading:
        """From a request. Raises ApiError where its tools cannot be honoured."""
        tools = _offered(body)
        template = model.texts.template
        name = parser_name(template.source(tools=bool(tools)))
        parser = None if name is None else PARSERS[name]
        in_words = not template.reads("tools", tools=bool(tools))
        if tools and in_words:  # then the form of a call is the one that the words ask for
            parser = JsonCalls if parser is not None and parser.think_open else PlainJsonCalls
        elif tools and (parser is None or not parser.call_open):
            raise invalid(f"tools: {_NO_FORM}", "tools", "unsupported_value")
        if parser is not None and not tools and not parser.think_open:
            parser = None  # nothing to read
        talks_of_calls = any(message.role == "tool" or message.tool_calls for message in body.messages)
        return cls(parser=parser, tools=tools, in_words=in_words and (bool(tools) or talks_of_calls))

    @property
    def kept_tokens(self) -> tuple[str, ...]:
        """Special tokens that the parser must see."""
        return () if self.parser is None else self.parser.tokens

    def messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation for the chat template."""
        return with_tools(messages, self.tools) if self.in_words else messages

    def template_tools(self) -> Sequence[dict[str, Any]]:
        """The tools for the chat template."""
        return () if self.in_words else self.tools

    def read(self, prompt: str) -> OutputParser | None:
        """A parser for one output that continues `prompt`."""
        return None if self.parser is None else self.parser(prompt=prompt, tools=self.tools)

    def source(self, body: ChatRequest, model: ServedModel, prompt: str) -> tuple[str, str] | None:
        """The source of the grammar for the whole output and the field that asks for it; None where none is needed."""
        asked = source_of(body)
        if self.parser is None:
            return asked
        output = OutputGrammar(self.parser, model.texts.tokenizer, prompt)
        functions = [tool["function"] for tool in self.tools]
        several = body.parallel_tool_calls is not False
        must = body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)
        strict = any(function.get("strict") for function in functions)
        if strict and not can_be_strict(self.parser):
            raise invalid("tools: strict cannot be enforced in this model's form of calls", "tools")
        if asked is not None:
            if must:
                raise invalid(f"{asked[1].partition('.')[0]}: not with a tool_choice that is enforced", asked[1])
            if functions:
                return output.answer_or_calls(asked[0], functions, several=several), asked[1]
            return output.answer(asked[0]), asked[1]
        if must:
            named = isinstance(body.tool_choice, NamedTool)
            return output.calls(functions, several=several and not named), "tool_choice"
        if functions and (strict or not several):
            return output.text_or_calls(functions, several=several), "tools"
        return None


def _offered(body: ChatRequest) -> list[dict[str, Any]]:
    """The tools that may be called: all of them, the named one, or none."""
    tools, choice = body.tools or [], body.tool_choice
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools: two have the same name", "tools")
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            name = choice.function.name
            raise invalid(f"tool_choice: {name!r} is not among the tools", "tool_choice.function.name")
    if choice == "required" and not tools:
        raise invalid("tool_choice required: there are no tools", "tool_choice")
    return [] if choice == "none" else [_plain(tool) for tool in tools]


def _plain(tool: Tool) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(tool)
    return plain
