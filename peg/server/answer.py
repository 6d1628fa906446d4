"""Answers: the same text of the same choices, collected into one document or written as a stream of events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from peg.server.form import Collected, Form, Usage
from peg.server.generation import Choice, Finish, Generation, follow_all
from peg.server.live import LiveRequest
from peg.server.service import SERVICE, Service
from peg.server.stream import EventStream
from peg.token_stream import Output

_WHOLE_TOKENS = 64  # at once, for an answer that is not streamed: nobody waits for a token, and the loop for few


@dataclass(frozen=True, slots=True)
class Delivery:
    """How an answer goes out: streamed or not, and where a stream tells its usage."""

    streams: bool
    usage_event: bool
    continuous_usage: bool


async def answer(request: web.Request, generation: Generation, form: Form, delivery: Delivery) -> web.StreamResponse:
    """Run a generation and answer the request with it. Whatever ends this ends its sequences."""
    service = request.app[SERVICE]
    with service.live.register(request, generation.request_id, form.envelope.id) as live:
        choices = _submit(service, generation, live)
        meter = _Meter(generation.prompt_tokens, choices)
        if delivery.streams:
            stream = EventStream(request)
            sink = _EventSink(stream, form, meter, delivery.continuous_usage)
            async with stream.kept_alive(service.config.keep_alive_s):
                await follow_all(choices, sink, service.config.stream_interval)
            return await stream.end(form.envelope.usage_event(meter.usage()) if delivery.usage_event else b"")
        collected = _CollectingSink(choices)
        await follow_all(choices, collected, _WHOLE_TOKENS)
    return web.Response(body=form.whole(collected.choices, meter.usage()), content_type="application/json")


def _submit(service: Service, generation: Generation, live: LiveRequest) -> list[Choice]:
    """All sequences, or none of them."""
    with service.counting_refusals():
        service.engine.check_room(tuple(len(prompt.ids) for prompt in generation.prompts for _ in range(generation.n)))
        return generation.submit(service.engine, live, service.metrics)


@dataclass(frozen=True, slots=True)
class _Meter:
    prompt_tokens: int
    choices: Sequence[Choice]

    def usage(self) -> Usage:
        """The usage so far."""
        completion = sum(choice.completion_tokens for choice in self.choices)
        return Usage(self.prompt_tokens, completion, self.prompt_tokens + completion)


class _CollectingSink:
    """Keeps what comes."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self.choices = [Collected(choice) for choice in choices]

    def piece(self, choice: Choice, text: str, output: Output) -> None:
        collected = self.choices[choice.index]
        collected.pieces.append(text)
        collected.token_ids += output.token_ids
        collected.scores += output.logprobs

    def finish(self, choice: Choice, text: str, finish: Finish) -> None:
        self.choices[choice.index].pieces.append(text)
        self.choices[choice.index].finish = finish

    async def flush(self) -> None:
        """Nothing of it goes before the end."""


class _EventSink:
    """Writes what comes at once, one event a piece; those that are there together are one write."""

    def __init__(self, stream: EventStream, form: Form, meter: _Meter, tells_usage: bool) -> None:
        self._stream = stream
        self._form = form
        self._meter = meter
        self._tells_usage = tells_usage
        self._opened: set[int] = set()
        self._unsent = b""

    def piece(self, choice: Choice, text: str, output: Output) -> None:
        opening = self._opening(choice)
        self._unsent += opening + self._form.piece(choice, text, output, self._usage())

    def finish(self, choice: Choice, text: str, finish: Finish) -> None:
        opening = self._opening(choice)
        self._unsent += opening + self._form.closing(choice, text, finish, self._usage())

    async def flush(self) -> None:
        events, self._unsent = self._unsent, b""
        await self._stream.send(events)

    def _usage(self) -> Usage | None:
        return self._meter.usage() if self._tells_usage else None

    def _opening(self, choice: Choice) -> bytes:
        """What goes before a choice's first event. It comes first in the form's book-keeping too."""
        if choice.index in self._opened:
            return b""
        self._opened.add(choice.index)
        return self._form.opening(choice)
