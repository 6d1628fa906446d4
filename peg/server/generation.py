"""From a checked request to tokens and text: its sequences are submitted and each is followed to its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from peg.engine import Engine
from peg.plan import FinishReason, SamplingParams, SequenceRequest, Terminal, TokenLogprobs
from peg.server.errors import ApiError
from peg.server.live import LiveRequest
from peg.server.logprobs import Details
from peg.server.metrics import Metrics
from peg.server.sampling import choice_seed
from peg.text.grammar import TokenGrammar
from peg.text.stops import OutputRules
from peg.token_stream import Output, TokenStream

_REASONS: Mapping[FinishReason, str] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as ids, and the text that an answer begins with where it repeats its prompt (`echo`)."""

    ids: tuple[int, ...]
    echo: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What a request asks for, checked. Its choices are prompt-major: index = prompt · n + sample.

    Each choice has a copy of the grammar, as it is at its start.
    """

    request_id: str
    prompts: Sequence[Prompt]
    n: int
    sampling: SamplingParams
    max_tokens: int | None
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    rules: OutputRules
    details: Details
    priority: int
    grammar: TokenGrammar | None = None

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, however many choices it has."""
        return sum(len(prompt.ids) for prompt in self.prompts)

    def submit(self, engine: Engine, live: LiveRequest, metrics: Metrics) -> list[Choice]:
        """Put every sequence into the engine, and into `live`. Raises what `Engine.submit` raises."""
        metrics.asked(self.n, self.max_tokens)
        choices: list[Choice] = []
        for prompt in self.prompts:
            for sample in range(self.n):
                request = self._sequence(len(choices), prompt, sample)
                grammar = None if self.grammar is None else self.grammar.copy()
                stream = engine.submit(request, self.rules.matcher(), grammar)
                live.streams.append(stream)
                choices.append(Choice(len(choices), prompt, stream, self, metrics, live.arrived_s))
        return choices

    def _sequence(self, index: int, prompt: Prompt, sample: int) -> SequenceRequest:
        return SequenceRequest(
            request_id=f"{self.request_id}/{index}",
            prompt_ids=prompt.ids,
            sampling=replace(self.sampling, seed=choice_seed(self.sampling.seed, sample)),
            max_tokens=self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            prompt_logprobs=self.details.scored_prompt,
            priority=self.priority,
        )


@dataclass(frozen=True, slots=True)
class Finish:
    """How a choice ended: the word for clients, and the stop string or stop token id of the request that ended it."""

    reason: str
    stop_reason: str | int | None


class Sink(Protocol):
    """Where the text of choices goes. The choices of one request share it."""

    def piece(self, choice: Choice, text: str, output: Output) -> None:
        """More text of a choice, and the tokens that came; the text is empty only where tokens are told."""

    def finish(self, choice: Choice, text: str, finish: Finish) -> None:
        """The rest of a choice's text, and how it ended."""

    async def flush(self) -> None:
        """What came since the last time goes on its way, together."""


class Choice:
    """One sequence on its way to its client. Owned by the task that follows it."""

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        stream: TokenStream,
        generation: Generation,
        metrics: Metrics,
        arrived_s: float,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.completion_tokens = 0
        self._metrics = metrics
        self._last_s = arrived_s
        self._stream = stream
        self._text = generation.rules.text()
        self._tells_tokens = generation.details.tells_tokens
        self._stop_token_ids = generation.stop_token_ids

    @property
    def prompt_scores(self) -> list[TokenLogprobs | None]:
        """One score for each token of the prompt: None for the first, and where a cancel came before the score."""
        scores = [None, *self._stream.prompt_logprobs]
        return scores + [None] * (len(self.prompt.ids) - len(scores))

    async def follow(self, sink: Sink, tokens_at_once: int) -> None:
        """Hand everything to `sink`: the first token as it comes, then so many at once, however many are there.

        Raises SequenceFailed where the sequence failed.
        """
        stream = self._stream
        while outputs := await stream.read():
            before = self.completion_tokens
            for output in outputs:
                self.completion_tokens += len(output.token_ids)
                if (text := self._feed(output)) or self._tells_tokens:
                    sink.piece(self, text, output)
            self._measure(before)
            stream.wake_tokens = tokens_at_once
            await sink.flush()
        terminal = stream.terminal
        assert terminal is not None, "a stream ended without a terminal"
        if terminal.reason not in _REASONS:
            raise SequenceFailed(terminal)
        tail = self._text.finish()
        asked_for = terminal.stop_token_id in self._stop_token_ids  # the model's own end is no stop that was asked for
        stop = terminal.stop_token_id if asked_for else self._text.matched
        sink.finish(self, tail, Finish(_REASONS[terminal.reason], stop))
        await sink.flush()

    def _measure(self, before: int) -> None:
        """Tell the metrics of the tokens after the first `before`, and of the time that they took."""
        tokens, now_s, first_s = self.completion_tokens - before, time.monotonic(), self._stream.first_token_s
        if not before and first_s is not None:
            self._metrics.first_token(first_s - self._last_s)
            self._last_s = first_s
            tokens -= 1
        if tokens:
            self._metrics.more_tokens(tokens, now_s - self._last_s)
            self._last_s = now_s

    def _feed(self, output: Output) -> str:
        feed = self._text.feed
        if len(output.token_ids) == 1:
            return feed(output.token_ids[0])
        return "".join(map(feed, output.token_ids))


class SequenceFailed(Exception):
    """A sequence got the terminal FAILED or REJECTED."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(terminal.message or str(terminal.reason))
        self._engine_wide = terminal.engine_wide

    def answer(self) -> ApiError:
        """500 where only this request was hit, 503 where the engine had failed or went down, whatever it does now."""
        if self._engine_wide:
            return ApiError(503, "engine_failed", str(self))
        return ApiError(500, "sequence_failed", str(self))


async def follow_all(choices: Sequence[Choice], sink: Sink, tokens_at_once: int) -> None:
    """Follow every choice to its end, by `tokens_at_once` tokens after its first.

    The first failure ends the others and is raised as ApiError.
    """
    try:
        # Tasks for one choice too: what wakes the handler's own goes through every middleware.
        async with asyncio.TaskGroup() as group:
            for choice in choices:
                group.create_task(choice.follow(sink, tokens_at_once))
    except ExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first.answer() if isinstance(first, SequenceFailed) else first from None
