"""How far two runs of the same prompts are apart. Pure functions of numbers, natural logarithms throughout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from peg.parity.reading import Reading
from peg.plan import TokenLogprobs

_Pair: TypeAlias = tuple[TokenLogprobs, TokenLogprobs]
_MUTUAL = 8  # a pick must be among so many of the other run's likeliest for a flip to be a tie


@dataclass(frozen=True, slots=True)
class Flip:
    """The first place where two greedy runs of one prompt part. `reading` is the first run's name for it.

    `margins`: how much less likely each run thought the other's pick than its own. `mutual`: each pick was among
    the other run's top eight.
    """

    reading: str
    step: int
    token_ids: tuple[int, int]
    margins: tuple[float, float]
    mutual: bool

    def is_tie(self, line: float) -> bool:
        """Whether both runs could as well have picked the other's token."""
        return self.mutual and max(self.margins) <= line


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was measured between two runs at the same positions of the same texts.

    `differences` has one entry for each token that either run had among its likeliest, at each position; `regrets` one
    a position: how much less likely one run's best token was to the other run than that one's own best. `agreed`
    counts the positions with the same best token.
    """

    differences: tuple[float, ...]
    regrets: tuple[float, ...]
    agreed: int
    flips: tuple[Flip, ...] = ()

    @property
    def positions(self) -> int:
        return len(self.regrets)

    @property
    def mean(self) -> float:
        return math.fsum(self.differences) / len(self.differences)

    @property
    def p99(self) -> float:
        return sorted(self.differences)[math.ceil(0.99 * len(self.differences)) - 1]

    @property
    def regret(self) -> float:
        """The worst."""
        return max(self.regrets)


def compare_prompts(one: Sequence[Reading], other: Sequence[Reading]) -> Comparison:
    """Measure two runs over the same prompts, all of whose numbers are finite.

    What a run did not list is at most as likely as the last that it did: the difference to that counts.
    """
    return _measure([pair for a, b in _matched(one, other) for pair in zip(a.scored, b.scored, strict=True)], [])


def compare_continuations(one: Sequence[Reading], other: Sequence[Reading]) -> Comparison:
    """The same over what was generated, of each prompt up to the first flip, itself included.

    Behind a flip the two runs read different texts, so there is nothing more to compare.
    """
    pairs: list[_Pair] = []
    flips: list[Flip] = []
    for mine, yours in _matched(one, other):
        for step, (a, b) in enumerate(zip(mine.greedy, yours.greedy, strict=True)):
            pairs.append((a, b))
            if a.token_id != b.token_id:
                flips.append(_flip(mine.name, step, a, b))
                break
    return _measure(pairs, flips)


def _matched(one: Sequence[Reading], other: Sequence[Reading]) -> Iterator[tuple[Reading, Reading]]:
    for mine, yours in zip(one, other, strict=True):
        assert mine.prompt_ids == yours.prompt_ids, f"{mine.name} and {yours.name} are different prompts"
        yield mine, yours


def _measure(pairs: Sequence[_Pair], flips: Sequence[Flip]) -> Comparison:
    return Comparison(
        differences=tuple(difference for pair in pairs for difference in _differences(*pair)),
        regrets=tuple(max(_regret(a, b), _regret(b, a)) for a, b in pairs),
        agreed=sum(a.top[0][0] == b.top[0][0] for a, b in pairs),
        flips=tuple(flips),
    )


def _differences(a: TokenLogprobs, b: TokenLogprobs) -> Iterator[float]:
    left, right = dict(a.top), dict(b.top)
    if a.token_id == b.token_id:
        left.setdefault(a.token_id, a.logprob)
        right.setdefault(b.token_id, b.logprob)
    for token in left.keys() | right.keys():
        if token in left and token in right:
            yield abs(left[token] - right[token])
        elif token in left:
            yield max(0.0, left[token] - b.top[-1][1])
        else:
            yield max(0.0, right[token] - a.top[-1][1])


def _regret(judge: TokenLogprobs, other: TokenLogprobs) -> float:
    """How much less likely than its own best token the judge finds the other's best."""
    return judge.top[0][1] - _logprob(judge, other.top[0][0])


def _flip(reading: str, step: int, a: TokenLogprobs, b: TokenLogprobs) -> Flip:
    def knows(judge: TokenLogprobs, token: int) -> bool:
        return token in {listed for listed, _ in judge.top[:_MUTUAL]}

    return Flip(
        reading=reading,
        step=step,
        token_ids=(a.token_id, b.token_id),
        margins=(a.logprob - _logprob(a, b.token_id), b.logprob - _logprob(b, a.token_id)),
        mutual=knows(a, b.token_id) and knows(b, a.token_id),
    )


def _logprob(entry: TokenLogprobs, token: int) -> float:
    """A token's logprob, or the most that it can be where it was not listed."""
    return dict(entry.top).get(token, entry.top[-1][1])
