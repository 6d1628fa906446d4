"""The tokens of one request on their way from the engine's loop to whoever reads them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import chain
from typing import TypeAlias

from peg.plan import FinishReason, SequenceRequest, Terminal, TokenLogprobs
from peg.sched.scheduler import Update

_READ_TOKENS = 64  # at most at a time: what a slow reader is behind by reaches him under his own back-pressure

Output: TypeAlias = Update
"""Tokens of one stream, with a logprob each where they were asked for. Only these two fields are a reader's."""


class TokenStream:
    """The tokens of one request, for one reader; once there are no more, `terminal` says why. Owned by the loop.

    The reader is woken for `wake_tokens` tokens or the end. Times are `time.monotonic()`: `started_s` is when the
    first step with it was launched, `first_token_s` when its first token was committed, `ended_s` that of the terminal.
    """

    def __init__(self, request: SequenceRequest, cancel: Callable[[], object]) -> None:
        """`cancel` ends the request in the engine."""
        self.request_id = request.request_id
        self.prompt_tokens = len(request.prompt_ids)
        self.published_tokens = 0
        self.wake_tokens = 1
        self.submitted_s = time.monotonic()
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.ended_s: float | None = None
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.terminal: Terminal | None = None
        self._cancel = cancel
        self._unread: list[Output] = []  # of one token each
        self._reader: asyncio.Future[None] | None = None
        self._new_future = asyncio.get_running_loop().create_future

    @property
    def unread_tokens(self) -> int:
        """Tokens that wait for the reader."""
        return len(self._unread)

    def cancel(self) -> None:
        """The reader wants no more. The terminal is written at once; a stream that has ended stays as it is."""
        self._cancel()

    def put(self, update: Update) -> None:
        """Hand over what one commit brought for this sequence."""
        assert self.terminal is None, f"{self.request_id}: tokens after the terminal"
        if update.token_ids:
            assert len(update.token_ids) == 1, f"{self.request_id}: {len(update.token_ids)} tokens of one step"
            self._unread.append(update)
            self.published_tokens += 1
            if self.first_token_s is None:
                self.first_token_s = time.monotonic()
        if update.prompt_logprobs:
            self.prompt_logprobs += update.prompt_logprobs
        if update.terminal is not None:
            self._end(update.terminal)
        self._notify()

    def _end(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.ended_s = time.monotonic()

    def fail(self, message: str) -> None:
        """End with FAILED as everyone does, without the scheduler's help."""
        terminal = Terminal(
            reason=FinishReason.FAILED,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.published_tokens,
            message=message,
            engine_wide=True,
        )
        self._end(terminal)
        self._notify()

    def _notify(self) -> None:
        reader = self._reader
        if reader is None or not (len(self._unread) >= self.wake_tokens or self.terminal is not None):
            return
        self._reader = None
        if not reader.done():
            reader.set_result(None)

    async def read(self) -> Sequence[Output]:
        """Wait for `wake_tokens` tokens or the end, and take what is there by so many tokens; nothing after it."""
        size, unread = self.wake_tokens, self._unread
        while len(unread) < size and self.terminal is None:
            self._reader = self._new_future()
            await self._reader
        taken = unread[: _READ_TOKENS if size == 1 else size]
        del unread[: len(taken)]
        return taken if size == 1 or not taken else [_joined(taken)]

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        outputs = await self.read()
        if not outputs:
            raise StopAsyncIteration
        return _joined(outputs)


def _joined(outputs: Sequence[Output]) -> Output:
    if len(outputs) == 1:
        return outputs[0]
    token_ids = chain.from_iterable(output.token_ids for output in outputs)
    logprobs = chain.from_iterable(output.logprobs for output in outputs)
    return Output(outputs[0].seq_id, tuple(token_ids), tuple(logprobs))
