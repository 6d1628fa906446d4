"""Tools in plain words, for models whose chat template does not know them. `PlainJsonCalls` reads the answers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from peg.text.messages import plain_messages

_INSTRUCTIONS = """You can call functions. They are described here as JSON, one a line:
<tools>
{tools}
</tools>
If calling one or more of them helps with the request, answer with nothing but the calls, in this form:
<tool_call>[{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}]</tool_call>
If none of them helps, answer as usual."""


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation in which tools, calls and results are text of the roles that every template knows.

    The description of the tools ends the first system message, or is one. Calls become content in the form that
    the description asks for; results become the user's, several in a row one message. Raises InvalidRequest as
    `plain_messages` does.
    """
    told: list[dict[str, Any]] = []
    plain = plain_messages(messages, knows_developer=False)
    for role, group in itertools.groupby(plain, key=lambda message: message.get("role")):
        if role == "tool":
            results = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            told.append({"role": "user", "content": "\n".join(results)})
        else:
            told.extend(_with_calls(message) for message in group)
    return _introduced(told, tools)


def _with_calls(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in message.pop("tool_calls", [])]
    if calls:
        listed = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
        text = f"<tool_call>{json.dumps(listed, ensure_ascii=False)}</tool_call>"
        message["content"] = f"{message['content']}\n{text}" if message["content"] else text
    return message


def _introduced(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not tools:
        return messages
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(tools=lines)
    if messages and messages[0].get("role") == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
