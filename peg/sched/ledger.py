"""The books: who is open, who ended how, and how many tokens that was."""

from __future__ import annotations

from dataclasses import dataclass

from peg.plan import FinishReason, Terminal
from peg.sched.sequence import Sequence

_STEP_SIZES = 18  # the last one, of 131,072 tokens and more, is beyond any budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Totals since the start. A prompt token counts once, however often it is computed.

    A refused request is in `finished` as REJECTED and was never admitted: `admitted` is the open sequences and all
    other terminals together. `steps_by_size[i]` counts the steps of up to 2 ** i tokens, and not of half as
    many; together they had `step_tokens`.
    """

    admitted: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    failed_steps: int
    step_tokens: int
    steps_by_size: tuple[int, ...]
    finished: dict[FinishReason, int]


class Ledger:
    """Counts, and writes exactly one terminal for each admitted sequence. Owned by the loop."""

    def __init__(self) -> None:
        self._open: dict[int, Sequence] = {}
        self._admitted = 0
        self._finished = dict.fromkeys(FinishReason, 0)
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.preemptions = 0
        self.failed_steps = 0
        self._step_tokens = 0
        self._steps_by_size = [0] * _STEP_SIZES

    @property
    def open(self) -> tuple[Sequence, ...]:
        """Every sequence without a terminal, in order of arrival."""
        return tuple(self._open.values())

    def find(self, seq_id: int) -> Sequence | None:
        return self._open.get(seq_id)

    def admit(self, sequence: Sequence) -> None:
        self._open[sequence.seq_id] = sequence
        self._admitted += 1

    def reject(self) -> None:
        self._finished[FinishReason.REJECTED] += 1

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

    def step(self, tokens: int) -> None:
        """A step with so many tokens was committed."""
        self._step_tokens += tokens
        self._steps_by_size[min((tokens - 1).bit_length(), _STEP_SIZES - 1)] += 1

    def counters(self) -> Counters:
        return Counters(
            admitted=self._admitted,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            preemptions=self.preemptions,
            failed_steps=self.failed_steps,
            step_tokens=self._step_tokens,
            steps_by_size=tuple(self._steps_by_size),
            finished=dict(self._finished),
        )
