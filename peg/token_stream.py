"""The tokens of one request on their way from the engine's loop to whoever reads them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import msgspec

from peg.plan import FinishReason, SequenceRequest, Terminal, TokenLogprobs
from peg.sched.scheduler import Update


class Output(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one stream that arrived since it was last read, with a logprob each where they were asked for."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]


class TokenStream:
    """The tokens of one request, read by `async for`; once that ends, `terminal` says how. Owned by the loop.

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
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs | None] = []
        self._reader: asyncio.Future[None] | None = None
        self._new_future = asyncio.get_running_loop().create_future

    @property
    def unread_tokens(self) -> int:
        """Tokens that wait for the reader."""
        return len(self._token_ids)

    def cancel(self) -> None:
        """The reader wants no more. The terminal is written at once; a stream that has ended stays as it is."""
        self._cancel()

    def put(self, update: Update) -> None:
        """Hand over what one commit brought for this sequence."""
        assert self.terminal is None, f"{self.request_id}: tokens after the terminal"
        self._token_ids += update.token_ids
        self._logprobs += update.logprobs
        self.published_tokens += len(update.token_ids)
        self.prompt_logprobs += update.prompt_logprobs
        if self.first_token_s is None and update.token_ids:
            self.first_token_s = time.monotonic()
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
        if reader is None or not (len(self._token_ids) >= self.wake_tokens or self.terminal is not None):
            return
        self._reader = None
        if not reader.done():
            reader.set_result(None)

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        while len(self._token_ids) < self.wake_tokens:
            if self.terminal is not None:
                break
            self._reader = self._new_future()
            await self._reader
        if not self._token_ids:
            raise StopAsyncIteration
        output = Output(tuple(self._token_ids), tuple(self._logprobs))
        self._token_ids.clear()
        self._logprobs.clear()
        return output
