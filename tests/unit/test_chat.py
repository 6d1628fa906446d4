"""Chat templates: rendered as transformers renders them, refused where they cannot do what is asked."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from peg.errors import CheckpointError, InvalidRequest
from peg.text.chat import ChatTemplate

SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}
SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMING = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set role = 'model' %}
    {%- else %}
        {%- set role = message.role %}
    {%- endif %}
<|turn>{{ role }}
{{ message.content | trim }}<turn|>
{%- endfor %}
{% if add_generation_prompt %}
<|turn>model
{% endif %}"""
TOOLS = """{% if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{% for message in messages %}
{% if message.tool_calls %}
{% for call in message.tool_calls %}
    {% if loop.index > 2 %}
      {% break %}
    {% endif %}
{{ call.function.name }}({{ call.function.arguments | tojson(indent=2) }})
{% endfor %}
{% continue %}
{% endif %}
{% generation %}{{ message.role }}: {{ message.content }}{% endgeneration %}

{% endfor %}
{% set ns = namespace(n=0) %}
{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }} {{ reasoning_effort | default('low') }}"""
PLAIN: list[dict[str, Any]] = [
    {"role": "user", "content": " Hé <b>'x'</b> & \"y\" "},
    {"role": "assistant", "content": "Fine.\n "},
]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"ü": "<1>", "b": [1, None, True]}}}
CALLING: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Go"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL, CALL]},
    {"role": "tool", "content": "{}", "tool_call_id": "1"},
]
TOOL = {"type": "function", "function": {"name": "f", "description": "é <p>", "parameters": {"z": 1, "a": {}}}}


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, SPECIAL)


def reference(source: str, messages: list[dict[str, Any]], **arguments: Any) -> str:
    rendered, _ = render_jinja_template([messages], chat_template=source, **SPECIAL, **arguments)
    return str(rendered[0])


@pytest.mark.parametrize("source", [SMOLLM, TRIMMING, TOOLS], ids=["smollm", "trimming", "tools"])
@pytest.mark.parametrize("messages", [PLAIN, CALLING, []], ids=["plain", "calling", "empty"])
@pytest.mark.parametrize("prompt", [True, False])
def test_rendered_as_transformers_does(source: str, messages: list[dict[str, Any]], *, prompt: bool) -> None:
    """White space, JSON, loop controls and generation tags come out as in the reference implementation."""
    assert template(source).render(messages, add_generation_prompt=prompt) == reference(
        source, messages, add_generation_prompt=prompt
    )


def test_tools_and_variables_are_rendered_as_transformers_does() -> None:
    """Tools keep their key order and are not escaped; variables reach the template."""
    mine = template(TOOLS).render(CALLING, tools=[TOOL], variables={"reasoning_effort": "high"})
    assert mine == reference(TOOLS, CALLING, tools=[TOOL], add_generation_prompt=True, reasoning_effort="high")
    assert json.dumps(TOOL, ensure_ascii=False) in mine
    assert mine.endswith("4 high")


@pytest.mark.parametrize("source", [SMOLLM, TRIMMING], ids=["smollm", "trimming"])
@pytest.mark.parametrize("content", ["Fine", "Fine. \n", "Fine <turn|> Fine", "<|im_end|>"])
def test_the_final_message_is_continued_as_transformers_does(source: str, content: str) -> None:
    """The prompt ends with the final message's own text, trimmed only where the template trims."""
    messages = [PLAIN[0], {"role": "assistant", "content": content}]
    mine = template(source).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert mine == reference(source, messages, continue_final_message=True)
    assert mine.endswith(content.rstrip() if source is TRIMMING else content)
    assert messages[1]["content"] == content


def test_a_message_shown_twice_is_continued_at_its_last_place() -> None:
    """Where a template shows the final message more than once, the prompt ends with the last of them."""
    source = "{{ messages[0].content }}|{{ messages[0].content }}|"
    mine = template(source).render(PLAIN[1:], add_generation_prompt=False, continue_final_message=True)
    assert mine.count(PLAIN[1]["content"]) == 2
    assert mine.endswith(PLAIN[1]["content"])


def test_a_message_that_cannot_be_continued_is_refused() -> None:
    """No message, a prompt for a new one, or a template that hides the content: each is a refusal."""
    hiding = "{{ messages[0].role }}"
    for source, messages, prompt in ((SMOLLM, [], False), (SMOLLM, PLAIN, True), (hiding, PLAIN, False)):
        with pytest.raises(InvalidRequest) as caught:
            template(source).render(messages, add_generation_prompt=prompt, continue_final_message=True)
        assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content.x }}", "has no element 9"),
        ("{{ messages + 1 }}", "can only concatenate"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{{ 'a'.index('b') }}", "not found"),
        ("{{ '%(x)s' | format(y=1) }}", "x"),
        ("{{ tools | dictsort }}", "no attribute 'items'"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ tools | tojson(indent=messages) }}", "indent|multiply|str"),
    ],
)
def test_errors_of_the_template_are_the_requests(source: str, message: str) -> None:
    """Whatever a template raises, by itself or by what it was given, is a refusal with its message."""
    with pytest.raises(InvalidRequest, match=f"chat template: .*({message})") as caught:
        template(source).render(PLAIN)
    assert caught.value.param == "messages"


def test_without_a_template_chat_is_refused(tmp_path: Path) -> None:
    """A model without a template loads, and refuses chat in words."""
    loaded = ChatTemplate.load(tmp_path)
    with pytest.raises(InvalidRequest, match="has no chat template"):
        loaded.render(PLAIN)
    assert (loaded.source(), loaded.reads("messages")) == ("", False)


def test_load_prefers_the_file(tmp_path: Path) -> None:
    """chat_template.jinja comes before tokenizer_config.json, whose special tokens count in both cases."""
    config = {"bos_token": {"content": "<s>"}, "chat_template": "config {{ bos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert ChatTemplate.load(tmp_path).render([]) == "config <s>"
    (tmp_path / "chat_template.jinja").write_text("file é {{ bos_token }}\n", encoding="utf-8")
    assert ChatTemplate.load(tmp_path).render([]) == "file é <s>"


def test_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    """Of named templates, tool_use is taken where tools are given, default otherwise."""
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].type }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}), encoding="utf-8")
    loaded = ChatTemplate.load(tmp_path)
    assert (loaded.render([]), loaded.render([], tools=[TOOL])) == ("plain", "function")
    assert (loaded.reads("tools"), loaded.reads("tools", tools=True)) == (False, True)
    assert loaded.source(tools=True) == "{{ tools[0].type }}"


@pytest.mark.parametrize("declared", ["{% for %}", "{{ x | nonsense }}", 7, [{"name": "default"}]])
def test_a_faulty_template_is_a_fault_of_the_checkpoint(tmp_path: Path, declared: object) -> None:
    """A template that does not compile, or is no template, is found when the model is loaded."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": declared}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"chat.template"):
        ChatTemplate.load(tmp_path)


def test_a_faulty_template_of_a_request_is_the_requests() -> None:
    """The same fault in a template that a request brought is a refusal of that request."""
    with pytest.raises(InvalidRequest, match="chat template"):
        ChatTemplate.from_source("{% for %}", SPECIAL)
    assert ChatTemplate.from_source("{{ bos_token }}", SPECIAL).render([]) == "<bos>"


def test_reads_knows_what_the_template_looks_at() -> None:
    """A variable counts as read inside macros and loops too; names set or built in do not."""
    source = "{% macro m() %}{{ effort }}{% endmacro %}{% set own = 1 %}{{ m() }}{{ own }}{{ raise_exception }}"
    assert template(source).reads("effort")
    assert not any(template(source).reads(name) for name in ("own", "raise_exception", "m", "range", "other"))


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token", "raise_exception", "typo"])
def test_variables_are_used_or_refused(name: str) -> None:
    """A variable that would replace what peg sets, or that the template does not read, is refused by name."""
    source = "{{ messages }}{{ tools }}{{ add_generation_prompt }}{{ bos_token }}{{ raise_exception }}"
    with pytest.raises(InvalidRequest, match=name) as caught:
        template(source).render([], variables={name: "x"})
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_tools_are_used_or_refused() -> None:
    """Tools for a template that does not read them are refused; an empty list is none."""
    with pytest.raises(InvalidRequest, match="does not read tools"):
        template(SMOLLM).render(PLAIN, tools=[TOOL])
    assert template(SMOLLM).render(PLAIN, tools=[]) == template(SMOLLM).render(PLAIN)
    assert template("{{ tools is none }}").render(PLAIN, tools=[]) == "True"


SHOW = template("{% for m in messages %}{{ m | tojson }}{% endfor %}")


def shown(message: dict[str, Any], using: ChatTemplate = SHOW) -> dict[str, Any]:
    seen: dict[str, Any] = json.loads(using.render([message]))
    return seen


def test_content_reaches_the_template_as_text() -> None:
    """Text parts are joined by line breaks, null and missing content are empty, other nulls are left out."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert shown({"role": "user", "content": parts}) == {"role": "user", "content": "a\nb"}
    assert shown({"role": "assistant", "content": None, "refusal": None}) == {"role": "assistant", "content": ""}
    assert shown({"role": "assistant"}) == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {}}, {"type": "text"}, "text"])
def test_other_content_parts_are_refused(part: object) -> None:
    """A part that is not text is refused with its path."""
    with pytest.raises(InvalidRequest, match="content part") as caught:
        SHOW.render([PLAIN[0], {"role": "user", "content": [{"type": "text", "text": "a"}, part]}])
    assert caught.value.param == "messages.1.content.1"


def test_tool_call_arguments_are_mappings() -> None:
    """Arguments sent as JSON text, the way of the API, reach the template as a mapping."""
    for arguments, expected in (('{"a": [1]}', {"a": [1]}), ("", {}), ({"b": 2}, {"b": 2})):
        call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
        seen = shown({"role": "assistant", "tool_calls": [call]})["tool_calls"][0]
        assert seen == {"id": "1", "type": "function", "function": {"name": "f", "arguments": expected}}


@pytest.mark.parametrize("call", [{}, {"function": 7}, {"function": {"name": 1}}, 7])
def test_tool_calls_without_a_name_are_refused(call: object) -> None:
    """A tool call sent back must say what was called."""
    with pytest.raises(InvalidRequest, match="function with a name") as caught:
        SHOW.render([PLAIN[0], {"role": "assistant", "tool_calls": [call]}])
    assert caught.value.param == "messages.1.tool_calls.0"


@pytest.mark.parametrize("arguments", ["{", "[1]", "7", "[" * 100_000])
def test_tool_call_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    """Arguments that are no JSON object are refused with their path."""
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(InvalidRequest, match="arguments") as caught:
        SHOW.render([{"role": "assistant", "tool_calls": [call]}])
    assert caught.value.param == "messages.0.tool_calls.0.function.arguments"


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    """The role developer is passed on to a template that names it, and is system to the others."""
    message = {"role": "developer", "content": "x"}
    assert shown(message)["role"] == "system"
    assert shown(message, template("{# developer #}{{ messages[0] | tojson }}"))["role"] == "developer"


def test_reasoning_has_both_names() -> None:
    """Reasoning sent under its newer name is found by templates under the older one."""
    seen = shown({"role": "assistant", "content": "x", "reasoning": "why"})
    assert seen["reasoning_content"] == seen["reasoning"] == "why"


def test_the_date_is_todays() -> None:
    """strftime_now formats the local date."""
    before = today()
    assert template("{{ strftime_now('%Y-%m-%d') }}").render([]) in {before, today()}


def today() -> str:
    return str(dt.datetime.now().astimezone().date())
