"""Chat messages as clients send them, made into what chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from peg.errors import InvalidRequest


def plain_messages(messages: Sequence[Mapping[str, Any]], *, knows_developer: bool) -> list[dict[str, Any]]:
    """Copies of `messages` in the one form that templates agree on.

    `content` is text: parts of type text are joined by line breaks, null is empty. Other nulls are left out.
    Arguments of tool calls are mappings, not JSON text. `reasoning` is also called `reasoning_content`. The role
    `developer` becomes `system` where the template does not know it. Raises InvalidRequest with the path of what
    cannot be expressed.
    """
    return [_plain(message, f"messages.{index}", knows_developer) for index, message in enumerate(messages)]


def _plain(message: Mapping[str, Any], path: str, knows_developer: bool) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _text(plain.get("content", ""), f"{path}.content")
    if plain.get("role") == "developer" and not knows_developer:
        plain["role"] = "system"
    if "reasoning" in plain:
        plain.setdefault("reasoning_content", plain["reasoning"])
    if "tool_calls" in plain:
        calls = plain["tool_calls"]
        plain["tool_calls"] = [_tool_call(call, f"{path}.tool_calls.{index}") for index, call in enumerate(calls)]
    return plain


def _text(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                kind = part.get("type") if isinstance(part, Mapping) else part
                raise InvalidRequest(f"content part {kind!r}: this model takes parts of type text", f"{path}.{index}")
    return "\n".join(texts)


def _tool_call(call: Mapping[str, Any], path: str) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(), **function}}:
            pass
        case _:
            raise InvalidRequest("a tool call must have a function with a name", path)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"arguments are not JSON: {error}", f"{path}.function.arguments") from None
    if not isinstance(arguments, dict):
        raise InvalidRequest("arguments must be a JSON object", f"{path}.function.arguments")
    return {"type": "function", **call, "function": {**call["function"], "arguments": arguments}}
