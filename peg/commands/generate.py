"""`peg generate`: one engine for one sequence, its text written as it comes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import click
import structlog

from peg.commands.flags import MAX_TOKENS
from peg.config import EngineConfig
from peg.engine import Engine
from peg.errors import EngineUnavailable
from peg.plan import FinishReason, SequenceRequest
from peg.server.sampling import sampling_params
from peg.server.service import ModelTexts
from peg.server.types import GenerationRequest
from peg.text.stops import OutputRules
from peg.text.tokenizer import Tokenizer
from peg.token_stream import TokenStream

log = structlog.get_logger("peg.generate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The flags of one generation. What is None is the checkpoint's to say."""

    prompt: str
    chat: bool
    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    ignore_eos: bool
    token_ids: bool


async def generate(config: EngineConfig, wanted: Wanted) -> None:
    """Write the continuation to standard output.

    Raises UsageError or InvalidRequest where the user is at fault, EngineUnavailable where the engine failed.
    """
    texts = await asyncio.to_thread(ModelTexts.load, config.model_dir, "auto")
    engine = Engine(config)
    try:
        await engine.start()
        stream = engine.submit(await _sequence(wanted, texts, engine.info.max_model_len, config.seed))
        try:
            await _write(stream, None if wanted.token_ids else texts.tokenizer)
        finally:
            stream.cancel()
    finally:
        await engine.close()
    end = stream.terminal
    assert end is not None
    if end.reason is FinishReason.FAILED:
        raise EngineUnavailable(str(end.message))
    log.info("finished", reason=str(end.reason), prompt_tokens=end.prompt_tokens, tokens=end.completion_tokens)


async def _sequence(wanted: Wanted, texts: ModelTexts, context_tokens: int, seed: int) -> SequenceRequest:
    prompt = wanted.prompt
    if wanted.chat:
        prompt = texts.template.render([{"role": "user", "content": prompt}])
    prompt_ids = await texts.tokenizer.encode_async(
        prompt, context_tokens=context_tokens, add_special_tokens=not wanted.chat
    )
    asked = GenerationRequest(
        temperature=wanted.temperature, top_k=wanted.top_k, top_p=wanted.top_p, min_p=wanted.min_p
    )
    return SequenceRequest(
        request_id="generate",
        prompt_ids=tuple(prompt_ids),
        sampling=sampling_params(asked, texts.defaults, seed),
        max_tokens=wanted.max_tokens or max(1, min(MAX_TOKENS, context_tokens - len(prompt_ids))),
        ignore_eos=wanted.ignore_eos,
    )


async def _write(stream: TokenStream, tokenizer: Tokenizer | None) -> None:
    """Text as it comes, or without a tokenizer all ids at the end."""
    if tokenizer is None:
        click.echo(" ".join([str(token_id) async for output in stream for token_id in output.token_ids]))
        return
    text = OutputRules(tokenizer, skipped=tokenizer.skipped_ids()).text()
    async for output in stream:
        click.echo("".join(map(text.feed, output.token_ids)), nl=False)
    click.echo(text.finish())
