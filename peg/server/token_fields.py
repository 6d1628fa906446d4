"""The fields of a request that speak of single tokens. Each names tokens that the tokenizer has, or is a 400."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from peg.plan import SamplingParams
from peg.server.errors import invalid
from peg.server.types import GenerationRequest
from peg.text.tokenizer import Tokenizer

_LARGEST_BIAS = 100.0  # what is beyond counts as this, as it always did in this interface


def with_token_fields(params: SamplingParams, request: GenerationRequest, tokenizer: Tokenizer) -> SamplingParams:
    """The parameters with the request's logit_bias, allowed_token_ids and bad_words."""
    if not (request.logit_bias or request.allowed_token_ids or request.bad_words):
        return params
    allowed = request.allowed_token_ids
    return replace(
        params,
        logit_bias=tuple(_biases(request, tokenizer)),
        allowed_token_ids=None if allowed is None else frozenset(checked_ids(allowed, "allowed_token_ids", tokenizer)),
        bad_words=tuple(dict.fromkeys(_bad_words(request, tokenizer))),
    )


def checked_ids(ids: Sequence[int], field: str, tokenizer: Tokenizer) -> Sequence[int]:
    """The same ids; a 400 for one that no token has. The model's vocabulary may be padded beyond the tokenizer's."""
    unknown = tokenizer.first_unknown(ids)
    if unknown is not None:
        raise invalid(f"{field}: there is no token with id {unknown}", field)
    return ids


def _biases(request: GenerationRequest, tokenizer: Tokenizer) -> Iterator[tuple[int, float]]:
    for key, value in (request.logit_bias or {}).items():
        token_id = int(key) if key.isascii() and key.isdigit() and len(key) <= 10 else -1
        if not tokenizer.has(token_id):
            raise invalid(f"logit_bias: {key!r} is no token id", "logit_bias")
        yield token_id, max(-_LARGEST_BIAS, min(_LARGEST_BIAS, value))


def _bad_words(request: GenerationRequest, tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    """A word as it begins a text, and as it follows another: with a space, which is often a token of its own kind."""
    for word in request.bad_words or ():
        for spelled in (word, " " + word.lstrip()):
            if ids := tokenizer.encode(spelled):
                yield tuple(ids)
