"""Tools for models whose template does not know them: told in words, read back by the parser."""

from __future__ import annotations

import json
from typing import Any

from peg.text.chat import ChatTemplate
from peg.text.events import Arguments, ToolCall
from peg.text.json_calls import PlainJsonCalls
from peg.text.tool_prompt import with_tools

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "x": "{é}"}}}
USER = {"role": "user", "content": "Rain?"}


def calling(*arguments: str, content: str | None = None) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "weather", "arguments": text}} for text in arguments]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def test_tools_end_the_system_message() -> None:
    """Tools are described as they were given, behind the client's own system or developer message if there is one."""
    alone = with_tools([USER], [TOOL])
    assert alone[1:] == [USER]
    assert alone[0]["role"] == "system"
    assert json.dumps(TOOL["function"], ensure_ascii=False) in alone[0]["content"].splitlines()
    for role in ("system", "developer"):
        behind = with_tools([{"role": role, "content": "Be kind."}, USER], [TOOL])
        assert behind == [{"role": "system", "content": f"Be kind.\n\n{alone[0]['content']}"}, USER]


def test_calls_are_told_in_the_form_that_is_read() -> None:
    """A call sent back reads to the model as it is asked to write one, and the parser reads it as the same call."""
    told = with_tools([USER, calling('{"city": "Zürich"}', "{}", content="Sure.")], [])
    assert told[1].keys() == {"role", "content"}
    parser = PlainJsonCalls(tools=[TOOL])
    events = parser.feed(told[1]["content"].removeprefix("Sure.\n")) + parser.finish()
    assert [event for event in events if isinstance(event, ToolCall)] == [
        ToolCall(0, "weather"),
        ToolCall(1, "weather"),
    ]
    texts = [json.loads(event.text) for event in events if isinstance(event, Arguments)]
    assert texts == [{"city": "Zürich"}, {}]
    assert with_tools([calling("{}")], [])[0]["content"].startswith("<tool_call>[")


def test_results_in_a_row_are_one_message() -> None:
    """Results become one message of the user, so that turns alternate; the user's own words stay apart."""
    results = [{"role": "tool", "content": text, "tool_call_id": text} for text in ("1", "2")]
    told = with_tools([USER, calling("{}", "{}"), *results, USER], [])
    assert [message["role"] for message in told] == ["user", "assistant", "user", "user"]
    assert told[2] == {
        "role": "user",
        "content": "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>",
    }
    assert told[3] == USER


def test_a_template_without_tools_takes_the_result() -> None:
    """What comes out is rendered by a template that knows nothing of tools."""
    source = "{% for m in messages %}{{ '[' + m['role'] + '] ' + m['content'] + '\n' }}{% endfor %}"
    text = ChatTemplate({"default": source}, {}).render(with_tools([USER, calling("{}")], [TOOL]))
    assert text.startswith("[system] ")
    assert text.endswith('[user] Rain?\n[assistant] <tool_call>[{"name": "weather", "arguments": {}}]</tool_call>\n')
