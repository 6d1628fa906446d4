"""A step that a device works on, and what it came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from peg.plan import RankAck, Slice, StepPlan, TokenLogprobs
from peg.ranks.device import Landing
from peg.ranks.logprobs import NUM_SCORES, read_logprobs
from peg.ranks.sampling import Draw, read_tokens


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device works on, or is done with. `landing` brings what `read` takes, in the order there.

    `alone`: it may fail at the cost of its own sequences, so no other step begins before it has ended.
    """

    plan: StepPlan
    landing: Landing
    digest: int
    free_rows: int
    collectives: int
    draws: tuple[Draw, ...]
    alone: bool

    def read(self, rank: int) -> RankAck:
        """What the step came to on this rank, once its landing is done. Raises RankError."""
        plan, landed = self.plan, list(self.landing.tensors)
        token_ids = read_tokens(landed.pop(0)) if self.draws else ()
        return RankAck(
            step=plan.step,
            epoch=plan.epoch,
            rank=rank,
            token_ids=token_ids,
            digest=self.digest,
            free_rows=self.free_rows,
            collectives=self.collectives,
            logprobs=_sampled_logprobs(token_ids, self.draws, landed),
            prompt_logprobs=_prompt_logprobs(plan.slices, landed),
        )


def _sampled_logprobs(
    token_ids: Sequence[int], draws: Sequence[Draw], landed: list[Tensor]
) -> tuple[TokenLogprobs | None, ...]:
    """One entry for each sampled token, None where none was asked for; nothing at all where none was scored."""
    wanted = [index for index, draw in enumerate(draws) if draw.params.logprobs is not None]
    if not wanted or not landed:
        return ()
    scores = [landed.pop(0) for _ in range(NUM_SCORES)]
    tops = [draws[index].params.logprobs or 0 for index in wanted]
    found = dict(zip(wanted, read_logprobs([token_ids[index] for index in wanted], tops, scores), strict=True))
    return tuple(found.get(index) for index in range(len(draws)))


def _prompt_logprobs(slices: Sequence[Slice], landed: list[Tensor]) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """For each slice those of its targets; nothing at all where none was scored."""
    if not landed:
        return ()
    tokens = [token for piece in slices for token in piece.targets]
    tops = [piece.prompt_logprobs for piece in slices for _ in piece.targets]
    scored = iter(read_logprobs(tokens, tops, landed))
    return tuple(tuple(next(scored) for _ in piece.targets) for piece in slices)
