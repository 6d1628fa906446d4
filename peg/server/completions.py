"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

from aiohttp import web

from peg.server.answer import answer
from peg.server.body import read_body
from peg.server.errors import invalid
from peg.server.form import Collected, Envelope, Frames, Usage, encode
from peg.server.generation import Choice, Finish, Prompt
from peg.server.intake import admit_body, check_choices, delivery_of, details_of, generation_of
from peg.server.logprobs import CompletionScores, Details, prompt_logprobs
from peg.server.service import SERVICE, ServedModel
from peg.server.structured import compile_grammar, source_of
from peg.server.token_fields import checked_ids
from peg.server.types import CompletionRequest, completion_decoder
from peg.token_stream import Output

_DEFAULT_MAX_TOKENS = 16


async def create_completion(request: web.Request) -> web.StreamResponse:
    """Continue one or several prompts, each given as text or as token ids."""
    body = await read_body(request, completion_decoder)
    model = admit_body(request, body)
    name = model.check_name(body.model)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid(f"best_of {body.best_of}: not supported, only the value of n", "best_of", "unsupported_value")
    prompts = await _prompts(request, body, model)
    details = details_of(request, body, body.logprobs, "logprobs")
    max_tokens = _max_tokens(body, prompts, model.info.max_model_len)
    generation = generation_of(request, body, prompts, max_tokens, details)
    generation = replace(generation, grammar=await compile_grammar(body, model, source_of(body)))
    form = CompletionForm(f"cmpl-{generation.request_id}", name, details)
    return await answer(request, generation, form, delivery_of(body))


async def _prompts(request: web.Request, body: CompletionRequest, model: ServedModel) -> list[Prompt]:
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


async def _prompt(item: str | int | list[int], body: CompletionRequest, model: ServedModel) -> Prompt:
    tokenizer = model.texts.tokenizer
    if isinstance(item, str):
        ids = await tokenizer.encode_async(
            item,
            context_tokens=model.info.max_model_len,
            add_special_tokens=body.add_special_tokens is not False,
            param="prompt",
        )
        return Prompt(tuple(ids), item if body.echo else "")
    assert isinstance(item, list)
    checked_ids(item, "prompt", tokenizer)
    return Prompt(tuple(item), tokenizer.decode(item) if body.echo else "")


def _max_tokens(body: CompletionRequest, prompts: Sequence[Prompt], context_tokens: int) -> int:
    """What was asked for; otherwise 16, or less where the context ends before. 0 is for prompts that are repeated."""
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens 0: must be at least 1 without echo", "max_tokens")
    if body.max_tokens is not None:
        return body.max_tokens
    return max(1, min(_DEFAULT_MAX_TOKENS, context_tokens - max(len(prompt.ids) for prompt in prompts)))


class CompletionForm:
    """How a completion is written. One for each answer: it knows how far each choice's logprobs were told."""

    def __init__(self, answer_id: str, model: str, details: Details) -> None:
        self.envelope = Envelope(answer_id, "text_completion", model)
        self._details = details
        self._scores = defaultdict[int, CompletionScores](lambda: CompletionScores(details.names))
        self._frames = Frames(self.envelope, b'"text":', b',"index":%d,"logprobs":null,"finish_reason":null')

    def opening(self, choice: Choice) -> bytes:
        """The prompt, where it is repeated or told."""
        details = self._details
        if not (details.echo or details.token_ids):
            return b""
        piece: dict[str, object] = {"text": choice.prompt.echo, "index": choice.index, "logprobs": None}
        if details.echo and details.logprobs is not None:
            piece["logprobs"] = self._scores[choice.index].tell(choice.prompt.ids, choice.prompt_scores)
        piece["finish_reason"] = None
        if details.token_ids:
            piece |= {"prompt_token_ids": choice.prompt.ids, "token_ids": ()}
        return self.envelope.event(encode(piece)[1:-1], None)

    def piece(self, choice: Choice, text: str, output: Output, usage: Usage | None) -> bytes:
        if usage is None and not self._details.tells_tokens:
            before, after = self._frames[choice.index]
            return before + encode(text) + after
        piece: dict[str, object] = {"text": text, "index": choice.index, "logprobs": None, "finish_reason": None}
        if self._details.logprobs is not None:
            piece["logprobs"] = self._scores[choice.index].tell(output.token_ids, output.logprobs)
        if self._details.token_ids:
            piece["token_ids"] = output.token_ids
        return self.envelope.event(encode(piece)[1:-1], usage)

    def closing(self, choice: Choice, text: str, finish: Finish, usage: Usage | None) -> bytes:
        return self.envelope.event(encode(_choice(choice.index, text, finish))[1:-1], usage)

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        return self.envelope.document("text_completion", [self._whole(collected) for collected in choices], usage)

    def _whole(self, collected: Collected) -> dict[str, object]:
        details, choice, prompt = self._details, collected.choice, collected.choice.prompt
        document = _choice(choice.index, prompt.echo + collected.text, collected.ending)
        if details.logprobs is not None:
            token_ids, scores = collected.token_ids, collected.scores
            if details.echo:
                token_ids, scores = [*prompt.ids, *token_ids], [*choice.prompt_scores, *scores]
            document["logprobs"] = self._scores[choice.index].tell(token_ids, scores)
        if details.prompt_logprobs is not None:
            document["prompt_logprobs"] = prompt_logprobs(details.names, choice.prompt_scores, details.prompt_logprobs)
        if details.token_ids:
            document |= {"prompt_token_ids": prompt.ids, "token_ids": collected.token_ids}
        return document


def _choice(index: int, text: str, finish: Finish) -> dict[str, object]:
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": finish.reason,
        "stop_reason": finish.stop_reason,
    }
