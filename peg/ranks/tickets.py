"""The steps that are out, and the comparison of what the ranks say about each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from peg.failure import Cause, CauseKind
from peg.plan import RankAck, Skipped, StepFailed, StepOutcome, StepResult, Unread

Answer: TypeAlias = RankAck | StepFailed | Unread | Skipped
"""What one rank says about one step."""


@dataclass(slots=True)
class Ticket:
    """One step that is out, and the answers so far, by rank. Guarded by the group's lock."""

    world_size: int
    answers: dict[int, Answer] = field(default_factory=dict)

    def add(self, rank: int, answer: Answer) -> bool:
        """Take an answer; whether it was the last."""
        assert rank not in self.answers, f"rank {rank} answered step {answer.step} twice"
        self.answers[rank] = answer
        return len(self.answers) == self.world_size

    def conclude(self) -> StepOutcome | Cause:
        """What all ranks together say; a cause where they do not agree."""
        answers = [self.answers[rank] for rank in range(self.world_size)]
        acks = [answer for answer in answers if isinstance(answer, RankAck)]
        unread = next((answer for answer in answers if isinstance(answer, Unread)), None)
        if unread is not None:
            return (_divergence(acks) if acks else None) or unread
        first = answers[0]
        if not isinstance(first, RankAck):
            assert self.world_size == 1, "only a rank without peers fails a step by itself"
            return first
        assert len(acks) == self.world_size
        return _divergence(acks) or StepResult(
            first.step, first.epoch, first.token_ids, first.logprobs, first.prompt_logprobs
        )


def _divergence(acks: Sequence[RankAck]) -> Cause | None:
    """Sampled ids, digests, free rows and the number of collectives must be the same everywhere."""
    first = acks[0]
    if all(
        (ack.token_ids, ack.digest, ack.free_rows, ack.collectives)
        == (first.token_ids, first.digest, first.free_rows, first.collectives)
        for ack in acks
    ):
        return None
    told = []
    odd: set[int] = set()
    for name in ("token_ids", "digest", "free_rows", "collectives"):
        sayings: dict[object, list[int]] = {}
        for ack in acks:
            sayings.setdefault(getattr(ack, name), []).append(ack.rank)
        if len(sayings) > 1:
            told.append(f"{name}: " + "; ".join(f"{value} on rank {_list(ranks)}" for value, ranks in sayings.items()))
            odd.update(*[ranks for ranks in sayings.values() if 2 * len(ranks) < len(acks)])
    return Cause(
        kind=CauseKind.RANK_DIVERGED,
        message=f"ranks differ after step {first.step} in {', '.join(told)}",
        rank=odd.pop() if len(odd) == 1 else None,
        step=first.step,
    )


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
