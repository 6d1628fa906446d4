"""The parts of an assistant's message, as deltas of a stream or as the message whole: text, reasoning, tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from peg.server.generation import Finish
from peg.text.events import Arguments, Content, Event, Reasoning, ToolCall
from peg.text.output_parser import OutputParser


class MessageReader:
    """Reads one choice's text. Owned by the task that follows the choice."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser

    def feed(self, text: str) -> list[dict[str, object]]:
        """The deltas that are certain after `text`."""
        return [_delta(event) for event in self._parser.feed(text)]

    def finish(self, text: str) -> list[dict[str, object]]:
        """The last deltas, once `text` has ended the output."""
        return [_delta(event) for event in self._parser.feed(text) + self._parser.finish()]

    def message(self, text: str) -> dict[str, object]:
        """The whole message out of the whole text. Its content is null where there is nothing but calls."""
        return _message(self._parser.feed(text) + self._parser.finish())

    def ending(self, finish: Finish) -> Finish:
        """How the choice ended, for a client that is to run the tools."""
        called = self._parser.calls and finish.reason == "stop"
        return Finish("tool_calls", finish.stop_reason) if called else finish


def _delta(event: Event) -> dict[str, object]:
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case ToolCall(index, name):
            return {"tool_calls": [{"index": index, **_call(name, "")}]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _message(events: Sequence[Event]) -> dict[str, object]:
    content = "".join(event.text for event in events if isinstance(event, Content))
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    calls = [
        _call(call.name, "".join(part.text for part in events if isinstance(part, Arguments) and part.index == index))
        for index, call in enumerate(event for event in events if isinstance(event, ToolCall))
    ]
    message: dict[str, object] = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return {**message, "refusal": None}


def _call(name: str, arguments: str) -> dict[str, object]:
    """A call; its id is what a client's tool message refers to."""
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
