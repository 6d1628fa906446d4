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
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
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


class Message(Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One message of a conversation, as a request brings it. Fields that answers carry may be sent back as null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
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
