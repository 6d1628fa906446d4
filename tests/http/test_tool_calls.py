"""Tools and reasoning over HTTP, with models that write both in their own ways."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from tokenizers import AddedToken

from peg.config import EngineConfig
from peg.text.gemma_calls import GemmaCalls
from tests.http.echo_group import EOS, EchoGroup
from tests.http.serving import TEMPLATE, Answer, Server, echo_config, echo_in_place_of_ranks, serving
from tests.unit.small_tokenizers import byte_level

ROME = {
    "type": "object",
    "properties": {"city": {"enum": ["cat"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "the", "parameters": ROME}},
    {"type": "function", "function": {"name": "now"}},
]
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "cat"}}\n</tool_call>'
END = "<|im_end|>"
# The models of this file say what they are told, from its start on; what follows the messages only marks the family.
QWEN = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
GEMMA = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}<|tool_call>{% endif %}"


def config_with(template: str, factory: pytest.TempPathFactory, **more: Any) -> EngineConfig:
    config = echo_config(factory.mktemp("model"), max_model_len=2048)
    path = config.model_dir / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template} | more))
    return config


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model like Qwen3: reasoning in `<think>`, calls as JSON between marks."""
    with pytest.MonkeyPatch.context() as patch:
        echo_in_place_of_ranks(patch)
        with serving(config_with(QWEN, tmp_path_factory)) as running:
            yield running


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model whose chat template does not know tools."""
    with pytest.MonkeyPatch.context() as patch:
        echo_in_place_of_ranks(patch)
        with serving(config_with(TEMPLATE, tmp_path_factory)) as running:
            yield running


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model like Gemma 4: its marks are special tokens, and `<|tool_response>` ends a turn."""
    config = config_with(GEMMA, tmp_path_factory)
    core = byte_level()
    core.add_special_tokens([AddedToken(mark, normalized=False) for mark in (*GemmaCalls.tokens, "<|tool_response>")])
    core.save(str(config.model_dir / "tokenizer.json"))
    response = core.get_vocab()["<|tool_response>"]

    def prepare(group: EchoGroup) -> None:
        group.info = replace(group.info, eos_token_ids=(EOS, response), forbidden_token_ids=())

    with pytest.MonkeyPatch.context() as patch:
        echo_in_place_of_ranks(patch)
        with serving(config, prepare=prepare) as running:
            yield running


def message(answer: Answer) -> dict[str, Any]:
    """The message of an answer with one choice, streamed or not, without the ids of its calls."""
    assert answer.status == 200, answer.body
    if answer.headers["content-type"] == "application/json":
        (choice,) = answer.json["choices"]
        whole: dict[str, Any] = choice["message"]
        assert (whole.pop("role"), whole.pop("refusal")) == ("assistant", None)
    else:
        whole, choice = gathered(answer.events)
    for call in whole.get("tool_calls", ()):
        assert call.pop("id").startswith("call_")
        assert call.pop("type") == "function"
        call.pop("index", None)
    return {**whole, "finish_reason": choice["finish_reason"]}


def gathered(events: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The message that a client puts together out of deltas, and the last event's choice."""
    content, reasoning, calls = "", "", list[dict[str, Any]]()
    for event in events:
        delta = event["choices"][0]["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append({**call, "function": dict(call["function"])})
            else:
                assert call.keys() == {"index", "function"}, "id and name come once"
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    whole: dict[str, Any] = {"content": content or (None if calls else "")}
    whole |= {"reasoning_content": reasoning} if reasoning else {}
    whole |= {"tool_calls": calls} if calls else {}
    return whole, events[-1]["choices"][0]


def called(name: str, **arguments: str) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": json.dumps(arguments)}}


@pytest.mark.parametrize("streams", [False, True])
def test_reasoning_text_and_parallel_calls(qwen: Server, streams: bool) -> None:
    """Each part is told as what it is, streamed the same as whole; the turn ends as `tool_calls`."""
    said = f"<think>\nthe cat\n</think>\n\nthe\n{NOW}\n{WEATHER}{END}"
    assert message(qwen.chat(said, tools=TOOLS, stream=streams)) == {
        "content": "the",
        "reasoning_content": "the cat",
        "tool_calls": [called("now"), called("weather", city="cat")],
        "finish_reason": "tool_calls",
    }
    assert message(qwen.chat(f"{NOW}{END}", tools=TOOLS, stream=streams))["content"] is None
    assert message(qwen.chat(f"the cat{END}", tools=TOOLS, stream=streams)) == {
        "content": "the cat",
        "finish_reason": "stop",
    }


def test_arguments_come_as_they_are_generated(qwen: Server) -> None:
    """Several deltas, of which only the first has the call's id and name."""
    events = qwen.chat(f"{WEATHER}{END}", tools=TOOLS, stream=True).events
    deltas = [
        event["choices"][0]["delta"]["tool_calls"][0]
        for event in events
        if event["choices"][0]["delta"].get("tool_calls")
    ]
    assert deltas[0]["function"] == {"name": "weather", "arguments": ""}
    assert len(deltas) > 4
    assert "".join(delta["function"]["arguments"] for delta in deltas) == '{"city": "cat"}'


def test_reasoning_needs_no_tools(qwen: Server) -> None:
    """Reasoning is told apart without tools too; calls are not, so that what was not offered is text."""
    assert message(qwen.chat(f"<think>the</think>{NOW}{END}")) == {
        "content": NOW,
        "reasoning_content": "the",
        "finish_reason": "stop",
    }


def test_none_means_none(qwen: Server) -> None:
    """With tool_choice none the model is not told of the tools, and nothing of its text is a call."""
    free, none = (qwen.chat(f"the{END}", tools=TOOLS, tool_choice=choice).json for choice in ("auto", "none"))
    assert none["usage"]["prompt_tokens"] < free["usage"]["prompt_tokens"]
    assert message(qwen.chat(f"{NOW}{END}", tools=TOOLS, tool_choice="none")) == {
        "content": NOW,
        "finish_reason": "stop",
    }


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_that_must_come(qwen: Server, streams: bool) -> None:
    """Required and named are enforced, whatever the model would rather say; thinking first is allowed."""
    named = {"type": "function", "function": {"name": "weather"}}
    for content in ("<tool_call>the cat", NOW, f"<think>\nthe\n</think>\n\n{WEATHER}"):
        told = message(qwen.chat(content, tools=TOOLS, tool_choice=named, stream=streams))
        (call,) = told["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "cat"}
        assert (told["content"], told["finish_reason"]) == (None, "tool_calls")
    told = message(qwen.chat(f"{NOW}\n{WEATHER}{END}", tools=TOOLS, tool_choice="required", stream=streams))
    assert [call["function"]["name"] for call in told["tool_calls"]] == ["now", "weather"]
    told = message(
        qwen.chat(f"{NOW}{WEATHER}", tools=TOOLS, tool_choice="required", parallel_tool_calls=False, stream=streams)
    )
    assert [call["function"]["name"] for call in told["tool_calls"]] == ["now"]


def test_one_call_at_most(qwen: Server) -> None:
    """Without parallel calls the model stops after the first, and may answer in words as well."""
    told = message(qwen.chat(f"the\n{WEATHER}\n{NOW}{END}", tools=TOOLS, parallel_tool_calls=False))
    assert told["tool_calls"] == [called("weather", city="cat")]
    assert message(qwen.chat(f"the cat{END}", tools=TOOLS, parallel_tool_calls=False))["content"] == "the cat"


def test_strict_calls_fit_their_schema(qwen: Server) -> None:
    """With `strict` a call that the model makes on its own fits too; without it, it is told as it was written."""
    wrong = '<tool_call>\n{"name": "weather", "arguments": {"city": "the", "x": 1}}\n</tool_call>'
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    (call,) = message(qwen.chat(f"{wrong}{END}", tools=strict))["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "cat"}
    (call,) = message(qwen.chat(f"{wrong}{END}", tools=TOOLS))["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "the", "x": 1}


def test_an_answer_with_a_form_or_a_call(qwen: Server) -> None:
    """With a response_format the model answers in that form or calls a tool."""
    fields: dict[str, Any] = {"tools": TOOLS, "response_format": {"type": "json_object"}}
    assert message(qwen.chat('<think>the</think>{"a": 1}the cat', **fields))["content"] == '{"a": 1}'
    assert message(qwen.chat(f"{NOW}{END}", **fields))["tool_calls"] == [called("now")]


def test_logprobs_and_ids_of_a_call(qwen: Server) -> None:
    """Every token is told with one of the events, those of markup too."""
    said = f"{WEATHER}{END}"
    whole = qwen.chat(said, tools=TOOLS, return_token_ids=True).json["choices"][0]["token_ids"]
    events = qwen.chat(said, tools=TOOLS, return_token_ids=True, stream=True).events
    told = [token for event in events if event["choices"] for token in event["choices"][0].get("token_ids", ())]
    assert told == whole


def test_a_conversation_goes_on_after_a_call(qwen: Server, plain: Server) -> None:
    """An answer is sent back as it came, with the tool's result; a template without tools is told in words."""
    answer = message(qwen.chat(f"{WEATHER}{END}", tools=TOOLS))
    call = {"id": "call_1", "type": "function", **answer["tool_calls"][0]}
    conversation = [
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "12"},
        {"role": "user", "content": "the"},
    ]
    assert qwen.post("/v1/chat/completions", {"messages": conversation, "tools": TOOLS}).status == 200
    told = plain.post("/v1/chat/completions", {"messages": conversation[1:], "max_tokens": 200}).json
    assert told["choices"][0]["message"]["content"].startswith("<tool_response>\n12\n</tool_response>the")


@pytest.mark.parametrize("streams", [False, True])
def test_a_model_without_a_form_of_its_own(plain: Server, streams: bool) -> None:
    """Tools are described in words, and the JSON that these ask for is read; calls can be enforced as well."""
    fields: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "stream": streams}
    told = message(plain.chat("the cat", tools=TOOLS[:1], **fields))
    assert [call["function"]["name"] for call in told["tool_calls"]] == ["weather"]
    assert json.loads(told["tool_calls"][0]["function"]["arguments"]) == {"city": "cat"}
    said = plain.chat("the cat", tools=TOOLS, max_tokens=400, stream=streams)
    assert '"description": "the"' in message(said)["content"], "the echo begins with what the model is told"


@pytest.mark.parametrize("streams", [False, True])
def test_gemma_ends_a_turn_with_its_own_token(gemma: Server, streams: bool) -> None:
    """Marks are special tokens that the parser sees and no client does; `<|tool_response>` ends as `tool_calls`."""
    said = '<|channel>thought\nthe\n<channel|><|tool_call>call:weather{city:<|"|>cat<|"|>}<tool_call|><|tool_response>'
    assert message(gemma.chat(said, tools=TOOLS, stream=streams)) == {
        "content": None,
        "reasoning_content": "the",
        "tool_calls": [{"function": {"name": "weather", "arguments": '{"city":"cat"}'}}],
        "finish_reason": "tool_calls",
    }
    told = message(
        gemma.chat("<|tool_call>the cat", tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False)
    )
    (call,) = told["tool_calls"]
    assert call["function"]["name"] == "weather"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "a"}}}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tool_choice",
        ),
        ({"tools": TOOLS, "tool_choice": "required", "min_tokens": 3}, "min_tokens"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]}, None),
    ],
)
def test_what_cannot_be_honoured_is_a_400(qwen: Server, fields: dict[str, Any], param: str | None) -> None:
    """A tool that is not there, two of one name, a choice and a form at once, a schema that is not enforced."""
    answer = qwen.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], **fields})
    assert answer.status == 400, answer.body
    assert answer.error["param"] == (param or "messages.0.tool_calls.0.function.arguments")


def test_strict_is_refused_where_it_cannot_be_kept(gemma: Server) -> None:
    """Gemma's notation is held to keys and types only."""
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    answer = gemma.chat("the", tools=strict)
    assert (answer.status, answer.error["param"]) == (400, "tools")


def test_the_official_client_runs_a_tool(qwen: Server) -> None:
    """What its users write: ask, run what is asked for, send it back; streamed with the client's own accumulator."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"{WEATHER}{END}"}]
    tools: Any = TOOLS
    with OpenAI(base_url=f"{qwen.service.url}/v1", api_key="none", max_retries=0) as client:
        first = client.chat.completions.create(model="echo", messages=messages, tools=tools)
        (call,) = first.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "cat"})
        history: Any = [
            first.choices[0].message.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": "12"},
        ]
        second = client.chat.completions.create(model="echo", messages=history, tools=tools, max_tokens=5)
        assert second.choices[0].finish_reason == "length"
        with client.chat.completions.stream(model="echo", messages=messages, tools=tools) as stream:
            names = [event.name for event in stream if event.type == "tool_calls.function.arguments.done"]
            final = stream.get_final_completion()
        assert names == ["weather"]
        (call,) = final.choices[0].message.tool_calls or []
        assert json.loads(call.function.arguments) == {"city": "cat"}
