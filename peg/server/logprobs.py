"""Log-probabilities as answers show them: one entry for each token that the usage counts, whatever text it gave."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from peg.plan import TokenLogprobs
from peg.text.tokenizer import Tokenizer

_LOWEST = -9999.0  # what −inf is told as: JSON has no infinity


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How tokens are written: as their text, half a character as U+FFFD, or as `token_id:123`, which no two share."""

    tokenizer: Tokenizer
    as_ids: bool = False

    def __call__(self, token_id: int) -> str:
        if self.as_ids:
            return f"token_id:{token_id}"
        return self.tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def bytes(self, token_id: int) -> list[int]:
        """The token's true bytes, half a character included."""
        return list(self.tokenizer.token_bytes(token_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """What an answer tells beside its text. Counts are of top logprobs, None for no logprobs at all."""

    names: TokenNames
    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool
    token_ids: bool

    @property
    def tells_tokens(self) -> bool:
        """Whether an event tells its tokens, so that one without text is needed too."""
        return self.logprobs is not None or self.token_ids

    @property
    def scored_prompt(self) -> int | None:
        """How many top logprobs are wanted at each position of the prompt: its own, and those that `echo` repeats."""
        echoed = self.logprobs if self.echo else None
        return max((count for count in (self.prompt_logprobs, echoed) if count is not None), default=None)


class ChatScore(msgspec.Struct, frozen=True):
    """One token of `logprobs.content`, or one of its `top_logprobs`."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenScore(ChatScore, frozen=True):
    """One token of `logprobs.content`."""

    top_logprobs: list[ChatScore]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a chat completion's choice."""

    content: list[ChatTokenScore]
    refusal: None = None


def chat_logprobs(names: TokenNames, scores: Sequence[TokenLogprobs | None]) -> ChatLogprobs:
    """The scores of generated tokens, one each."""

    def named(token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        return names(token_id), max(logprob, _LOWEST), names.bytes(token_id)

    return ChatLogprobs(
        [
            ChatTokenScore(*named(score.token_id, score.logprob), [ChatScore(*named(*top)) for top in score.top])
            for score in scores
            if score is not None
        ]
    )


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a completion's choice, or of one piece of it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionScores:
    """Tells one choice's logprobs piece by piece: `text_offset` counts on over all token texts, the prompt's too."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offset = 0

    def tell(self, token_ids: Sequence[int], scores: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        """The next tokens, and a score for each: None for a prompt's first, which nothing comes before."""
        tokens = [self._names(token_id) for token_id in token_ids]
        *offsets, self._offset = itertools.accumulate(map(len, tokens), initial=self._offset)
        return CompletionLogprobs(
            tokens,
            [None if score is None else max(score.logprob, _LOWEST) for score in scores],
            [None if score is None else self._top(score) for score in scores],
            offsets,
        )

    def _top(self, score: TokenLogprobs) -> dict[str, float]:
        """The best tokens, and the chosen one in any case. Of several that read alike the best stands for all."""
        top: dict[str, float] = {}
        for token_id, logprob in (*score.top, (score.token_id, score.logprob)):
            top.setdefault(self._names(token_id), max(logprob, _LOWEST))
        return top


class PromptScore(msgspec.Struct, frozen=True):
    """One candidate at one position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


def prompt_logprobs(
    names: TokenNames, scores: Sequence[TokenLogprobs | None], count: int
) -> list[dict[str, PromptScore] | None]:
    """`prompt_logprobs`: for each position the `count` best by id, and the token that is there."""

    def entry(score: TokenLogprobs) -> dict[str, PromptScore]:
        ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(score.top[:count], 1)]
        ranked.append((score.token_id, score.logprob, score.rank))
        return {
            str(token_id): PromptScore(max(logprob, _LOWEST), rank, names(token_id))
            for token_id, logprob, rank in ranked
        }

    return [None if score is None else entry(score) for score in scores]
