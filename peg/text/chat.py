"""Messages to the text that a model continues, by the checkpoint's own chat template."""

from __future__ import annotations

import datetime as dt
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from peg.errors import CheckpointError, InvalidRequest
from peg.text.messages import plain_messages
from peg.text.model_files import SPECIAL_NAMES, read_json, special_tokens

# What a template can raise that is about the messages, not about peg: its own errors, and Python's on bad types.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_ARGUMENTS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", *SPECIAL_NAMES})


class ChatTemplate:
    """A checkpoint's chat templates. Nothing changes after construction, so every thread may render.

    Most have one, named `default`; a template named `tool_use` is used where tools are given.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are what templates read as `bos_token` and so on. Raises jinja2.TemplateError."""
        environment = _environment()
        self._special_tokens = dict(special_tokens)
        self._sources = dict(sources)
        self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        self._variables = {
            name: frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
            for name, source in sources.items()
        }

    @classmethod
    def load(cls, model_dir: Path) -> ChatTemplate:
        """The templates of a model directory: chat_template.jinja, or tokenizer_config.json's `chat_template`.

        No template at all is no fault here: `render` then refuses. Raises CheckpointError for a faulty one.
        """
        config = read_json(model_dir / "tokenizer_config.json")
        file = model_dir / "chat_template.jinja"
        declared = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
        try:
            return cls(_named(declared), special_tokens(config))
        except jinja2.TemplateError as error:
            raise CheckpointError(f"{model_dir}: chat template: {error}") from error

    @classmethod
    def from_source(cls, source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """A template that came with a request. Raises InvalidRequest for a faulty one."""
        try:
            return cls({"default": source}, special_tokens)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"chat template: {error}", "chat_template") from error

    def source(self, *, tools: bool = False) -> str:
        """The text of the template that is used with or without tools; empty where there is none."""
        return self._sources.get(self._choose(tools), "")

    def reads(self, variable: str, *, tools: bool = False) -> bool:
        """Whether the template used with or without tools looks at a variable, `reasoning_effort` for instance."""
        return variable in self._variables.get(self._choose(tools), ())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt, with its special tokens written out: BOS too, where the template writes it.

        `variables` go to the template by name (`chat_template_kwargs`). Raises InvalidRequest: there is no
        template, it raised an error, or it does not read `tools` or a variable, which would then be ignored.
        """
        name = self._choose(bool(tools))
        if name not in self._templates:
            raise InvalidRequest("the model has no chat template; give it the whole text as a completion", "messages")
        self._check_variables(variables or {}, name)
        if tools and "tools" not in self._variables[name]:
            raise InvalidRequest("the model's chat template does not read tools", "tools")
        plain = plain_messages(messages, knows_developer="developer" in self._sources[name])
        mark = ""
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequest("excludes add_generation_prompt, which is true", "continue_final_message")
            mark = _mark_end(plain)
        try:
            text = self._templates[name].render(
                messages=plain,
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
                **(variables or {}),
            )
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(f"chat template: {error}", "messages") from error
        return _cut_at(mark, text) if mark else text

    def _choose(self, tools: bool) -> str:
        return "tool_use" if tools and "tool_use" in self._templates else "default"

    def _check_variables(self, variables: Mapping[str, Any], name: str) -> None:
        for key in variables:
            if key in _ARGUMENTS:
                raise InvalidRequest(f"{key} cannot be set here", f"chat_template_kwargs.{key}")
            if key not in self._variables[name]:
                raise InvalidRequest(f"the model's chat template does not read {key!r}", f"chat_template_kwargs.{key}")


# --- continuing the final message ----------------------------------------------------------------------------


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Put a mark nobody can guess behind the final message's text; a space after it shows whether text is trimmed."""
    if not messages:
        raise InvalidRequest("there is no message to continue", "continue_final_message")
    mark = f"[end {secrets.token_hex(16)}]"
    messages[-1]["content"] += mark + " "
    return mark


def _cut_at(mark: str, text: str) -> str:
    """The text before the mark. Where the template trims the message's end, so would it have the real one."""
    before, found, after = text.rpartition(mark)
    if not found:
        raise InvalidRequest("the chat template does not show the final message's content", "continue_final_message")
    return before if after.startswith(" ") else before.rstrip()


# --- the sandbox ---------------------------------------------------------------------------------------------


def _named(declared: Any) -> dict[str, str]:
    """Template texts by name, from one text, a list of {name, template}, or None."""
    if declared is None:
        return {}
    if isinstance(declared, str):
        return {"default": declared}
    try:
        named = {entry["name"]: entry["template"] for entry in declared}
    except (TypeError, KeyError) as error:
        raise CheckpointError("tokenizer_config.json: chat_template must be text or a list of named texts") from error
    return named


def _environment() -> ImmutableSandboxedEnvironment:
    """The sandbox that chat templates are written for, as transformers sets it up."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what training learns from; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 jinja2 declares it as an instance variable

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models have seen it in training: nothing escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return dt.datetime.now().astimezone().strftime(pattern)
