"""Constrained sequences: which tokens may come next is found out on worker threads, while the ranks run other steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from peg.sched.scheduler import Update

_THREADS = 2  # a mask takes tens of microseconds: they are there so that a slow grammar holds up no other


class Grammar(Protocol):
    """Says which tokens one sequence may sample. Called by one thread at a time, and never by the loop.

    `first_mask` is for the token after the prompt. In a mask, token i may come where bit i % 8 of byte i // 8 is set.
    """

    first_mask: bytes

    def advance(self, token_id: int) -> bytes | None:
        """Take in the sampled token; the mask for the next one, None where nothing can follow.

        Raises RequestError where it cannot say.
        """


@dataclass(frozen=True, slots=True)
class Made:
    """What came of one `advance`: a mask, None where the sequence is complete, or what went wrong."""

    seq_id: int
    mask: bytes | None
    error: str | None = None


class MaskMaker:
    """The grammars of the open sequences. Owned by the loop; `wake` is called when there is something to `take`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._made: list[Made] = []
        self._grammars: dict[int, Grammar] = {}
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="mask")

    def add(self, seq_id: int, grammar: Grammar) -> None:
        self._grammars[seq_id] = grammar

    def remove(self, seq_id: int) -> None:
        """The sequence has ended; what is being made for it is nobody's any more."""
        self._grammars.pop(seq_id, None)

    def clear(self) -> None:
        self._grammars.clear()

    def advance(self, updates: Iterable[Update]) -> None:
        """Begin the next mask of every constrained sequence that has a new token and goes on."""
        if not self._grammars:
            return
        for update in updates:
            grammar = self._grammars.get(update.seq_id)
            if grammar is not None and update.token_ids and update.terminal is None:
                assert len(update.token_ids) == 1, "a constrained sequence samples one token between masks"
                made = asyncio.get_running_loop().run_in_executor(self._pool, grammar.advance, update.token_ids[0])
                made.add_done_callback(partial(self._keep, update.seq_id))

    def take(self) -> list[Made]:
        """What is ready, for the sequences that are still there."""
        made, self._made = self._made, []
        return [each for each in made if each.seq_id in self._grammars]

    def close(self) -> None:
        """End the threads. What they still work on is dropped."""
        self._grammars.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _keep(self, seq_id: int, made: asyncio.Future[bytes | None]) -> None:
        if made.cancelled():
            return
        error = made.exception()
        self._made.append(Made(seq_id, made.result()) if error is None else Made(seq_id, None, str(error)))
        self._wake()
