"""The requests of the generating routes, field by field.

Every field that clients of this interface send is here. Types and ranges are checked while the body is decoded; what
depends on the model, or on what peg can do, is checked in `sampling`. `None` is the same as absent everywhere.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

Seed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Stop: TypeAlias = Annotated[str, Meta(min_length=1)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0)]
Prompt: TypeAlias = str | list[str | TokenId | list[TokenId]]


class StreamOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TextFormat(Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="text"):
    """`response_format` for any text."""


class JsonFormat(Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="json_object"):
    """`response_format` for any JSON object."""


class NamedSchema(Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON schema with a name. It is always enforced, whatever `strict` says."""

    name: str
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class SchemaFormat(Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="json_schema"):
    """`response_format` for JSON that fits a schema."""

    json_schema: NamedSchema


class StructuredOutputs(Struct, forbid_unknown_fields=True, kw_only=True):
    """`structured_outputs`: what the whole answer must be. One of them."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None


class GenerationRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """What completions and chat completions have in common."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Seed | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=1024)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=1024)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0)] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: TextFormat | JsonFormat | SchemaFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    user: str | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: Prompt
    best_of: Annotated[int, Meta(ge=1)] | None = None
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    suffix: str | None = None


class TextPart(Struct, forbid_unknown_fields=True, kw_only=True):
    """One part of a message's content. peg serves text, so text is the only kind."""

    type: Literal["text"]
    text: str


class CalledFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    """What a model has called: `arguments` is JSON text, or the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CallMade(Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A tool call of an earlier answer, sent back."""

    function: CalledFunction
    type: Literal["function"] = "function"
    id: str | None = None
    index: int | None = None


class Message(Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One message of a conversation, as a request brings it. Fields that answers carry may be sent back as null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[CallMade] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None


FunctionName: TypeAlias = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A function that the model may call. With `strict` its calls fit the schema; otherwise the model is only told."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, forbid_unknown_fields=True, kw_only=True):
    """One entry of `tools`."""

    type: Literal["function"]
    function: Function


class NamedFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    """The function that must be called."""

    name: FunctionName


class NamedTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """`tool_choice` for one function."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(GenerationRequest, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


completion_decoder = msgspec.json.Decoder(CompletionRequest)
chat_decoder = msgspec.json.Decoder(ChatRequest)
