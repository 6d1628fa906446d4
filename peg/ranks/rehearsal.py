"""The steps that a rank runs before it is ready, so that whatever is made on first use is made then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from peg.plan import NewRow, SamplingParams, Slice, StepPlan

_RULED = SamplingParams(
    temperature=0,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias=((0, 1.0),),
    min_tokens=1 << 30,
    allowed_token_ids=frozenset(range(64)),
    bad_words=((1,), (0, 0)),
)
_FILTERED = SamplingParams(temperature=1, top_k=2, top_p=0.5, min_p=0.1)
_DRAWS = (SamplingParams(temperature=0, logprobs=1), SamplingParams(temperature=1), _FILTERED, _RULED)
_EVERYTHING = replace(_RULED, temperature=1, top_k=2, top_p=0.5, min_p=0.1, logprobs=20)
_MASK = b"\xff" * 8  # under which those are drawn too that have the fewest tokens


@dataclass(slots=True)
class Rehearsal:
    """Plans over rows of padding, whose tables name the reserved block alone. Each is run once, in order.

    First chunks of `chunk` tokens up to a context of nearly `context`, each with up to `targets` scored; then decode
    steps of so many rows as `batches` say, the long one among them, drawn in every way; then the most rows, each drawn
    in all ways at once, which takes the most memory; then single chunks of 1, 2, 4, … tokens.
    """

    chunk: int
    targets: int
    batches: Sequence[int]
    context: int
    num_groups: int
    block_size: int
    _stored: dict[int, int] = field(default_factory=dict, init=False)
    _step: int = field(default=-1, init=False)
    _draws: Sequence[SamplingParams] = field(default=_DRAWS, init=False)

    def plans(self) -> Iterator[StepPlan]:
        """For a rank without rows; they leave rows behind."""
        long = max(1, self.context - len(self.batches) - 1)
        while self._stored.get(0, 0) < long:
            yield self._plan({0: min(self.chunk, long - self._stored.get(0, 0))}, targets=self.targets)
        for batch in self.batches:
            yield self._plan(dict.fromkeys(range(batch), 1))
        rows = range(self.batches[-1])
        self._draws = (_EVERYTHING,)
        yield self._plan(dict.fromkeys(rows, 1), released=tuple(rows))
        size = 1
        while size < min(self.chunk, self.context) and self.batches[-1] > 1:
            yield self._plan({1: size}, released=(1,))
            size *= 2

    def _plan(self, counts: dict[int, int], *, targets: int = 0, released: tuple[int, ...] = ()) -> StepPlan:
        """A slice of so many tokens for each row; rows that are not in use yet, or are released, begin."""
        self._step += 1
        for row in released:
            del self._stored[row]
        new = tuple(self._new(row) for row in counts if row not in self._stored)
        slices = tuple(self._slice(row, count, targets) for row, count in counts.items())
        return StepPlan(self._step, -1, slices, released_rows=released, new_rows=new)

    def _draw(self, row: int) -> SamplingParams:
        return self._draws[row % len(self._draws)]

    def _new(self, row: int) -> NewRow:
        self._stored[row] = 0
        table = (0,) * (-(-self.context // self.block_size))
        return NewRow(row, row, self._draw(row), (0,), (), (table,) * self.num_groups, (1,))

    def _slice(self, row: int, count: int, targets: int) -> Slice:
        start = self._stored[row]
        self._stored[row] = start + count
        token_ids = None if start and not targets else (0,) * count
        mask = _MASK if self._draw(row).min_tokens else None
        return Slice(row, row, start, count, token_ids, True, (0,) * min(targets, count), 1, mask)
