"""What a request says about the form of its answer: `response_format` and `structured_outputs`."""

from __future__ import annotations

import asyncio

import msgspec

from peg.server.errors import invalid
from peg.server.service import ServedModel
from peg.server.types import GenerationRequest, JsonFormat, SchemaFormat, StructuredOutputs
from peg.text import grammar
from peg.text.grammar import TokenGrammar

# With a grammar these could leave no token that may come next, or would keep the answer from ending where it must.
_EXCLUDED = ("allowed_token_ids", "bad_words", "min_tokens", "ignore_eos")


def source_of(body: GenerationRequest) -> tuple[str, str] | None:
    """The source of the grammar that the answer must fit, and the field it comes from; None where any text will do."""
    structured = _structured(body.structured_outputs)
    match body.response_format:
        case JsonFormat():
            formatted = grammar.json_schema({"type": "object"}, "response_format"), "response_format"
        case SchemaFormat(json_schema=named):
            param = "response_format.json_schema.schema"
            formatted = grammar.json_schema({} if named.schema is None else named.schema, param), param
        case _:
            return structured
    if structured is not None:
        raise invalid("structured_outputs: not with response_format", "structured_outputs")
    return formatted


async def compile_grammar(
    body: GenerationRequest, model: ServedModel, asked: tuple[str, str] | None
) -> TokenGrammar | None:
    """The grammar over the model's tokens, made on a worker thread. Raises InvalidRequest where none can be."""
    if asked is None:
        return None
    source, param = asked
    for name in _EXCLUDED:
        if getattr(body, name):
            raise invalid(f"{name}: not with {param.partition('.')[0]}", name)
    return await asyncio.to_thread(model.grammars.compile, source, param)


def _structured(asked: StructuredOutputs | None) -> tuple[str, str] | None:
    if asked is None:
        return None
    given = [name for name in asked.__struct_fields__ if getattr(asked, name) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise invalid(f"structured_outputs: {', '.join(given)}: only one of them", "structured_outputs")
    param = f"structured_outputs.{given[0]}"
    if asked.json is not None:
        return grammar.json_schema(_schema(asked.json, param), param), param
    if asked.regex is not None:
        return grammar.regex(asked.regex, param), param
    if asked.choice is not None:
        return grammar.choice(asked.choice, param), param
    return grammar.context_free(asked.grammar or "", param), param


def _schema(given: dict[str, object] | str, param: str) -> dict[str, object]:
    """A schema, which may come as JSON text."""
    if not isinstance(given, str):
        return given
    try:
        return msgspec.json.decode(given, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid(f"{param}: must be a JSON schema: {error}", param) from None
