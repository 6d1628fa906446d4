"""`POST /tokenize` and `POST /detokenize`: the same tokenizer and template that generation uses."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from peg.server.body import read_body
from peg.server.chat import template_messages
from peg.server.errors import invalid
from peg.server.form import encode
from peg.server.service import SERVICE, ServedModel
from peg.server.types import Message, TokenId


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /tokenize`: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]


tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(request: web.Request) -> web.Response:
    """The ids of a text (BOS included, as for a completion) or of a conversation (as for a chat completion)."""
    body = await read_body(request, tokenize_decoder)
    service = request.app[SERVICE]
    model = service.model()
    model.check_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt, messages: exactly one of them is needed", "prompt")
    text, adds_special_tokens = (body.prompt, True) if body.messages is None else (_render(body, model), False)
    assert text is not None
    # A text longer than the context may be counted; only the body's size is limited.
    ids = await model.texts.tokenizer.encode_async(
        text,
        context_tokens=service.config.max_body_bytes,
        add_special_tokens=adds_special_tokens if body.add_special_tokens is None else body.add_special_tokens,
        param="prompt" if body.messages is None else "messages",
    )
    names = [model.texts.tokenizer.token(token_id) for token_id in ids] if body.return_token_strs else None
    found = {"count": len(ids), "max_model_len": model.info.max_model_len, "tokens": ids, "token_strs": names}
    return web.Response(body=encode(found), content_type="application/json")


async def detokenize(request: web.Request) -> web.Response:
    """The text of token ids, special tokens included."""
    body = await read_body(request, detokenize_decoder)
    model = request.app[SERVICE].model()
    model.check_name(body.model)
    tokenizer = model.texts.tokenizer
    unknown = next((token_id for token_id in body.tokens if not tokenizer.has(token_id)), None)
    if unknown is not None:
        raise invalid(f"tokens: there is no token with id {unknown}", "tokens")
    return web.Response(body=encode({"prompt": tokenizer.decode(body.tokens)}), content_type="application/json")


def _render(body: TokenizeRequest, model: ServedModel) -> str:
    continues = bool(body.continue_final_message)
    return model.texts.template.render(
        template_messages(body.messages or ()),
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        variables=body.chat_template_kwargs,
    )
