"""The books: who is open, who ended how, and how many tokens that was."""

from __future__ import annotations

from dataclasses import dataclass

from peg.plan import FinishReason, Terminal
from peg.sched.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Totals since the start. A prompt token counts once, however often it is computed.

    `finished` counts terminals by reason; a request that was refused is in `finished` as REJECTED and was never
    admitted, so admitted = open + finished without REJECTED.
    """

    admitted: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    finished: dict[FinishReason, int]


class Ledger:
    """Writes exactly one terminal for each admitted sequence. Owned by the loop."""

    def __init__(self) -> None:
        self._open: dict[int, Sequence] = {}
        self._admitted = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._preemptions = 0
        self._finished = dict.fromkeys(FinishReason, 0)

    @property
    def open(self) -> tuple[Sequence, ...]:
        """Every sequence without a terminal, oldest first."""
        return tuple(self._open.values())

    def find(self, seq_id: int) -> Sequence | None:
        return self._open.get(seq_id)

    def admit(self, sequence: Sequence) -> None:
        self._open[sequence.seq_id] = sequence
        self._admitted += 1

    def reject(self) -> None:
        self._finished[FinishReason.REJECTED] += 1

    def preempt(self) -> None:
        self._preemptions += 1

    def commit(self, prompt_tokens: int, generated_tokens: int) -> None:
        self._prompt_tokens += prompt_tokens
        self._generated_tokens += generated_tokens

    def close(
        self, sequence: Sequence, reason: FinishReason, message: str | None = None, stop_token_id: int | None = None
    ) -> Terminal:
        """The one terminal of a sequence."""
        assert not sequence.finished, f"sequence {sequence.seq_id} has its terminal already"
        del self._open[sequence.seq_id]
        sequence.finished = True
        self._finished[reason] += 1
        return Terminal(
            reason=reason,
            prompt_tokens=sequence.prompt_len,
            completion_tokens=len(sequence.outputs),
            stop_token_id=stop_token_id,
            message=message,
        )

    def counters(self) -> Counters:
        return Counters(
            admitted=self._admitted,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._preemptions,
            finished=dict(self._finished),
        )
