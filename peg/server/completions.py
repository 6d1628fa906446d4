"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeGuard

from aiohttp import web

from peg.server.answer import answer
from peg.server.body import read_body
from peg.server.errors import invalid
from peg.server.form import Collected, Envelope, Usage, encode
from peg.server.generation import Finish
from peg.server.intake import admit_body, check_choices, delivery_of, generation_of
from peg.server.service import SERVICE, ServedModel
from peg.server.types import CompletionRequest, completion_decoder

_DEFAULT_MAX_TOKENS = 16


async def create_completion(request: web.Request) -> web.StreamResponse:
    """Continue one or several prompts, each given as text or as token ids."""
    body = await read_body(request, completion_decoder)
    model = admit_body(request, body)
    name = model.check_name(body.model)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid(f"best_of {body.best_of}: not supported, only the value of n", "best_of", "unsupported_value")
    prompts = await _prompts(request, body, model)
    generation = generation_of(request, body, prompts, _max_tokens(body, prompts, model.info.max_model_len))
    form = CompletionForm(f"cmpl-{generation.request_id}", name)
    return await answer(request, generation, form, delivery_of(body))


async def _prompts(request: web.Request, body: CompletionRequest, model: ServedModel) -> list[tuple[int, ...]]:
    """Every prompt as ids. Ids are used as they are; text gets what the tokenizer always adds, unless told not to."""
    items = [body.prompt] if isinstance(body.prompt, str) or _is_ids(body.prompt) else body.prompt
    check_choices(request.app[SERVICE], body, len(items))
    if len({type(item) for item in items}) > 1:
        raise invalid("prompt: must be a text, a list of texts, a list of token ids or a list of such lists", "prompt")
    if not items or not all(items):
        raise invalid("prompt: empty; at least one token is needed", "prompt")
    return list(await asyncio.gather(*(_prompt(item, body, model) for item in items)))


def _is_ids(given: list[str | int | list[int]]) -> TypeGuard[list[int]]:
    return bool(given) and all(isinstance(item, int) for item in given)


async def _prompt(item: str | int | list[int], body: CompletionRequest, model: ServedModel) -> tuple[int, ...]:
    tokenizer = model.texts.tokenizer
    if isinstance(item, str):
        ids = await tokenizer.encode_async(
            item,
            context_tokens=model.info.max_model_len,
            add_special_tokens=body.add_special_tokens is not False,
            param="prompt",
        )
        return tuple(ids)
    assert isinstance(item, list)
    if max(item) >= tokenizer.vocab_size:
        raise invalid(f"prompt: token id {max(item)} is not in 0 to {tokenizer.vocab_size - 1}", "prompt")
    return tuple(item)


def _max_tokens(body: CompletionRequest, prompts: Sequence[tuple[int, ...]], context_tokens: int) -> int:
    """What was asked for; otherwise 16, or less where the context ends before."""
    if body.max_tokens == 0:
        raise invalid("max_tokens 0: must be at least 1", "max_tokens")
    if body.max_tokens is not None:
        return body.max_tokens
    return max(1, min(_DEFAULT_MAX_TOKENS, context_tokens - max(len(prompt) for prompt in prompts)))


class CompletionForm:
    """How a completion is written."""

    def __init__(self, answer_id: str, model: str) -> None:
        self.envelope = Envelope(answer_id, "text_completion", model)

    def opening(self, index: int) -> bytes:
        return b""

    def piece(self, index: int, text: str, usage: Usage | None) -> bytes:
        ending = b',"index":%d,"logprobs":null,"finish_reason":null' % index
        return self.envelope.event(b'"text":' + encode(text) + ending, usage)

    def closing(self, index: int, text: str, finish: Finish, usage: Usage | None) -> bytes:
        return self.envelope.event(encode(_choice(index, text, finish))[1:-1], usage)

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        answers = [_choice(index, choice.text, choice.ending) for index, choice in enumerate(choices)]
        return self.envelope.document("text_completion", answers, usage)


def _choice(index: int, text: str, finish: Finish) -> dict[str, object]:
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": finish.reason,
        "stop_reason": finish.stop_reason,
    }
