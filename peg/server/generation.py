"""From a checked request to tokens and text: its sequences are submitted and each is followed to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from peg.engine import Engine, Output, TokenStream
from peg.plan import EngineState, FinishReason, SamplingParams, SequenceRequest, Terminal
from peg.server.errors import ApiError
from peg.server.live import LiveRequest
from peg.server.metrics import Metrics
from peg.server.sampling import choice_seed
from peg.text.stops import OutputRules

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "abort"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What a request asks for, checked. Its choices are prompt-major: index = prompt · n + sample.

    Tokens in `hidden_ids` end a choice and give no text.
    """

    request_id: str
    prompts: Sequence[tuple[int, ...]]
    n: int
    sampling: SamplingParams
    max_tokens: int | None
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    rules: OutputRules
    hidden_ids: frozenset[int]

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, however many choices it has."""
        return sum(len(prompt) for prompt in self.prompts)

    def submit(self, engine: Engine, live: LiveRequest, metrics: Metrics) -> list[Choice]:
        """Put every sequence into the engine, and into `live`. Raises what `Engine.submit` raises."""
        metrics.asked(self.n, self.max_tokens)
        choices: list[Choice] = []
        for prompt in self.prompts:
            for sample in range(self.n):
                request = self._sequence(len(choices), prompt, sample)
                stream = engine.submit(request, self.rules.matcher())
                live.streams.append(stream)
                choices.append(Choice(len(choices), stream, self, metrics, live.arrived_s))
        return choices

    def _sequence(self, index: int, prompt: tuple[int, ...], sample: int) -> SequenceRequest:
        return SequenceRequest(
            request_id=f"{self.request_id}/{index}",
            prompt_ids=prompt,
            sampling=replace(self.sampling, seed=choice_seed(self.sampling.seed, sample)),
            max_tokens=self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
        )


@dataclass(frozen=True, slots=True)
class Finish:
    """How a choice ended: the word for clients, and the stop string or stop token id of the request that ended it."""

    reason: str
    stop_reason: str | int | None


class Sink(Protocol):
    """Where the text of choices goes. The choices of one request share it."""

    async def piece(self, choice: Choice, text: str) -> None:
        """More text of a choice, never empty."""

    async def finish(self, choice: Choice, text: str, finish: Finish) -> None:
        """The rest of a choice's text, and how it ended."""


class Choice:
    """One sequence on its way to its client. Owned by the task that follows it."""

    def __init__(
        self, index: int, stream: TokenStream, generation: Generation, metrics: Metrics, arrived_s: float
    ) -> None:
        self.index = index
        self.completion_tokens = 0
        self._metrics = metrics
        self._last_s = arrived_s
        self._stream = stream
        self._text = generation.rules.text()
        self._hidden_ids = generation.hidden_ids
        self._stop_token_ids = generation.stop_token_ids

    async def follow(self, sink: Sink) -> None:
        """Hand everything to `sink` as it comes. Raises SequenceFailed where the sequence failed."""
        async for output in self._stream:
            count = len(output.token_ids)
            self._last_s = self._metrics.tokens(count, self._last_s, first=not self.completion_tokens)
            self.completion_tokens += count
            if text := self._feed(output):
                await sink.piece(self, text)
        terminal = self._stream.terminal
        assert terminal is not None, "a stream ended without a terminal"
        if terminal.reason not in _REASONS:
            raise SequenceFailed(terminal)
        tail = self._text.finish()
        asked_for = terminal.stop_token_id in self._stop_token_ids  # the model's own end is no stop that was asked for
        stop = terminal.stop_token_id if asked_for else self._text.matched
        await sink.finish(self, tail, Finish(_REASONS[terminal.reason], stop))

    def _feed(self, output: Output) -> str:
        shown = [self._text.feed(token_id) for token_id in output.token_ids if token_id not in self._hidden_ids]
        return shown[0] if len(shown) == 1 else "".join(shown)


class SequenceFailed(Exception):
    """A sequence got the terminal FAILED or REJECTED."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(terminal.message or str(terminal.reason))


async def follow_all(choices: Sequence[Choice], sink: Sink, engine: Engine) -> None:
    """Follow every choice to its end. The first failure ends the others and is raised as ApiError."""
    try:
        if len(choices) == 1:
            await choices[0].follow(sink)
            return
        async with asyncio.TaskGroup() as group:
            for choice in choices:
                group.create_task(choice.follow(sink))
    except SequenceFailed as error:
        raise _failure(error, engine) from None
    except ExceptionGroup as errors:
        first = errors.exceptions[0]
        raise _failure(first, engine) if isinstance(first, SequenceFailed) else first from None


def _failure(error: SequenceFailed, engine: Engine) -> ApiError:
    """500 where only this request was hit, 503 where the engine has failed or goes down."""
    if engine.state is EngineState.READY:
        return ApiError(500, "sequence_failed", str(error))
    return ApiError(503, "engine_failed", str(error))
