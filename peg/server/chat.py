"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from aiohttp import web

from peg.server.answer import answer
from peg.server.body import read_body
from peg.server.errors import invalid
from peg.server.form import Collected, Envelope, Usage, encode
from peg.server.generation import Finish
from peg.server.intake import admit_body, check_choices, delivery_of, generation_of
from peg.server.service import SERVICE, ServedModel
from peg.server.types import ChatRequest, Message, chat_decoder


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    body = await read_body(request, chat_decoder)
    model = admit_body(request, body)
    name = model.check_name(body.model)
    check_choices(request.app[SERVICE], body, 1)
    max_tokens = _max_tokens(body)
    prompt = await _prompt(body, model)
    generation = generation_of(request, body, [prompt], max_tokens)
    form = ChatForm(f"chatcmpl-{generation.request_id}", name)
    return await answer(request, generation, form, delivery_of(body))


def template_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """The messages as templates read them. Parts that a model of text cannot honour are refused."""
    for index, message in enumerate(messages):
        for name in ("audio", "function_call", "annotations"):
            if getattr(message, name):
                param = f"messages.{index}.{name}"
                raise invalid(f"{param}: not supported, only null", param, "unsupported_value")
    return [msgspec.to_builtins(message) for message in messages]


async def _prompt(body: ChatRequest, model: ServedModel) -> tuple[int, ...]:
    """The conversation as ids. The template writes BOS itself, so the tokenizer adds nothing unless told to."""
    template = model.texts.template
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        if not template.reads("reasoning_effort"):
            raise invalid("reasoning_effort: the model's chat template does not read it", "reasoning_effort")
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    continues = bool(body.continue_final_message)
    text = template.render(
        template_messages(body.messages),
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        variables=variables,
    )
    ids = await model.texts.tokenizer.encode_async(
        text,
        context_tokens=model.info.max_model_len,
        add_special_tokens=bool(body.add_special_tokens),
        param="messages",
    )
    return tuple(ids)


def _max_tokens(body: ChatRequest) -> int | None:
    """The limit that was asked for, `max_completion_tokens` first; None is up to the context."""
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked: int | None = getattr(body, name)
    if asked == 0:
        raise invalid(f"{name} 0: must be at least 1", name)
    return asked


class ChatForm:
    """How a chat completion is written."""

    def __init__(self, answer_id: str, model: str) -> None:
        self.envelope = Envelope(answer_id, "chat.completion.chunk", model)

    def opening(self, index: int) -> bytes:
        delta = b'"delta":{"role":"assistant","content":""},"index":%d,"logprobs":null,"finish_reason":null' % index
        return self.envelope.event(delta, None)

    def piece(self, index: int, text: str, usage: Usage | None) -> bytes:
        ending = b'},"index":%d,"logprobs":null,"finish_reason":null' % index
        return self.envelope.event(b'"delta":{"content":' + encode(text) + ending, usage)

    def closing(self, index: int, text: str, finish: Finish, usage: Usage | None) -> bytes:
        choice = _choice(index, "delta", {"content": text} if text else {}, finish)
        return self.envelope.event(encode(choice)[1:-1], usage)

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        answers = [
            _choice(index, "message", {"role": "assistant", "content": choice.text, "refusal": None}, choice.ending)
            for index, choice in enumerate(choices)
        ]
        return self.envelope.document("chat.completion", answers, usage)


def _choice(index: int, kind: str, message: dict[str, object], finish: Finish) -> dict[str, object]:
    return {
        "index": index,
        kind: message,
        "logprobs": None,
        "finish_reason": finish.reason,
        "stop_reason": finish.stop_reason,
    }
