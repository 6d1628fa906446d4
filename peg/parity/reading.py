"""What one run of a model said about one prompt."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from peg.plan import TokenLogprobs

TOP = 64
"""Likeliest tokens that are kept at each position."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One prompt, teacher-forced and then continued greedily. `name` says which, and how it was read.

    `scored` has an entry for each prompt token but the first, `greedy` one for each token that was generated.
    """

    name: str
    prompt_ids: tuple[int, ...]
    scored: tuple[TokenLogprobs, ...]
    greedy: tuple[TokenLogprobs, ...] = ()

    def front(self, tokens: int) -> Reading:
        """What was said about the first tokens of the prompt alone."""
        return replace(self, prompt_ids=self.prompt_ids[:tokens], scored=self.scored[: tokens - 1], greedy=())

    def not_finite(self) -> str | None:
        """The first place with a number that is not finite, None where there is none."""
        for part, entries in (("prompt", self.scored), ("generated", self.greedy)):
            for place, entry in enumerate(entries):
                bad = next((value for value in _values(entry) if not math.isfinite(value)), None)
                if bad is not None:
                    return f"logprob {bad} at {part} token {place + (part == 'prompt')}"
        return None


def _values(entry: TokenLogprobs) -> Iterator[float]:
    yield entry.logprob
    for _, value in entry.top:
        yield value
